"""Analysis of a body's operations in order, and the edits of its nodes that their actions ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Action, OpFacts, Side, digest
from amanda.errors import RoutineError

from .._operation import Operation
from ._body import Body, Rewriting, Rewritten, op_id
from ._calls import rewrite_calls
from ._facts import facts_of, inputs_of, outputs_of
from ._flow import FLOW, at_flow, behind_flow
from ._gradients import GradientEdges
from ._handles import on_several_devices
from ._insertions import Insertions, Read
from ._passing import Passing
from ._pullbacks import Pullbacks
from ._side import enum
from ._slots import Recalled
from ._syntax import Edge, input_sizes, output_sizes, references

_PUSHES = ("StackPushV2", "TensorListPushBack", "OptionalFromValue")
"""Ops that keep a tensor of a round of a loop, or of a branch, for the gradients of all who read it."""


def rewrite(body: Body, rewriting: Rewriting) -> Rewritten:
    """Analyse every operation of a body and edit its nodes; the functions that they call too."""
    rewriting.several_devices = rewriting.several_devices or on_several_devices(body.ops)
    return _Rewriter(body, rewriting).run()


class _Rewriter:
    """The edits of one body.

    edges: inputs, by node and flat position, that read something else than all others do.
    tensors: what all others read instead of a tensor.
    shared: the same for a tensor that an operation reads several times, by position.
    own: what the gradient operations of an operation read instead of a tensor, and itself where it
    is as it was.
    returned: what the body gives back instead of a tensor, where others read it as it is.
    called: by the name of an operation whose functions were edited, the number that it is given, if any.
    """

    def __init__(self, body: Body, rewriting: Rewriting) -> None:
        self.body = body
        self.rewriting = rewriting
        self.insertions = Insertions(body, rewriting)
        self.edges: dict[tuple[str, int], str] = {}
        self.tensors: dict[Edge, str] = {}
        self.own: dict[tuple[str, Edge], str] = {}
        self.shared: dict[tuple[str, Edge], dict[int, str]] = {}
        self.returned: dict[Edge, str] = {}
        self.removed: dict[str, str] = {}
        self.called: dict[str, str] = {}
        self.forward = {op: found for op in body.ops if (found := body.forward_of(op)) is not None}
        if self.forward and not rewriting.written:
            rewriting.differentiated = True
        self.gradients = GradientEdges(body, self.forward)
        self.pullbacks = Pullbacks(rewriting, self.insertions, self.gradients)
        redirects = self._redirect, self._give_back
        places = self.pullbacks, self.gradients, self.forward
        self.passing = Passing(rewriting, self._known, *places, *redirects)
        self._calls: list[str] = []
        self._in_flow = behind_flow(body.ops)
        self._wants_backward = any(layer.wants_backward for layer in rewriting.analysis.layer.chain)
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
            and (body.end_of is not None or self._in_flow.isdisjoint((op, found)))
        }
        self.insertions.waits.in_flow = {body.node_name(op) for op in self._in_flow}

    def run(self) -> Rewritten:
        """The edited body."""
        backward = self.body.backward or bool(self.forward)
        for op in self.body.ops:
            forward = self.forward.get(op)
            if forward is not None and self.rewriting.written:
                self.rewriting.report(
                    f"the backward ops of {forward.name}", "only forward ops are, of a file"
                )
            elif forward is not None:
                self._at_backward(op, forward)
            elif not self.body.backward:
                self._at_forward(op)
            made = self.insertions.made
            called = rewrite_calls(self.body, self.rewriting, op, rewrite, self._read_at, made)
            if called is not None:
                backward = backward or called.backward
                name, number = self.body.node_name(op), self.insertions.waits.number_at(op, True)
                self.called[name] = called.number
                if called.backward:
                    self._wait_for_calls(op, number)
                self.insertions.waits.note(name, name, number)
                if op not in self._in_flow:
                    self._calls.append(name)
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
            [*nodes, *made], outputs, self.insertions.inserted, self.removed, changed, numbered, backward,
            {self.removed.get(name, name): number for name, number in self.insertions.waits.numbers.items()},
        )  # fmt: skip

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

    def _at_forward(self, op: tf.Operation) -> None:
        node = self.body.nodes[self.body.node_name(op)]
        identity = op_id(self.body, op.name)
        body = self.body
        facts, outputs = facts_of(
            op,
            identity,
            self.rewriting.namespace,
            body.read_value,
            node,
            body.identity,
            body.variable_of,
            body.place_of(op),
        )
        if self.rewriting.written:
            facts.source = ""  # the line that reads the file
        plan = self.rewriting.analysis.forward(facts, outputs)
        self.rewriting.ids.setdefault(op, {})[identity] = facts
        self._by_id[identity] = op
        depth = self.body.depth_of(op)
        if depth:
            self.rewriting.depths[identity] = depth
        if not plan:
            return
        inputs, side = self._input_side(op, node), self._output_side(op, node)
        flow = self.body.syntax.dead_values and op.type in FLOW
        if flow:
            at_flow(self.insertions, op, plan, inputs, side, facts, self._read_at, self._redirect)
        else:
            self.insertions.insert_all(op, plan.before, inputs, facts, "before")
        edges = self._edges(node)
        for i in inputs.changed():
            self.edges[node.name, i] = inputs.refs[i]
            self._let_own_read(op, identity, edges[i], inputs.symbols[i], inputs.refs[i])
            if edges.count(edges[i]) > 1:
                self._share(op, identity, edges, inputs, edges[i])
        first = list(side.before)
        if not flow:
            if plan.replace is not None:
                instead = self._replace(op, plan.replace, inputs, side, facts)
                self.removed |= {} if instead is None else {node.name: instead}
                first = list(side.refs)
            self.insertions.insert_all(op, plan.after, side, facts, "after")
        for i in side.changed():
            edge = Edge(node.name, i)
            self.tensors[edge] = side.refs[i]
            self._let_own_read(op, identity, edge, side.symbols[i], first[i])
            if op.type == "Identity":
                self._let_readers_keep(op, side.symbols[i], side.refs[i])

    def _let_readers_keep(self, op: tf.Operation, tensor: Any, ref: str) -> None:
        """Make gradients of those behind an Identity read what it gives: loops keep what it is given."""
        source = self.insertions.sources.get(ref)
        if source is None or source[0] is None:
            return
        given = op.inputs[0]
        for reader in tensor.consumers():
            if all(one.op is not given.op or one.value_index != given.value_index for one in reader.inputs):
                self.rewriting.kept.setdefault(
                    (op_id(self.body, reader.name), given.op.name, given.value_index), source
                )

    def _replace(
        self, op: tf.Operation, action: Action, inputs: Side, outputs: Side, facts: OpFacts
    ) -> str | None:
        if action.reads and self.body.guessed:
            self.rewriting.report(
                f"the replacement of {op.name}",
                "it reads inputs of other ops, and only names tell which gradients are theirs: let the "
                "function be traced, or the graph be made, within a scope",
            )
            return None
        return self.insertions.replace(op, action, inputs, outputs, facts, self._reads(action, facts))

    def _reads(self, action: Action, facts: OpFacts) -> list[Read]:
        """Return what a replacement reads of other operations."""
        found = []
        for identity, position in action.reads:
            op = self._by_id.get(identity)
            if op is None:
                raise RoutineError(
                    f"{action} of {type(action.tool).__name__} is to read input {position} of op "
                    f"{identity:#018x}; no op that was analysed before {facts.name} in this graph has that id"
                )
            side = self._input_side(op, self.body.nodes[self.body.node_name(op)])
            found += [Read(identity, i, side.refs[i], side.symbols[i]) for i in side.flat([position])]
        return found

    def _share(self, op: tf.Operation, identity: int, edges: list[Edge], inputs: Side, edge: Edge) -> None:
        """Tell apart what gradient operations read of a tensor that their operation reads twice."""
        positions = [i for i, one in enumerate(edges) if one == edge]
        changed = inputs.changed()
        sources = self.insertions.sources
        self.shared[self.body.node_name(op), edge] = {i: inputs.refs[i] for i in positions}
        tensor = inputs.symbols[positions[0]]
        kept = {i: sources.get(inputs.refs[i]) if i in changed else None for i in positions}
        self.rewriting.shared[identity, tensor.op.name, tensor.value_index] = {
            i: source if source is not None and source[0] is not None else None for i, source in kept.items()
        }

    def _let_own_read(self, op: tf.Operation, identity: int, edge: Edge, tensor: Any, ref: str) -> None:
        """Make the gradient operations of an operation read something else instead of a tensor."""
        self.own.setdefault((self.body.node_name(op), edge), ref)
        source = self.insertions.sources.get(ref)
        if source is None or source[0] is None:
            return
        self.rewriting.kept.setdefault((identity, tensor.op.name, tensor.value_index), source)
        read = {(one.op, one.value_index) for one in op.inputs}
        while tensor.op.type == "Identity":  # loops keep what it is given for their gradients
            tensor = tensor.op.inputs[0]
            if (tensor.op, tensor.value_index) not in read:
                self.rewriting.kept[identity, tensor.op.name, tensor.value_index] = source

    def _at_backward(self, op: tf.Operation, forward: tf.Operation) -> None:
        node = self.body.nodes[self.body.node_name(op)]
        forward_id, forward_facts = self._known(forward) or self._not_run(forward)
        if forward_id in self.rewriting.taped and self.body.order_of(op) > 1:
            self.rewriting.report(
                f"second gradients of {forward.name}",
                "they are not differentiated through routines that take part in autodiff, or replace it",
            )
        entering = self.gradients.entering(op)
        self._recall(op, node, forward_id, entering)
        pulled = self.pullbacks.at_outputs(op, forward, forward_id, self._read_at)
        for i, ref in pulled.items():
            self.edges[node.name, i] = ref
        if self._wants_backward:
            self._analyse_backward(op, node, forward_id, forward_facts)
        if self.rewriting.taped and self.gradients.last(forward) is op:
            self._pull_at_inputs(op, forward, forward_id)

    def _known(self, forward: tf.Operation) -> tuple[int, OpFacts] | None:
        """Id and facts of a forward operation."""
        return self.rewriting.known(forward, self.body.forward_id(forward))

    def _pull_at_inputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        passed = self.passing.positions(forward)
        pulled = self.pullbacks.at_inputs(op, forward, forward_id, self._read_tensor, passed)
        for i, (tensor, ref) in pulled.items():
            vanilla = self._read_tensor(tensor)
            if i not in passed and ref != vanilla:
                self.tensors[self._edge(tensor)] = vanilla = ref
            self.passing.follow(op, forward.inputs[i], tensor, ref, vanilla)

    def _redirect(self, op: tf.Operation, index: int, ref: str) -> None:
        self.edges[self.body.node_name(op), index] = ref

    def _give_back(self, tensor: Any, ref: str) -> None:
        self.returned[self._edge(tensor)] = ref

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
        refs = [self._read_at(op, i) for i in entering]
        before = Side(refs, facts.grad_outputs, [None] * len(refs))
        edges = [Edge(node.name, i) for i in leaving]
        refs = [self.body.syntax.write(edge) for edge in edges]
        after = Side(refs, [outputs[i] for i in leaving], [None] * len(leaving))
        if self.body.syntax.dead_values and op.type in FLOW:
            at_flow(self.insertions, op, plan, before, after, facts, self._read_at, self._redirect)
        else:
            self.insertions.insert_all(op, plan.before, before, facts, "before")
            if plan.replace is not None and leaving:
                self.insertions.replace_gradients(op, plan.replace, before, after, facts)
            self.insertions.insert_all(op, plan.after, after, facts, "after")
        for i in before.changed():
            self.edges[node.name, entering[i]] = before.refs[i]
        for i in after.changed():
            self.tensors[edges[i]] = after.refs[i]

    def _not_run(self, op: tf.Operation) -> tuple[int, OpFacts]:
        """Id and facts of a forward operation that does not run, though backward operations of it do."""
        identity = op_id(self.body, op.name)
        facts, outputs = facts_of(
            op, identity, self.rewriting.namespace, self.body.read_value, variable_of=self.body.variable_of,
            place=self.body.place_of(op),
        )  # fmt: skip
        self.rewriting.analysis.absent(facts, outputs)
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
            place = (
                source,
                self.body.number_at(op, True) if self.body.number_at else None,
            )  # one in each frame
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

    def _edge(self, tensor: Any) -> Edge:
        return Edge(self.body.node_name(tensor.op), tensor.value_index)

    def _input_side(self, op: tf.Operation, node: Any) -> Side:
        refs = [self._read(node.name, i, edge) for i, edge in enumerate(self._edges(node))]
        return _side(refs, inputs_of(op, node), input_sizes(node), references(node))

    def _output_side(self, op: tf.Operation, node: Any) -> Side:
        outputs = outputs_of(op, node)
        refs = [self.body.syntax.write(Edge(node.name, i)) for i in range(len(outputs))]
        return _side(refs, outputs, output_sizes(node), references(node, outputs=True))

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

    def _read_at(self, op: tf.Operation, index: int) -> str:
        node = self.body.nodes[self.body.node_name(op)]
        return self._read(node.name, index, self._edges(node)[index])

    def _read_output(self, edge: Edge) -> str:
        found = self.tensors.get(edge)
        return self.body.syntax.write(edge) if found is None else found

    def _read_tensor(self, tensor: Any) -> str:
        return self._read_output(self._edge(tensor))

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


def _side(
    refs: Sequence[str],
    tensors: Sequence[Any],
    layout: Sequence[tuple[str, int | None]],
    held: Sequence[bool],
) -> Side:
    """One side of an operation.

    layout: name and size of each value.  held: which are references, to variables that may have no value.
    """
    sizes = [size for _, size in layout]
    lengths = [1 if size is None else size for size in sizes]
    if sum(lengths) != len(tensors):
        return Side(refs, tensors, [None] * len(tensors))
    flags = [flag for flag, length in zip(held, lengths, strict=False) for _ in range(length)]
    return Side(refs, tensors, sizes, [i for i, flag in enumerate(flags) if flag])
