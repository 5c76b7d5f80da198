"""Analysis of a body's operations in order, and the edits of its nodes that their actions ask for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from amanda.backend import Action, OpFacts, Side, Value, digest
from amanda.errors import RoutineError
from amanda.plan import Actions, Plan

from .._operation import Operation
from ._body import Body, Rewriting, Rewritten, op_id
from ._calls import rewrite_calls
from ._facts import facts_of, grouped_outputs, inputs_of, outputs_of
from ._flow import FLOW, at_flow, behind_flow
from ._gradients import GradientEdges
from ._handles import on_several_devices
from ._passing import Passing
from ._pullbacks import Pullbacks
from ._routines import ReadElsewhere, Routines
from ._side import OpSide, at, enum
from ._slots import Recalled
from ._syntax import Edge, input_sizes, output_sizes, references

_PUSHES = ("StackPushV2", "TensorListPushBack", "OptionalFromValue")
"""Ops that keep a tensor of a round of a loop, or of a branch, for the gradients of all who read it."""


def rewrite(body: Body, rewriting: Rewriting) -> Rewritten:
    """Analyse every operation of a body and edit its nodes; the functions that they call too."""
    rewriting.several_devices = rewriting.several_devices or on_several_devices(body.ops)
    return Rewriter(body, rewriting).rewritten()


class Rewriter(Routines):
    """The edits of one body.

    edges: inputs, by node and flat position, that read something else than all others do.
    shared: the same for a tensor that an operation reads several times, by position.
    own: what the gradient operations of an operation read instead of a tensor, and itself where it
    is as it was.
    returned: what the body gives back instead of a tensor, where others read it as it is.
    called: by the name of an operation whose functions were edited, the number that it is given, if any.
    """

    def __init__(self, body: Body, rewriting: Rewriting) -> None:
        super().__init__(body, rewriting)
        self.edges: dict[tuple[str, int], str] = {}
        self.own: dict[tuple[str, Edge], str] = {}
        self.shared: dict[tuple[str, Edge], dict[int, str]] = {}
        self.returned: dict[Edge, str] = {}
        self.called: dict[str, str] = {}
        self.forward = {op: found for op in body.ops if (found := body.forward_of(op)) is not None}
        if self.forward and not rewriting.written:
            rewriting.differentiated = True
        self.gradients = GradientEdges(body, self.forward)
        self.pullbacks = Pullbacks(self)
        self.passing = Passing(self)
        self._has_backward = body.backward or bool(self.forward)
        self._calls: list[str] = []
        self._in_flow = behind_flow(body.ops)
        self._wants_backward = any(stack.wants_backward for stack in rewriting.analysis.stack.chain)
        self._recalled: dict[Any, str] = {}
        self._inputs: dict[str, list[Edge]] = {}
        self._by_id: dict[int, tf.Operation] = {}
        self._by_name = {body.node_name(op): op for op in self.forward}
        self._forward_name = {
            body.node_name(op): body.node_name(found)
            for op, found in self.forward.items()
            if found.graph is op.graph and op.type not in _PUSHES
        }
        self.insertions.forward = {
            name: forward
            for op, found in self.forward.items()
            if (forward := self._forward_name.get(name := body.node_name(op), "")) in body.nodes
            and (body.frames is not None or self._in_flow.isdisjoint((op, found)))
        }
        self.insertions.waits.in_flow = {body.node_name(op) for op in self._in_flow}

    def rewritten(self) -> Rewritten:
        """Go through the body; its edited nodes."""
        self.run()
        self.insertions.flush()
        if self.forward and self.rewriting.taped:
            self.passing.tell_missed(self.body.backward)
            if self.body.guessed:
                self.passing.tell_guessed(self.body.ops)
        made = self.insertions.made
        changed = bool(made or self.called)
        if changed:
            self._connect()
        nodes = [node for name, node in self.body.nodes.items() if name not in self.removed]
        numbered = [name for name, number in self.called.items() if number]
        outputs = [self.returned.get(edge) or self._read_output(edge) for edge in self.body.outputs]
        return Rewritten(
            [*nodes, *made], outputs, self.insertions.inserted, self.removed, changed, numbered,
            self._has_backward,
            {self.removed.get(name, name): number for name, number in self.insertions.waits.numbers.items()},
        )  # fmt: skip

    def at_node(self, op: tf.Operation) -> None:
        """Bring an operation to the tools, and edit it."""
        forward = self.forward.get(op)
        if forward is not None and self.rewriting.written:
            self.rewriting.report(f"the backward ops of {forward.name}", "only forward ops are, of a file")
        elif forward is not None:
            self._at_backward(op, forward)
        elif not self.body.backward:
            facts, outputs = self.facts(op), grouped_outputs(op, self._node(op))
            plan = self.rewriting.analysis.forward(facts, outputs)
            if plan:  # the sides of most operations are not needed
                self.act(op, plan, *self.sides(op), facts)
        self.leave(op, False)

    def leave(self, op: tf.Operation, replaced: bool) -> None:
        """Rewrite the functions that an operation calls."""
        called, waits = rewrite_calls(self, op, rewrite), self.insertions.waits
        if called is None:
            return
        self._has_backward = self._has_backward or called.backward
        name, number = self.body.node_name(op), self.body.number_at(op, True)
        self.called[name] = called.number
        if called.backward:
            self._wait_for_calls(op, number)
        waits.note(name, name, number)
        if op not in self._in_flow:
            self._calls.append(name)

    def _wait_for_calls(self, op: tf.Operation, number: str) -> None:
        """Make a call of gradients come after the calls before it, which keep what they need.

        It waits for the last call of gradients, which has waited for others, and those since.  Behind control
        flow of version 1, which may leave some out, it waits for its forward operation and what it reads.
        So does its number, which all routines in it read.
        """
        name = self.body.node_name(op)
        if op in self._in_flow:
            near = {self._forward_name.get(name), *(self.body.node_name(one.op) for one in op.inputs)}
            waits = [one for one in self.called if one in near and one != name]
        else:
            waits, self._calls = self._calls, []
        texts = self.insertions.waits.after(waits, number)
        given = self.called[name]
        if texts and given:
            rank = int(self.body.depth_of(op) > 0 or given != number)
            self.called[name] = self.insertions.waits.number_after(given, rank, texts)
        elif texts:
            ahead = self.insertions.ahead.setdefault(name, [])
            ahead += [self.removed.get(text[1:], text[1:]) for text in texts]

    def sides(self, op: tf.Operation) -> tuple[OpSide, OpSide]:
        """The inputs and outputs of an operation, and how they are read now."""
        node = self._node(op)
        outputs = outputs_of(op, node)
        refs = [self.body.syntax.write(Edge(node.name, i)) for i in range(len(outputs))]
        held = references(node, outputs=True)
        return self._inputs_of(op), OpSide(op, False, refs, outputs, output_sizes(node), held)

    def _inputs_of(self, op: tf.Operation) -> OpSide:
        node = self._node(op)
        refs = [self._read(node.name, i, edge) for i, edge in enumerate(self._edges(node))]
        return OpSide(op, True, refs, inputs_of(op, node), input_sizes(node), references(node))

    def facts(self, op: tf.Operation, inputs: Side | None = None) -> OpFacts:
        """Facts of an operation, for tools."""
        body, rewriting, node = self.body, self.rewriting, self._node(op)
        identity, depth = op_id(body, op.name), body.depth_of(op)
        facts = facts_of(
            op, identity, rewriting.namespace, body.read_value, node, body.identity,
            body.variable_of, body.place_of(op),
        )  # fmt: skip
        if rewriting.written:
            facts.source = ""  # the line that reads the file
        rewriting.ids.setdefault(op, {})[identity] = facts
        self._by_id[identity] = op
        if depth:
            rewriting.depths[identity] = depth
        return facts

    def act(
        self, op: tf.Operation, plan: Plan | Actions, inputs: Side, outputs: Side, facts: OpFacts
    ) -> bool:
        """Put the actions of a plan at an operation, and make its gradients read what it reads and gives."""
        replaced = False
        if self.body.syntax.dead_values and op.type in FLOW:
            at_flow(self, op, plan, inputs, outputs, facts)
        else:
            replaced = super().act(op, plan, inputs, outputs, facts)
        self.redirect_readers(outputs)
        if facts.backward_op is not None:
            return replaced
        name = self.body.node_name(op)
        changed = inputs.changed()
        edges = self._edges(self.body.nodes[name]) if changed else []
        for i in changed:
            self.edges[name, i] = inputs.refs[i]
            self._redirect_gradients(op, facts.op_id, edges[i], inputs.symbols[i], inputs.refs[i])
            if edges.count(edges[i]) > 1:
                self._share(op, facts.op_id, edges, inputs, edges[i])
        for i in outputs.changed():
            edge, tensor = Edge(name, i), outputs.symbols[i]
            self._redirect_gradients(op, facts.op_id, edge, tensor, at(outputs).made[i])
            if op.type == "Identity":
                self._redirect_readers(op, tensor, outputs.refs[i])
        return replaced

    def follow(self, op: tf.Operation, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Take note of what gives the values of an operation that is replaced."""
        if replaced:
            at(outputs).made = list(outputs.refs)

    def _redirect_readers(self, op: tf.Operation, tensor: Any, ref: str) -> None:
        """Make gradients of those behind an Identity read what it gives: loops keep what it is given."""
        source = self.insertions.source_of(ref)
        if source is None:
            return
        given = op.inputs[0]
        for reader in tensor.consumers():
            if all(one.op is not given.op or one.value_index != given.value_index for one in reader.inputs):
                self.rewriting.kept.setdefault(
                    (op_id(self.body, reader.name), given.op.name, given.value_index), source
                )

    def reads(self, action: Action, inputs: OpSide, facts: OpFacts) -> list[ReadElsewhere]:
        """Return what a replacement reads of other operations."""
        found = []
        for identity, position in action.reads:
            op = self._by_id.get(identity)
            if op is None:
                raise RoutineError(
                    f"{action} of {type(action.tool).__name__} is to read input {position} of op "
                    f"{identity:#018x}; no op that was analysed before {facts.name} in this graph has that id"
                )
            side = inputs if op is inputs.op else self._inputs_of(op)
            for i in side.flat([position]):
                found.append(ReadElsewhere(Value(side.refs[i], side.symbols[i]), identity, i))
        return found

    def _share(self, op: tf.Operation, identity: int, edges: list[Edge], inputs: Side, edge: Edge) -> None:
        """Tell apart what gradient operations read of a tensor that their operation reads twice."""
        positions = [i for i, one in enumerate(edges) if one == edge]
        changed = inputs.changed()
        self.shared[self.body.node_name(op), edge] = {i: inputs.refs[i] for i in positions}
        tensor = inputs.symbols[positions[0]]
        self.rewriting.shared[identity, tensor.op.name, tensor.value_index] = {
            i: self.insertions.source_of(inputs.refs[i]) if i in changed else None for i in positions
        }

    def _redirect_gradients(self, op: tf.Operation, identity: int, edge: Edge, tensor: Any, ref: str) -> None:
        """Make the gradient operations of an operation read something else instead of a tensor."""
        self.own.setdefault((self.body.node_name(op), edge), ref)
        source = self.insertions.source_of(ref)
        if source is None:
            return
        self.rewriting.kept.setdefault((identity, tensor.op.name, tensor.value_index), source)
        read = {(one.op, one.value_index) for one in op.inputs}
        while tensor.op.type == "Identity":  # loops keep what it is given for their gradients
            tensor = tensor.op.inputs[0]
            if (tensor.op, tensor.value_index) not in read:
                self.rewriting.kept[identity, tensor.op.name, tensor.value_index] = source

    def _at_backward(self, op: tf.Operation, forward: tf.Operation) -> None:
        node = self._node(op)
        forward_id, forward_facts = self.known(forward) or self._not_run(forward)
        if forward_id in self.rewriting.taped and self.body.order_of(op) > 1:
            self.rewriting.report(
                f"second gradients of {forward.name}",
                "they are not differentiated through routines that take part in autodiff, or replace it",
            )
        entering = self.gradients.entering(op)
        self._recall(op, node, forward_id, entering)
        self.pullbacks.at_outputs(op, forward, forward_id)
        if self._wants_backward:
            self._analyse_backward(op, node, forward_id, forward_facts)
        if self.rewriting.taped and self.gradients.last(forward) is op:
            self._pull_at_inputs(op, forward, forward_id)

    def known(self, forward: tf.Operation) -> tuple[int, OpFacts] | None:
        """Id and facts of a forward operation."""
        return self.rewriting.known(forward, self.body.forward_id(forward))

    def _pull_at_inputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        passed = self.passing.positions(forward)
        pulled = self.pullbacks.at_inputs(op, forward, forward_id, passed)
        for i, (tensor, ref) in pulled.items():
            vanilla = self.read_tensor(tensor)
            if i not in passed and ref != vanilla:
                self.current[self.body.syntax.write(self.edge(tensor))] = vanilla = ref
            self.passing.follow(op, forward.inputs[i], tensor, ref, vanilla)

    def redirect(self, op: tf.Operation, index: int, ref: str) -> None:
        """Make an input of an operation, by its position, read something else."""
        self.edges[self.body.node_name(op), index] = ref

    def _analyse_backward(self, op: tf.Operation, node: Any, forward_id: int, forward: OpFacts) -> None:
        backward_id = digest(forward_id, self.body.identity, op.name)
        facts = forward.at_backward(Operation(op.type, op.name, op), backward_id, True)
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

    def _not_run(self, op: tf.Operation) -> tuple[int, OpFacts]:
        """Id and facts of a forward operation that does not run, though backward operations of it do."""
        identity = op_id(self.body, op.name)
        facts = facts_of(
            op, identity, self.rewriting.namespace, self.body.read_value,
            variable_of=self.body.variable_of, place=self.body.place_of(op),
        )  # fmt: skip
        self.rewriting.analysis.absent(facts, grouped_outputs(op, op.node_def))
        self.rewriting.ids.setdefault(op, {})[identity] = facts
        return identity, facts

    def _recall(self, op: tf.Operation, node: Any, forward_id: int, entering: list[int]) -> None:
        """Make an operation read what its forward operation has, where that is in another graph."""
        for i, tensor in enumerate(inputs_of(op, node)):
            held = None if i in entering else self.body.captured(tensor)
            if held is None:
                continue
            known = (forward_id, held.op.name, held.value_index)
            source = self.rewriting.kept.get(known)
            shared = self.rewriting.shared.get(known)
            if shared is not None:
                source = shared[self.gradients.read_as(op, i, list(shared))]
            if source is None:
                continue
            place = source, self.body.number_at(op, True)  # one in each frame
            if place not in self._recalled:
                self.rewriting.readers[source[0]].told = False
                recalled = Recalled(*source, self.rewriting.depths.get(source[0][0], 0))
                name = self.insertions.add(op, recalled, (), (), [enum(tensor)], ahead=True)
                self._recalled[place] = self.insertions.output_of(name, 0)
            self.edges[node.name, i] = self._recalled[place]

    def _edges(self, node: Any) -> list[Edge]:
        known = self._inputs.get(node.name)
        if known is None:
            parse = self.body.syntax.parse
            known = [parse(text) for text in node.input if not text.startswith("^")]
            self._inputs[node.name] = known
        return known

    def _node(self, op: tf.Operation) -> Any:
        return self.body.nodes[self.body.node_name(op)]

    def edge(self, tensor: Any) -> Edge:
        """Return the node that makes a tensor, and which of its outputs it is."""
        return Edge(self.body.node_name(tensor.op), tensor.value_index)

    def _read(self, name: str, index: int, edge: Edge) -> str:
        """Return what an input reads now."""
        found = self.edges.get((name, index))
        if found is not None:
            return found
        forward = self._forward_name.get(name)
        if forward is not None and (forward, edge) in self.own:
            shared = self.shared.get((forward, edge))
            if shared is None:
                return self.own[forward, edge]
            return shared[self.gradients.read_as(self._by_name[name], index, list(shared))]
        return self._read_output(edge)

    def read_at(self, op: tf.Operation, index: int) -> str:
        """Return what an input of an operation reads now, by its position."""
        node = self._node(op)
        return self._read(node.name, index, self._edges(node)[index])

    def _read_output(self, edge: Edge) -> str:
        ref = self.body.syntax.write(edge)
        return str(self.current.get(ref, ref))

    def read_tensor(self, tensor: Any) -> str:
        """Return what others read now instead of a tensor."""
        return self._read_output(self.edge(tensor))

    def _connect(self) -> None:
        """Make every input read what it shall, and wait for what was put ahead of its node."""
        for name, node in self.body.nodes.items():
            if name in self.removed:
                continue
            controls = [text[1:] for text in node.input if text.startswith("^")]
            refs = [self._read(name, i, edge) for i, edge in enumerate(self._edges(node))]
            waits = [after for one in controls for after in self._behind(one)]
            waits += self.insertions.ahead.get(name, [])
            number = [self.called[name]] if self.called.get(name) else []
            texts = [*refs, *number, *dict.fromkeys(f"^{one}" for one in waits)]
            if list(node.input) != texts:
                del node.input[:]
                node.input.extend(texts)
        for node in self.insertions.made:
            for i, text in enumerate(node.input):
                if text.startswith("^") and text[1:] in self.removed:
                    node.input[i] = f"^{self.removed[text[1:]]}"

    def _behind(self, name: str) -> list[str]:
        return [self.removed.get(name, name), *self.insertions.behind.get(name, ())]
