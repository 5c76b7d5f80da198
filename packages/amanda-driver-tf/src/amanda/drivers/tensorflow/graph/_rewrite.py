"""Analysis of a body's operations in order, and edits of its nodes for the recorded actions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from amanda.backend import Action, OpFacts, Side, Value, digest
from amanda.errors import RoutineError
from amanda.plan import Actions, Plan

from .._operation import TensorFlowOperation
from ._autodiff import Pullbacks, RecalledTensor
from ._body import Body, RewrittenBody, TensorFlowRewriting, op_id
from ._calls import rewrite_calls
from ._control_flow import CONTROL_FLOW_OPS, behind_control_flow, insert_at_control_flow
from ._facts import facts_of, grouped_outputs, inputs_of, outputs_of
from ._gradients import GradientEdges, PassThroughOps
from ._nodes import Edge, input_sizes, output_sizes, references
from ._routines import ForeignInput, RoutineRewriter
from ._slots import on_several_devices
from ._values import OpSide, dtype_enum, op_side

_PUSHES = ("StackPushV2", "TensorListPushBack", "OptionalFromValue")
"""Ops that store a tensor of a loop's round or of a branch for the gradients of all its readers."""


def rewrite(body: Body, rewriting: TensorFlowRewriting) -> RewrittenBody:
    """Analyse each operation of a body, and edit its nodes and the functions that they call."""
    rewriting.several_devices = rewriting.several_devices or on_several_devices(body.ops)
    return BodyRewriter(body, rewriting).rewrite()


class BodyRewriter(RoutineRewriter):
    """Edits the nodes of a body.

    edges: refs of redirected inputs, by node and flat position.
    gradient_reads: by an operation and a tensor that it reads or computes, the ref that its gradient
    operations read instead.
    gradient_reads_by_input: likewise by position, for a tensor that is several inputs of the operation.
    returned_refs: refs that the body returns instead of a tensor, where its other readers do not change.
    call_numbers: by the name of an operation whose functions were edited, the ref of its number, if any.
    """

    def __init__(self, body: Body, rewriting: TensorFlowRewriting) -> None:
        super().__init__(body, rewriting)
        self.edges: dict[tuple[str, int], str] = {}
        self.gradient_reads: dict[tuple[str, Edge], str] = {}
        self.gradient_reads_by_input: dict[tuple[str, Edge], dict[int, str]] = {}
        self.returned_refs: dict[Edge, str] = {}
        self.call_numbers: dict[str, str] = {}
        self.forward = {op: forward for op in body.ops if (forward := body.forward_of(op)) is not None}
        # A file has no backward pass that could read saved values.
        if self.forward and not rewriting.written:
            rewriting.differentiated = True
        self.gradients = GradientEdges(body, self.forward)
        self.pullbacks = Pullbacks(self)
        self.passing = PassThroughOps(self)
        self._has_backward = body.backward or bool(self.forward)
        self._calls: list[str] = []
        self._in_flow = behind_control_flow(body.ops)
        self._wants_backward = any(stack.wants_backward for stack in rewriting.analysis.stack.chain)
        self._recall_refs: dict[Any, str] = {}
        self._edges_by_node: dict[str, list[Edge]] = {}
        self._by_id: dict[int, tf.Operation] = {}
        self._by_name = {body.node_name(op): op for op in self.forward}
        # A push stores a tensor for all its readers, so it must not read what a routine changed for one of
        # them.
        self._forward_name = {
            body.node_name(op): body.node_name(forward)
            for op, forward in self.forward.items()
            if forward.graph is op.graph and op.type not in _PUSHES
        }
        # Without frames, an op behind control flow of version 1 may not have run, so nothing waits for its
        # routines.
        self.insertions.forward = {
            name: forward
            for op, forward_op in self.forward.items()
            if (forward := self._forward_name.get(name := body.node_name(op), "")) in body.nodes
            and (body.frames is not None or self._in_flow.isdisjoint((op, forward_op)))
        }
        self.insertions.dependencies.in_flow = {body.node_name(op) for op in self._in_flow}

    def rewrite(self) -> RewrittenBody:
        """Run the rewrite; return the edited nodes."""
        self.run()
        # Observers wait for others to share their node; those that still wait get their nodes now.
        self.insertions.flush()
        if self.forward and self.rewriting.autodiff_places:
            self.passing.report_missed(self.body.backward)
            if self.body.guessed:
                self.passing.report_guessed(self.body.ops)
        inserted_nodes = self.insertions.nodes
        changed = bool(inserted_nodes or self.call_numbers)
        if changed:
            self._write_inputs()
        nodes = [node for name, node in self.body.nodes.items() if name not in self.removed]
        numbered = [name for name, number in self.call_numbers.items() if number]
        numbers = self.insertions.dependencies.numbers
        outputs = [self.returned_refs.get(edge) or self._ref_of(edge) for edge in self.body.outputs]
        return RewrittenBody(
            [*nodes, *inserted_nodes], outputs, self.insertions.inserted, self.removed, changed, numbered,
            self._has_backward,
            {self.removed.get(name, name): number for name, number in numbers.items()},
        )  # fmt: skip

    def at_node(self, op: tf.Operation) -> None:
        """Analyse an operation, and edit it."""
        forward = self.forward.get(op)
        if forward is not None and self.rewriting.written:
            self.rewriting.report(f"the backward ops of {forward.name}", "only forward ops are, of a file")
        elif forward is not None:
            self._rewrite_backward(op, forward)
        elif not self.body.backward:
            facts, outputs = self.facts(op), grouped_outputs(op, self._node(op))
            plan = self.rewriting.analysis.forward(facts, outputs)
            if plan:  # most operations have no actions, and need no sides
                self.act(op, plan, *self.sides(op), facts)
        self.leave(op, False)

    def leave(self, op: tf.Operation, replaced: bool) -> None:
        """Rewrite the functions that an operation calls; no effect if it calls none."""
        edited_call, dependencies = rewrite_calls(self, op, rewrite), self.insertions.dependencies
        if edited_call is None:
            return
        self._has_backward = self._has_backward or edited_call.backward
        name, number = self.body.node_name(op), self.body.number_at(op, True)
        self.call_numbers[name] = edited_call.number
        if edited_call.backward:
            self._wait_for_calls(op, number)
        dependencies.add_node(name, name, number)
        if op not in self._in_flow:
            self._calls.append(name)

    def _wait_for_calls(self, op: tf.Operation, number: str) -> None:
        """Make a call with gradient operations, and its number, wait for the calls that save values for it.

        The call waits for the last call with gradient operations, which has waited for those before, and for
        the calls since. Behind control flow of version 1, where other calls may not run, it waits for its
        forward operation and for the operations that it reads. All routines in the call read its number.
        """
        name = self.body.node_name(op)
        if op in self._in_flow:
            near_names = {
                self._forward_name.get(name),
                *(self.body.node_name(tensor.op) for tensor in op.inputs),
            }
            calls_before = [
                call_name for call_name in self.call_numbers if call_name in near_names and call_name != name
            ]
        else:
            calls_before, self._calls = self._calls, []
        control_inputs = self.insertions.dependencies.control_inputs_after(calls_before, number)
        number_read = self.call_numbers[name]
        if control_inputs and number_read:
            rank = int(self.body.depth_of(op) > 0 or number_read != number)
            self.call_numbers[name] = self.insertions.dependencies.number_after(
                number_read, rank, control_inputs
            )
        elif control_inputs:
            ahead = self.insertions.ahead.setdefault(name, [])
            ahead += [self.removed.get(text[1:], text[1:]) for text in control_inputs]

    def sides(self, op: tf.Operation) -> tuple[OpSide, OpSide]:
        """Return the inputs and outputs of an operation with their present refs."""
        node = self._node(op)
        outputs = outputs_of(op, node)
        refs = [self.body.syntax.write(Edge(node.name, i)) for i in range(len(outputs))]
        by_reference = references(node, outputs=True)
        return self._inputs_of(op), OpSide(op, False, refs, outputs, output_sizes(node), by_reference)

    def _inputs_of(self, op: tf.Operation) -> OpSide:
        """Return the inputs of an operation with their present refs."""
        node = self._node(op)
        refs = [self._ref_at(node.name, i, edge) for i, edge in enumerate(self._edges(node))]
        return OpSide(op, True, refs, inputs_of(op, node), input_sizes(node), references(node))

    def facts(self, op: tf.Operation, inputs: Side | None = None) -> OpFacts:
        """Return the facts of an operation, for tools."""
        body, rewriting, node = self.body, self.rewriting, self._node(op)
        identity, depth = op_id(body, op.name), body.depth_of(op)
        facts = facts_of(
            op, identity, rewriting.namespace, body.read_value, node, body.identity,
            body.variable_of, body.place_of(op),
        )  # fmt: skip
        if rewriting.written:
            facts.source = ""  # TensorFlow has the line that loads the file
        rewriting.facts_by_id.setdefault(op, {})[identity] = facts
        self._by_id[identity] = op
        if depth:
            rewriting.depths[identity] = depth
        return facts

    def act(
        self, op: tf.Operation, plan: Plan | Actions, inputs: Side, outputs: Side, facts: OpFacts
    ) -> bool:
        """Put the actions of a plan at an operation; redirect its gradient operations to changed values."""
        replaced = False
        if self.body.syntax.dead_values and op.type in CONTROL_FLOW_OPS:
            insert_at_control_flow(self, op, plan, inputs, outputs, facts)
        else:
            replaced = super().act(op, plan, inputs, outputs, facts)
        self.redirect_readers(outputs)
        if facts.backward_op is not None:
            return replaced
        name = self.body.node_name(op)
        changed = inputs.changed()
        # Inputs are parsed only where a routine has changed one: most operations have no actions.
        edges = self._edges(self.body.nodes[name]) if changed else []
        for i in changed:
            self.edges[name, i] = inputs.refs[i]
            self._redirect_gradients(op, facts.op_id, edges[i], inputs.symbols[i], inputs.refs[i])
            if edges.count(edges[i]) > 1:
                self._separate_repeated_reads(op, facts.op_id, edges, inputs, edges[i])
        for i in outputs.changed():
            edge, tensor = Edge(name, i), outputs.symbols[i]
            self._redirect_gradients(op, facts.op_id, edge, tensor, op_side(outputs).op_refs[i])
            if op.type == "Identity":
                self._redirect_readers(op, tensor, outputs.refs[i])
        return replaced

    def follow(self, op: tf.Operation, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Record the refs of the outputs of a replaced operation."""
        if replaced:
            op_side(outputs).op_refs = list(outputs.refs)

    def _redirect_readers(self, op: tf.Operation, tensor: Any, ref: str) -> None:
        """Make gradients of the readers of an Identity read its changed output; see `_redirect_gradients`."""
        source = self.insertions.source_of(ref)
        if source is None:
            return
        operand = op.inputs[0]
        for reader in tensor.consumers():
            if all(
                read_tensor.op is not operand.op or read_tensor.value_index != operand.value_index
                for read_tensor in reader.inputs
            ):
                self.rewriting.saved_values.setdefault(
                    (op_id(self.body, reader.name), operand.op.name, operand.value_index), source
                )

    def reads(self, action: Action, inputs: OpSide, facts: OpFacts) -> list[ForeignInput]:
        """Return the inputs of other operations that a replacement reads."""
        reads = []
        for identity, position in action.reads:
            op = self._by_id.get(identity)
            if op is None:
                raise RoutineError(
                    f"{action} of {type(action.tool).__name__} is to read input {position} of op "
                    f"{identity:#018x}; no op that was analysed before {facts.name} in this graph has that id"
                )
            side = inputs if op is inputs.op else self._inputs_of(op)
            for i in side.flat([position]):
                reads.append(ForeignInput(Value(side.refs[i], side.symbols[i]), identity, i))
        return reads

    def _separate_repeated_reads(
        self, op: tf.Operation, identity: int, edges: list[Edge], inputs: Side, edge: Edge
    ) -> None:
        """Record refs by position for a tensor that is several inputs of an operation."""
        positions = [i for i, read_edge in enumerate(edges) if read_edge == edge]
        changed = inputs.changed()
        self.gradient_reads_by_input[self.body.node_name(op), edge] = {i: inputs.refs[i] for i in positions}
        tensor = inputs.symbols[positions[0]]
        self.rewriting.saved_values_by_input[identity, tensor.op.name, tensor.value_index] = {
            i: self.insertions.source_of(inputs.refs[i]) if i in changed else None for i in positions
        }

    def _redirect_gradients(self, op: tf.Operation, identity: int, edge: Edge, tensor: Any, ref: str) -> None:
        """Record that the gradient operations of an operation are to read `ref` instead of a tensor.

        The same holds for what is saved of the tensor for gradients.
        """
        self.gradient_reads.setdefault((self.body.node_name(op), edge), ref)
        source = self.insertions.source_of(ref)
        if source is None:
            return
        self.rewriting.saved_values.setdefault((identity, tensor.op.name, tensor.value_index), source)
        own_inputs = {(input_tensor.op, input_tensor.value_index) for input_tensor in op.inputs}
        # TensorFlow's loops accumulate the input of an Identity for their gradients, not its output.
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
            if (tensor.op, tensor.value_index) not in own_inputs:
                self.rewriting.saved_values[identity, tensor.op.name, tensor.value_index] = source

    def _rewrite_backward(self, op: tf.Operation, forward: tf.Operation) -> None:
        """Redirect a gradient operation to changed values, insert pullbacks, and analyse it."""
        node = self._node(op)
        forward_id, forward_facts = self.analysed_forward(forward) or self._facts_without_run(forward)
        if forward_id in self.rewriting.autodiff_places and self.body.order_of(op) > 1:
            self.rewriting.report(
                f"second gradients of {forward.name}",
                "they are not differentiated through routines that take part in autodiff, or replace it",
            )
        entering = self.gradients.entering(op)
        self._read_saved_values(op, node, forward_id, entering)
        self.pullbacks.insert_at_outputs(op, forward, forward_id)
        # Without tools for backward ops, gradient operations are redirected, but need no analysis.
        if self._wants_backward:
            self._analyse_backward(op, node, forward_id, forward_facts)
        if self.rewriting.autodiff_places and self.gradients.last(forward) is op:
            self._pull_at_inputs(op, forward, forward_id)

    def analysed_forward(self, forward: tf.Operation) -> tuple[int, OpFacts] | None:
        """Return id and facts of an analysed forward operation; None for others."""
        return self.rewriting.analysed_forward(forward, self.body.forward_id(forward))

    def _pull_at_inputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        """Insert pullbacks at the last backward operation, and redirect the readers of gradients."""
        pass_through = self.passing.positions(forward)
        pulled = self.pullbacks.insert_at_inputs(op, forward, forward_id, pass_through)
        for i, (tensor, ref) in pulled.items():
            vanilla = self.read_tensor(tensor)
            if i not in pass_through and ref != vanilla:
                self.current[self.body.syntax.write(self.edge(tensor))] = vanilla = ref
            self.passing.redirect_gradient(op, forward.inputs[i], tensor, ref, vanilla)

    def redirect(self, op: tf.Operation, index: int, ref: str) -> None:
        """Make an input of an operation, by its position, read `ref`."""
        self.edges[self.body.node_name(op), index] = ref

    def _analyse_backward(self, op: tf.Operation, node: Any, forward_id: int, forward: OpFacts) -> None:
        """Analyse a backward operation, and put the recorded actions at it."""
        backward_id = digest(forward_id, self.body.identity, op.name)
        facts = forward.at_backward(TensorFlowOperation(op.type, op.name, op), backward_id, True)
        entering = self.gradients.entering(op)
        outputs = outputs_of(op, node)
        leaving = [i for i in self.gradients.leaving(op) if i < len(outputs)]
        facts.grad_outputs = [op.inputs[i] for i in entering]
        plan = self.rewriting.analysis.backward(facts, [outputs[i] for i in leaving])
        if not plan:
            return
        before = OpSide(op, True, [self.read_at(op, i) for i in entering], facts.grad_outputs)
        refs = [self.body.syntax.write(Edge(node.name, i)) for i in leaving]
        after = OpSide(op, False, refs, [outputs[i] for i in leaving])
        self.act(op, plan, before, after, facts)
        for i in before.changed():
            self.edges[node.name, entering[i]] = before.refs[i]

    def _facts_without_run(self, op: tf.Operation) -> tuple[int, OpFacts]:
        """Return id and facts of a forward operation that does not run, while its gradients do."""
        identity = op_id(self.body, op.name)
        facts = facts_of(
            op, identity, self.rewriting.namespace, self.body.read_value,
            variable_of=self.body.variable_of, place=self.body.place_of(op),
        )  # fmt: skip
        self.rewriting.analysis.absent(facts, grouped_outputs(op, op.node_def))
        self.rewriting.facts_by_id.setdefault(op, {})[identity] = facts
        return identity, facts

    def _read_saved_values(self, op: tf.Operation, node: Any, forward_id: int, entering: list[int]) -> None:
        """Make a gradient operation read the saved values of its forward operation in another graph."""
        for i, tensor in enumerate(inputs_of(op, node)):
            captured = None if i in entering else self.body.captured(tensor)
            if captured is None:
                continue
            saved_key = (forward_id, captured.op.name, captured.value_index)
            source = self.rewriting.saved_values.get(saved_key)
            shared = self.rewriting.saved_values_by_input.get(saved_key)
            if shared is not None:
                source = shared[self.gradients.which_input(op, i, list(shared))]
            if source is None:
                continue
            recall_key = source, self.body.number_at(op, True)  # each loop frame needs its own node
            if recall_key not in self._recall_refs:
                self.rewriting.readers[source[0]].read_once = False
                recalled = RecalledTensor(*source, self.rewriting.depths.get(source[0][0], 0))
                name = self.insertions.add(op, recalled, (), (), [dtype_enum(tensor)], ahead=True)
                self._recall_refs[recall_key] = self.insertions.output_of(name, 0)
            self.edges[node.name, i] = self._recall_refs[recall_key]

    def _edges(self, node: Any) -> list[Edge]:
        """Return the tensors that a node's inputs named before any edit."""
        edges = self._edges_by_node.get(node.name)
        if edges is None:
            parse = self.body.syntax.parse
            edges = [parse(text) for text in node.input if not text.startswith("^")]
            self._edges_by_node[node.name] = edges
        return edges

    def _node(self, op: tf.Operation) -> Any:
        return self.body.nodes[self.body.node_name(op)]

    def edge(self, tensor: Any) -> Edge:
        """Return the node that computes a tensor, and the index of the tensor among its outputs."""
        return Edge(self.body.node_name(tensor.op), tensor.value_index)

    def _ref_at(self, name: str, index: int, edge: Edge) -> str:
        """Return the present ref of an input of a node."""
        redirected = self.edges.get((name, index))
        if redirected is not None:
            return redirected
        forward = self._forward_name.get(name)
        if forward is not None and (forward, edge) in self.gradient_reads:
            shared = self.gradient_reads_by_input.get((forward, edge))
            if shared is None:
                return self.gradient_reads[forward, edge]
            return shared[self.gradients.which_input(self._by_name[name], index, list(shared))]
        return self._ref_of(edge)

    def read_at(self, op: tf.Operation, index: int) -> str:
        """Return the present ref of an input of an operation, by its position."""
        node = self._node(op)
        return self._ref_at(node.name, index, self._edges(node)[index])

    def _ref_of(self, edge: Edge) -> str:
        """Return the present ref of a tensor by its node and index."""
        ref = self.body.syntax.write(edge)
        return str(self.current.get(ref, ref))

    def read_tensor(self, tensor: Any) -> str:
        """Return the present ref of a tensor."""
        return self._ref_of(self.edge(tensor))

    def _write_inputs(self) -> None:
        """Write the present refs into all nodes, with control inputs for the nodes ahead of them."""
        for name, node in self.body.nodes.items():
            if name in self.removed:
                continue
            control_names = [text[1:] for text in node.input if text.startswith("^")]
            refs = [self._ref_at(name, i, edge) for i, edge in enumerate(self._edges(node))]
            nodes_ahead = [behind for control in control_names for behind in self._nodes_behind(control)]
            nodes_ahead += self.insertions.ahead.get(name, [])
            number = [self.call_numbers[name]] if self.call_numbers.get(name) else []
            inputs = [*refs, *number, *dict.fromkeys(f"^{node_ahead}" for node_ahead in nodes_ahead)]
            # A session copies only nodes that differ from the user's, so unchanged nodes stay untouched.
            if list(node.input) != inputs:
                del node.input[:]
                node.input.extend(inputs)
        # Inserted nodes may wait for an operation that was replaced after they were inserted.
        for node in self.insertions.nodes:
            for i, text in enumerate(node.input):
                if text.startswith("^") and text[1:] in self.removed:
                    node.input[i] = f"^{self.removed[text[1:]]}"

    def _nodes_behind(self, name: str) -> list[str]:
        """Return the node that runs for a node of the body, and those that were inserted behind it."""
        return [self.removed.get(name, name), *self.insertions.behind.get(name, ())]
