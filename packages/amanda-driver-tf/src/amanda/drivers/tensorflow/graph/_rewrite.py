"""Rewrite of the operations of a graph: tools analyse each, and its node is edited for their actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Action, OpFacts, Side, Value, digest
from amanda.errors import RoutineError
from amanda.plan import Actions, Plan

from .._operation import TensorFlowOperation
from ._autodiff import Pullbacks, RecalledTensor, SavedTensor
from ._body import Body, RewrittenBody, TensorFlowRewriting, op_id
from ._calls import rewrite_calls
from ._control_flow import CONTROL_FLOW_OPS, behind_control_flow, insert_at_control_flow
from ._facts import facts_of
from ._gradients import GradientEdges, PassThroughOps, tensor_key
from ._nodes import Edge
from ._routines import ForeignInput, RoutineRewriter
from ._sides import OpSide, PresentRefs, dtype_enum, grouped_outputs, inputs_of, op_side, outputs_of
from ._slots import on_several_devices

_PUSHES = ("StackPushV2", "TensorListPushBack", "OptionalFromValue")
"""Ops that store a tensor of a loop's round or of a branch for the gradients of all its readers."""


def rewrite(body: Body, rewriting: TensorFlowRewriting) -> RewrittenBody:
    """Analyse each operation of a body, and edit its nodes and the functions that they call."""
    rewriting.has_several_devices = rewriting.has_several_devices or on_several_devices(body.ops)
    return BodyRewriter(body, rewriting).rewrite()


class BodyRewriter(RoutineRewriter):
    """Brings each operation of a body to the tools, and edits its node, and what gradients of it read.

    refs: the refs that nodes read at present.
    forward_ops: by a gradient operation, its forward operation.
    number_ref_by_call: by the name of an operation whose functions were edited, the ref of the number that
    they get, or "" in a file.
    `_unawaited_calls`: names of those since the last one with gradient operations.
    """

    def __init__(self, body: Body, rewriting: TensorFlowRewriting) -> None:
        super().__init__(body, rewriting)
        self.number_ref_by_call: dict[str, str] = {}
        self.forward_ops = {op: forward for op in body.ops if (forward := body.forward_of(op)) is not None}
        # A file has no backward pass that could read saved values.
        if self.forward_ops and not rewriting.is_for_file:
            rewriting.is_differentiated = True
        self.gradient_edges = GradientEdges(body, self.forward_ops)
        self.pullbacks = Pullbacks(self)
        self.pass_through_ops = PassThroughOps(self)
        self._has_backward = body.is_backward or bool(self.forward_ops)
        self._unawaited_calls: list[str] = []
        self._conditional_ops = behind_control_flow(body.ops)
        self._wants_backward = any(stack.wants_backward for stack in rewriting.analysis.stack.chain)
        self._recalled_refs: dict[tuple[SavedTensor, str], str] = {}
        self._op_by_id: dict[int, tf.Operation] = {}
        # A push stores a tensor for all its readers, so it must not read what a routine changed for one of
        # them.
        forward_names = {
            body.node_name(op): body.node_name(forward)
            for op, forward in self.forward_ops.items()
            if forward.graph is op.graph and op.type not in _PUSHES
        }
        self._make_routines_at_gradients_wait(forward_names)
        self.refs = PresentRefs(body, self.current_refs, forward_names, self.gradient_edges)
        self.insertions.dependencies.conditional_names = {body.node_name(op) for op in self._conditional_ops}

    def _make_routines_at_gradients_wait(self, forward_names: Mapping[str, str]) -> None:
        """Make routines at gradient operations wait for the routines at their forward operations.

        Fills `insertions.forward_names` with those of `forward_names`, by gradient operation, that run.
        """
        body = self.body
        for op, forward in self.forward_ops.items():
            name = body.node_name(op)
            forward_name = forward_names.get(name, "")
            # Without frames, an op behind control flow of version 1 may not have run, so nothing waits for
            # its routines.
            is_sure_to_run = body.frames is not None or self._conditional_ops.isdisjoint((op, forward))
            if forward_name in body.nodes and is_sure_to_run:
                self.insertions.forward_names[name] = forward_name

    def rewrite(self) -> RewrittenBody:
        """Run the rewrite; return the edited body.  Reports routines whose gradients are lost or guessed."""
        self.run()
        # Observers wait for others to share their node; those that still wait get their nodes now.
        self.insertions.flush()
        if self.forward_ops and self.rewriting.autodiff_places:
            self.pass_through_ops.report_missed(self.body.is_backward)
            if self.body.has_guessed_forwards:
                self.pass_through_ops.report_guessed(self.body.ops)
        inserted_nodes = self.insertions.nodes
        is_changed = bool(inserted_nodes or self.number_ref_by_call)
        if is_changed:
            self._write_inputs()
        remaining_nodes = [
            node for name, node in self.body.nodes.items() if name not in self.replacement_by_name
        ]
        return RewrittenBody(
            nodes=[*remaining_nodes, *inserted_nodes],
            outputs=[self.refs.of_result(edge) for edge in self.body.outputs],
            inserted_names_by_op=self.insertions.inserted_names_by_op,
            replacement_by_name=self.replacement_by_name, is_changed=is_changed,
            edited_call_names=[name for name, number_ref in self.number_ref_by_call.items() if number_ref],
            has_backward_ops=self._has_backward,
            number_ref_by_name={
                self.replacement_by_name.get(name, name): number_ref
                for name, number_ref in self.insertions.dependencies.number_ref_by_name.items()
            },
        )  # fmt: skip

    def rewrite_node(self, op: tf.Operation) -> None:
        """Analyse an operation, and put the recorded actions at it; rewrite the functions that it calls.

        A gradient operation of a file is reported, and stays. Other operations of a backward pass stay, too.
        """
        forward = self.forward_ops.get(op)
        if forward is not None and self.rewriting.is_for_file:
            self.rewriting.report(f"the backward ops of {forward.name}", "only forward ops are, of a file")
        elif forward is not None:
            self._rewrite_backward(op, forward)
        elif not self.body.is_backward:
            facts, outputs = self.facts(op), grouped_outputs(op, self._node(op))
            plan = self.rewriting.analysis.analyse_forward(facts, outputs)
            if plan:  # most operations have no actions, and need no sides
                inputs, outputs_side = self.sides(op)
                self.insert_actions(op, plan, inputs, outputs_side, facts)
        self.rewrite_inner_graphs(op, replaced=False)

    def rewrite_inner_graphs(self, op: tf.Operation, replaced: bool) -> None:
        """Rewrite the functions that an operation calls; no effect if it calls none, or none has routines."""
        edited_call = rewrite_calls(self, op, rewrite)
        if edited_call is None:
            return
        self._has_backward = self._has_backward or edited_call.has_backward_ops
        name, number_ref = self.body.node_name(op), self.body.number_ref_at(op, ahead=True)
        self.number_ref_by_call[name] = edited_call.number_ref
        if edited_call.has_backward_ops:
            self._wait_for_calls(op, number_ref)
        self.insertions.dependencies.add_node(name, name, number_ref)
        if op not in self._conditional_ops:
            self._unawaited_calls.append(name)

    def _wait_for_calls(self, op: tf.Operation, number_ref: str) -> None:
        """Make a call with gradient operations, and its number, wait for the calls that save values for it.

        The call waits for the last call with gradient operations, which has waited for those before, and for
        the calls since. Behind control flow of version 1, where other calls may not run, it waits for its
        forward operation and for the operations that it reads. All routines in the call read its number.
        """
        name = self.body.node_name(op)
        if op in self._conditional_ops:
            source_names = {self.body.node_name(tensor.op) for tensor in op.inputs}
            if name in self.refs.forward_names:
                source_names.add(self.refs.forward_names[name])
            calls_before = [call for call in self.number_ref_by_call if call in source_names and call != name]
        else:
            calls_before, self._unawaited_calls = self._unawaited_calls, []
        control_inputs = self.insertions.dependencies.control_inputs_after(calls_before, number_ref)
        call_number_ref = self.number_ref_by_call[name]
        if control_inputs and call_number_ref:
            # In a loop the number is a vector, and so is the number that a loop reads, which is another one.
            rank = int(self.body.loop_depth_of(op) > 0 or call_number_ref != number_ref)
            self.number_ref_by_call[name] = self.insertions.dependencies.add_number_after(
                call_number_ref, rank, control_inputs
            )
        elif control_inputs:  # in a file, whose functions read no number
            ahead = self.insertions.ahead.setdefault(name, [])
            ahead += [self.replacement_by_name.get(text[1:], text[1:]) for text in control_inputs]

    def sides(self, op: tf.Operation) -> tuple[OpSide, OpSide]:
        """Return the inputs and outputs of an operation with their present refs."""
        return self.refs.sides(op)

    def facts(self, op: tf.Operation, inputs: Side | None = None) -> OpFacts:
        """Return the facts of an operation, for tools; record them, and its loop depth, by its id."""
        body, rewriting, node = self.body, self.rewriting, self._node(op)
        id_of_op, loop_depth = op_id(body, op.name), body.loop_depth_of(op)
        facts = facts_of(
            op, id_of_op, rewriting.namespace, body.read_value, node, body.identity,
            body.variable_of, body.location_of(op),
        )  # fmt: skip
        if rewriting.is_for_file:
            facts.source = ""  # TensorFlow has the line that loads the file
        rewriting.facts_by_id_by_op.setdefault(op, {})[id_of_op] = facts
        self._op_by_id[id_of_op] = op
        if loop_depth:
            rewriting.loop_depth_by_op_id[id_of_op] = loop_depth
        return facts

    def insert_actions(
        self, op: tf.Operation, plan: Plan | Actions, inputs: Side, outputs: Side, facts: OpFacts
    ) -> bool:
        """Put the actions of a plan at an operation; redirect its gradient operations to changed values.

        Returns True if the operation is replaced.
        """
        replaced = False
        if self.body.syntax.dead_values and op.type in CONTROL_FLOW_OPS:
            insert_at_control_flow(self, op, plan, inputs, outputs, facts)
        else:
            replaced = super().insert_actions(op, plan, inputs, outputs, facts)
        self.redirect_readers(outputs)
        if facts.backward_op is None:
            self._redirect_changed_inputs(op, inputs, facts)
            self._redirect_changed_outputs(op, outputs, facts)
        return replaced

    def _redirect_changed_inputs(self, op: tf.Operation, inputs: Side, facts: OpFacts) -> None:
        """Make an operation, and its gradient operations, read the inputs that routines have changed."""
        changed_positions = inputs.replaced_positions()
        # Inputs are parsed only where a routine has changed one: most operations have no actions.
        edges = self.refs.vanilla_inputs(self._node(op)) if changed_positions else []
        for i in changed_positions:
            self.refs.redirect(op, i, inputs.refs[i])
            self._redirect_gradients(op, facts.op_id, edges[i], inputs.symbols[i], inputs.refs[i])
            is_read_several_times = edges.count(edges[i]) > 1
            if is_read_several_times:
                self._record_reads_by_position(op, facts.op_id, edges, inputs, edges[i])

    def _redirect_changed_outputs(self, op: tf.Operation, outputs: Side, facts: OpFacts) -> None:
        """Make gradient operations of an operation read the outputs that routines have changed."""
        for i in outputs.replaced_positions():
            edge, tensor = Edge(self.body.node_name(op), i), outputs.symbols[i]
            # An op's gradients read what the op or its replacement computes, not what routines after it give.
            self._redirect_gradients(op, facts.op_id, edge, tensor, op_side(outputs).op_refs[i])
            if op.type == "Identity":
                self._redirect_gradients_of_readers(op, tensor, outputs.refs[i])

    def note_effects(self, op: tf.Operation, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Record the refs of the outputs of a replaced operation."""
        if replaced:
            op_side(outputs).op_refs = list(outputs.refs)

    def _redirect_gradients_of_readers(self, identity_op: tf.Operation, tensor: Any, ref: str) -> None:
        """Make gradients of the readers of an Identity read its changed output, if that is saved.

        TensorFlow's loops accumulate the Identity's input for these gradients, see `_redirect_gradients`.
        """
        saved = self.insertions.saved_tensor(ref)
        if saved is None:
            return
        source_op, source_index = source_key = tensor_key(identity_op.inputs[0])
        for reader in tensor.consumers():
            # A reader of both tensors needs the Identity's input as it is.
            if source_key not in map(tensor_key, reader.inputs):
                read_key = (op_id(self.body, reader.name), source_op.name, source_index)
                self.rewriting.saved_tensor_by_read.setdefault(read_key, saved)

    def foreign_inputs(self, action: Action, inputs: OpSide, facts: OpFacts) -> list[ForeignInput]:
        """Return the inputs of other operations that a replacement reads.

        Raises RoutineError for an operation that is not in this graph, or comes later.
        """
        foreign_inputs = []
        for id_of_op, position in action.reads:
            op = self._op_by_id.get(id_of_op)
            if op is None:
                raise RoutineError(
                    f"{action} of {type(action.tool).__name__} is to read input {position} of op "
                    f"{id_of_op:#018x}; no op that was analysed before {facts.name} in this graph has that id"
                )
            side = inputs if op is inputs.op else self.refs.inputs(op)
            for i in side.flat_positions([position]):
                foreign_inputs.append(ForeignInput(Value(side.refs[i], side.symbols[i]), id_of_op, i))
        return foreign_inputs

    def _record_reads_by_position(
        self, op: tf.Operation, id_of_op: int, edges: list[Edge], inputs: Side, edge: Edge
    ) -> None:
        """Record by position what gradient operations read for the tensor `edge`, which is several inputs."""
        positions = [i for i, read_edge in enumerate(edges) if read_edge == edge]
        changed_positions = inputs.replaced_positions()
        self.refs.gradient_reads_by_input[self.body.node_name(op), edge] = {
            i: inputs.refs[i] for i in positions
        }
        tensor = inputs.symbols[positions[0]]
        self.rewriting.saved_tensors_by_input[id_of_op, tensor.op.name, tensor.value_index] = {
            i: self.insertions.saved_tensor(inputs.refs[i]) if i in changed_positions else None
            for i in positions
        }

    def _redirect_gradients(self, op: tf.Operation, id_of_op: int, edge: Edge, tensor: Any, ref: str) -> None:
        """Record that the gradient operations of an operation are to read `ref` instead of a tensor.

        Gradients in other graphs and loops read the saved tensor of `ref`, if it is saved. An earlier record
        for the tensor stays.
        """
        self.refs.gradient_reads.setdefault((self.body.node_name(op), edge), ref)
        saved = self.insertions.saved_tensor(ref)
        if saved is None:
            return
        self.rewriting.saved_tensor_by_read.setdefault((id_of_op, tensor.op.name, tensor.value_index), saved)
        op_inputs = set(map(tensor_key, op.inputs))
        # TensorFlow's loops accumulate the input of an Identity for their gradients, not its output.
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
            if tensor_key(tensor) not in op_inputs:
                self.rewriting.saved_tensor_by_read[id_of_op, tensor.op.name, tensor.value_index] = saved

    def _rewrite_backward(self, op: tf.Operation, forward: tf.Operation) -> None:
        """Redirect a gradient operation to changed values, insert pullbacks, and analyse it.

        Second gradients of an operation with routines that take part in autodiff are reported.
        """
        node = self._node(op)
        forward_id, forward_facts = self.find_forward(forward) or self._record_absent_forward(forward)
        if forward_id in self.rewriting.autodiff_places and self.body.gradient_order_of(op) > 1:
            self.rewriting.report(
                f"second gradients of {forward.name}",
                "they are not differentiated through routines that take part in autodiff, or replace it",
            )
        gradient_inputs = self.gradient_edges.gradient_inputs(op)
        self._redirect_to_saved_tensors(op, node, forward_id, gradient_inputs)
        self.pullbacks.insert_at_outputs(op, forward, forward_id)
        # Without tools for backward ops, gradient operations are redirected, but need no analysis.
        if self._wants_backward:
            self._analyse_backward(op, node, forward_id, forward_facts)
        # With the last gradient operation all gradients of the forward operation's inputs are computed.
        if self.rewriting.autodiff_places and self.gradient_edges.last_op(forward) is op:
            self._insert_pullbacks_at_inputs(op, forward, forward_id)

    def find_forward(self, forward: tf.Operation) -> tuple[int, OpFacts] | None:
        """Return id and facts of an analysed forward operation; None for others."""
        return self.rewriting.find_forward(forward, self.body.forward_id(forward))

    def _insert_pullbacks_at_inputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        """Insert pullbacks at the last backward operation, and redirect the readers of gradients."""
        pass_through = self.pass_through_ops.positions_passed(forward)
        input_gradients = self.pullbacks.insert_at_inputs(op, forward, forward_id, pass_through)
        for i, (tensor, ref) in input_gradients.items():
            unchanged_ref = self.refs.of_tensor(tensor)
            # The gradient of a pass-through input is the tensor of other gradients, too, so only some of its
            # readers are redirected, one by one. Of another gradient all are, here.
            if i not in pass_through and ref != unchanged_ref:
                self.current_refs[self.body.syntax.write(self.refs.edge_of(tensor))] = ref
                unchanged_ref = ref
            self.pass_through_ops.redirect_gradient(op, forward.inputs[i], tensor, ref, unchanged_ref)

    def _analyse_backward(self, op: tf.Operation, node: Any, forward_id: int, forward: OpFacts) -> None:
        """Analyse a backward operation, and put the recorded actions at its gradients; other values stay."""
        backward_id = digest(forward_id, self.body.identity, op.name)
        facts = forward.for_backward_op(
            TensorFlowOperation(op.type, op.name, op), backward_id, replaceable=True
        )
        input_positions = self.gradient_edges.gradient_inputs(op)
        outputs = outputs_of(op, node)
        output_positions = [i for i in self.gradient_edges.gradient_outputs(op) if i < len(outputs)]
        facts.grad_outputs = [op.inputs[i] for i in input_positions]
        plan = self.rewriting.analysis.analyse_backward(facts, [outputs[i] for i in output_positions])
        if not plan:
            return
        input_refs = [self.refs.of_input(op, i) for i in input_positions]
        inputs_side = OpSide(op, ahead=True, refs=input_refs, tensors=facts.grad_outputs)
        output_refs = [self.body.syntax.write(Edge(node.name, i)) for i in output_positions]
        outputs_side = OpSide(
            op, ahead=False, refs=output_refs, tensors=[outputs[i] for i in output_positions]
        )
        self.insert_actions(op, plan, inputs_side, outputs_side, facts)
        for i in inputs_side.replaced_positions():
            self.refs.redirect(op, input_positions[i], inputs_side.refs[i])

    def _record_absent_forward(self, op: tf.Operation) -> tuple[int, OpFacts]:
        """Return id and facts of a forward operation that does not run, while its gradients do.

        Records both, as an analysis of the operation does.
        """
        id_of_op = op_id(self.body, op.name)
        facts = facts_of(
            op, id_of_op, self.rewriting.namespace, self.body.read_value,
            variable_of=self.body.variable_of, location=self.body.location_of(op),
        )  # fmt: skip
        self.rewriting.analysis.add_absent_op(facts, grouped_outputs(op, op.node_def))
        self.rewriting.facts_by_id_by_op.setdefault(op, {})[id_of_op] = facts
        return id_of_op, facts

    def _redirect_to_saved_tensors(
        self, op: tf.Operation, node: Any, forward_id: int, gradient_inputs: list[int]
    ) -> None:
        """Make a gradient operation read what its forward operation, in another graph, has saved of tensors.

        gradient_inputs: positions of the inputs that are gradients, which stay.
        """
        for i, tensor in enumerate(inputs_of(op, node)):
            captured_tensor = None if i in gradient_inputs else self.body.find_captured(tensor)
            if captured_tensor is None:
                continue
            read_key = (forward_id, captured_tensor.op.name, captured_tensor.value_index)
            saved_tensor = self.rewriting.saved_tensor_by_read.get(read_key)
            saved_by_input = self.rewriting.saved_tensors_by_input.get(read_key)
            if saved_by_input is not None:
                position = self.gradient_edges.forward_position_read(op, i, list(saved_by_input))
                saved_tensor = saved_by_input[position]
            if saved_tensor is not None:
                self.refs.redirect(op, i, self._recall(op, saved_tensor, dtype_enum(tensor)))

    def _recall(self, op: tf.Operation, saved: SavedTensor, dtype: int) -> str:
        """Return the ref of a saved tensor; add a node ahead of an operation that recalls it, if needed.

        Its saved values then live as long as the execution.
        """
        recall_key = saved, self.body.number_ref_at(op, ahead=True)  # each loop frame needs its own node
        if recall_key not in self._recalled_refs:
            assert saved.key is not None
            self.rewriting.readers_by_saved_key[saved.key].read_once = False
            recalled_tensor = RecalledTensor(
                saved, self.rewriting.loop_depth_by_op_id.get(saved.key.op_id, 0)
            )
            name = self.insertions.add_slot_call(
                op, recalled_tensor, refs=(), input_types=(), result_types=[dtype], ahead=True
            )
            self._recalled_refs[recall_key] = self.insertions.output_of(name, 0)
        return self._recalled_refs[recall_key]

    def _node(self, op: tf.Operation) -> Any:
        return self.body.nodes[self.body.node_name(op)]

    def _write_inputs(self) -> None:
        """Write the present refs into all nodes, with control inputs for the nodes ahead of them.

        Calls of edited functions get the number as last input.
        """
        safe_waits = self.insertions.safe_waits
        # A replacement may read what later operations read, and so wait for these.
        observer_nodes_by_op: Mapping[str, Sequence[str]] = {}
        if safe_waits is not None and not self.replacement_by_name:
            observer_nodes_by_op = safe_waits.node_names_by_op
        for name, node in self.body.nodes.items():
            if name in self.replacement_by_name:
                continue
            refs = self.refs.of_node(node)
            # The number is the last argument of the functions that an edited call calls.
            if self.number_ref_by_call.get(name):
                refs.append(self.number_ref_by_call[name])
            awaited_names: list[str] = []
            for text in node.input:
                if text.startswith("^"):
                    awaited_names += self._nodes_behind(text[1:])
            awaited_names += self.insertions.ahead.get(name, [])
            awaited_names += observer_nodes_by_op.get(name, ())
            inputs = [*refs, *dict.fromkeys(f"^{awaited_name}" for awaited_name in awaited_names)]
            # A session copies only nodes that differ from the user's, so unchanged nodes stay untouched.
            if list(node.input) != inputs:
                del node.input[:]
                node.input.extend(inputs)
        self._redirect_waiting_nodes()

    def _redirect_waiting_nodes(self) -> None:
        """Make inserted nodes wait for replacements, where an operation was replaced after the insertion."""
        for node in self.insertions.nodes:
            for i, text in enumerate(node.input):
                if text.startswith("^") and text[1:] in self.replacement_by_name:
                    node.input[i] = f"^{self.replacement_by_name[text[1:]]}"

    def _nodes_behind(self, name: str) -> list[str]:
        """Return the name of the node that runs for a node of the body, and of those inserted behind it."""
        return [self.replacement_by_name.get(name, name), *self.insertions.behind.get(name, ())]
