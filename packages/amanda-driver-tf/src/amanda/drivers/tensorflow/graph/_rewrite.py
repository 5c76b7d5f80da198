"""Analysis of a body's operations in order, and the edits of its nodes that their actions ask for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import tensorflow as tf
from amanda.backend import Action, OpFacts, digest

from .._operation import Operation
from ._body import Body, Rewriting, Rewritten, op_id
from ._calls import rewrite_calls
from ._facts import facts_of, inputs_of, outputs_of
from ._flow import FLOW, at_flow
from ._gradients import GradientEdges
from ._side import Side, enum, is_plain, nbytes
from ._slots import Node, Packed, py_func
from ._syntax import Edge, input_sizes, output_sizes


def rewrite(body: Body, rewriting: Rewriting) -> Rewritten:
    """Analyse every operation of a body and edit its nodes; the functions that they call too."""
    return _Rewriter(body, rewriting).run()


class _Rewriter:
    """The edits of one body.

    edges: inputs, by node and flat position, that read something else than all others do.
    tensors: what all others read instead of a tensor.
    own: what the gradient operations of an operation read instead of a tensor, and itself where it
    is as it was.
    """

    def __init__(self, body: Body, rewriting: Rewriting) -> None:
        self.body = body
        self.rewriting = rewriting
        self.edges: dict[tuple[str, int], str] = {}
        self.tensors: dict[Edge, str] = {}
        self.own: dict[tuple[str, Edge], str] = {}
        self.made: list[Any] = []
        self.inserted: dict[str, list[str]] = {}
        self.behind: dict[str, list[str]] = {}
        self.ahead: dict[str, list[str]] = {}
        self.removed: dict[str, str] = {}
        self.called = False
        self._wants_backward = any(layer.wants_backward for layer in rewriting.analysis.layer.chain)
        self.forward = {op: found for op in body.ops if (found := body.forward_of(op)) is not None}
        self.gradients = GradientEdges(body, self.forward)
        self._forward_name = {
            body.node_name(op): body.node_name(found)
            for op, found in self.forward.items()
            if found.graph is op.graph
        }
        self._pack: list[tuple[Node, list[str], list[int], str]] = []
        self._packed_bytes = 0
        self._inputs: dict[str, list[Edge]] = {}

    def run(self) -> Rewritten:
        """The edited body."""
        for op in self.body.ops:
            forward = self.forward.get(op)
            if forward is None:
                self._at_forward(op)
            elif self._wants_backward:
                self._at_backward(op, *(self.rewriting.known(forward) or self._not_run(forward)))
            if rewrite_calls(self.body, self.rewriting, op, rewrite):
                self.called = True
                self._inputs.pop(self.body.node_name(op), None)
        self._flush()
        changed = bool(self.made or self.called or self.tensors)
        if changed:
            self._connect()
        nodes = [node for name, node in self.body.nodes.items() if name not in self.removed]
        outputs = [self._read_output(edge) for edge in self.body.outputs]
        return Rewritten([*nodes, *self.made], outputs, self.inserted, self.removed, changed)

    # ---- operations ----

    def _at_forward(self, op: tf.Operation) -> None:
        node = self.body.nodes[self.body.node_name(op)]
        identity = op_id(self.body, node.name)
        facts, outputs = facts_of(op, identity, self.rewriting.namespace, self.body.read_value, node)
        combined = self.rewriting.analysis.forward(facts, outputs)
        self.rewriting.ids[op] = (identity, facts)
        if not combined.forward:
            return
        inputs = self._input_side(op, node)
        side = self._output_side(op, node)
        if self.body.syntax.dead_values and op.type in FLOW:
            at_flow(self, op, combined, inputs, side, facts)
        else:
            self._insert_all(op, combined.before, inputs, facts, ahead=True)
            if combined.replace is not None:
                self._replace(op, combined.replace, inputs, side, facts)
            self._insert_all(op, combined.after, side, facts, ahead=False)
        for i in inputs.changed():
            self._change_edge(op, i, inputs.refs[i])
        for i in side.changed():
            edge = Edge(node.name, i)
            self.tensors[edge] = side.refs[i]
            self.own.setdefault((node.name, edge), side.before[i])

    def _not_run(self, op: tf.Operation) -> tuple[int, OpFacts]:
        """Id and facts of a forward operation that does not run, though backward operations of it do."""
        identity = op_id(self.body, self.body.node_name(op))
        facts, outputs = facts_of(op, identity, self.rewriting.namespace, self.body.read_value)
        self.rewriting.analysis.absent(facts, outputs)
        self.rewriting.ids[op] = (identity, facts)
        return identity, facts

    def _at_backward(self, op: tf.Operation, forward_id: int, forward: OpFacts) -> None:
        name = self.body.node_name(op)
        node = self.body.nodes[name]
        facts = forward.at_backward(
            Operation(op.type, op.name, op), digest(forward_id, self.body.identity, name), True
        )
        entering = self.gradients.entering(op)
        outputs = outputs_of(op, node)
        leaving = [i for i in self.gradients.leaving(op) if i < len(outputs)]
        facts.grad_outputs = [op.inputs[i] for i in entering]
        plan = self.rewriting.analysis.backward(facts, [op.outputs[i] for i in leaving])
        if not plan:
            return
        refs = [self._read(name, i, edge) for i, edge in enumerate(self._edges(node))]
        before = Side([refs[i] for i in entering], facts.grad_outputs, [None] * len(entering))
        edges = [Edge(name, i) for i in leaving]
        after = Side(
            [self.body.syntax.write(edge) for edge in edges],
            [op.outputs[i] for i in leaving], [None] * len(leaving),
        )  # fmt: skip
        if self.body.syntax.dead_values and op.type in FLOW:
            at_flow(self, op, plan, before, after, facts)
        else:
            self._insert_all(op, plan.before, before, facts, ahead=True)
            if plan.replace is not None and leaving:
                self._replace_gradients(op, plan.replace, before, after, facts)
            self._insert_all(op, plan.after, after, facts, ahead=False)
        for i in before.changed():
            self.edges[name, entering[i]] = before.refs[i]
        for i in after.changed():
            self.tensors[edges[i]] = after.refs[i]

    # ---- insertions ----

    def _insert_all(
        self, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts, ahead: bool
    ) -> None:
        for observing, group in groupby(actions, lambda action: action.observer):
            if observing:
                self._observe(op, list(group), side, facts, ahead)
            else:
                self._insert(op, list(group), side, facts, ahead)

    def _insert(
        self, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts, ahead: bool
    ) -> None:
        """Put routines between the values at a side and what reads them."""
        positions = side.selected([action.select for action in actions])
        if side.count == 0 and facts.backward_op is not None:
            return
        gives = side.changeable(positions)
        flat, out = side.flat(positions), side.flat(gives)
        inserted = Node(actions, facts, side.count, positions, [side.sizes[i] for i in positions], gives)
        inserted.dtypes = [side.tensors[i].dtype.base_dtype for i in out]
        name = self._add(
            op, inserted, [side.refs[i] for i in flat], [enum(side.tensors[i]) for i in flat],
            [enum(side.tensors[i]) for i in out], ahead,
        )  # fmt: skip
        for k, i in enumerate(out):
            side.refs[i] = self._output_of(name, k)

    def _observe(
        self, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts, ahead: bool
    ) -> None:
        """Let routines see values without a part in what computes them."""
        positions = side.selected([action.select for action in actions])
        if side.count == 0 and facts.backward_op is not None:
            return
        flat = side.flat(positions)
        inserted = Node(actions, facts, side.count, positions, [side.sizes[i] for i in positions], ())
        inserted.dtypes = ()
        refs, types = [side.refs[i] for i in flat], [enum(side.tensors[i]) for i in flat]
        if self.body.alone(op):
            self._add(op, inserted, refs, types, (), ahead)
            return
        size = sum(nbytes(side.tensors[i]) for i in flat)
        if self._pack and self._packed_bytes + size > self.rewriting.budget:
            self._flush()
        self._pack.append((inserted, refs, types, self.body.node_name(op)))
        self._packed_bytes += size

    def _flush(self) -> None:
        """Make one node of the observers that have gathered."""
        if not self._pack:
            return
        packed = Packed([(inserted, len(refs)) for inserted, refs, _, _ in self._pack])
        slot = self.rewriting.add(packed)
        refs = [ref for _, refs, _, _ in self._pack for ref in refs]
        types = [one for _, _, types, _ in self._pack for one in types]
        names = list(dict.fromkeys(name for *_, name in self._pack))
        node = py_func(
            f"amanda/{slot}", slot, [self.body.number, *refs, *(f"^{n}" for n in names)], types, ()
        )
        self.made.append(node)
        for name in names:
            self.inserted.setdefault(name, []).append(node.name)
        self._pack, self._packed_bytes = [], 0

    def _replace(self, op: tf.Operation, action: Action, inputs: Side, outputs: Side, facts: OpFacts) -> None:
        """Let a routine compute what the operation would have."""
        positions = list(range(inputs.count))
        flat = inputs.flat(positions)
        inserted = Node([action], facts, inputs.count, positions, inputs.sizes, range(outputs.count))
        inserted.dtypes = [tensor.dtype.base_dtype for tensor in outputs.tensors]
        name = self._add(
            op, inserted, [inputs.refs[i] for i in flat], [enum(inputs.tensors[i]) for i in flat],
            [enum(tensor) for tensor in outputs.tensors], ahead=True, instead=True,
        )  # fmt: skip
        node = self.body.node_name(op)
        self.removed[node] = name
        outputs.refs = [self._output_of(name, i) for i in range(len(outputs.refs))]
        for i, ref in enumerate(outputs.refs):
            self.own[node, Edge(node, i)] = ref

    def _replace_gradients(
        self, op: tf.Operation, action: Action, entering: Side, leaving: Side, facts: OpFacts
    ) -> None:
        """Let a routine compute the gradients that leave a backward operation."""
        gives = [i for i, tensor in enumerate(leaving.tensors) if is_plain(tensor)]
        count = range(entering.count)
        inserted = Node([action], facts, entering.count, count, entering.sizes, gives, gives)
        inserted.dtypes = [leaving.tensors[i].dtype for i in gives]
        name = self._add(
            op, inserted, entering.refs, [enum(tensor) for tensor in entering.tensors],
            [enum(leaving.tensors[i]) for i in gives], ahead=False,
        )  # fmt: skip
        for k, i in enumerate(gives):
            leaving.refs[i] = self._output_of(name, k)

    def _add(
        self,
        op: tf.Operation,
        inserted: Any,
        refs: Sequence[str],
        given: Sequence[int],
        gives: Sequence[int],
        ahead: bool,
        instead: bool = False,
        waits: Sequence[str] | None = None,
    ) -> str:
        """Make the node that calls routines; its name.

        ahead: whether the operation waits for it, not the reverse.  waits: its control inputs.
        """
        name = self.body.node_name(op)
        slot = self.rewriting.add(inserted)
        number = self.body.number_at(op, ahead) if self.body.number_at else self.body.number
        if waits is None:
            waits = self._waits(name, refs) if ahead else [f"^{name}"]
        node = py_func(f"amanda/{slot}", slot, [number, *refs, *waits], given, gives)
        self.made.append(node)
        self.inserted.setdefault(name, []).append(node.name)
        if not instead:
            (self.ahead if ahead else self.behind).setdefault(name, []).append(node.name)
        return str(node.name)

    def _waits(self, name: str, refs: Sequence[str]) -> list[str]:
        """Control inputs of what runs before an operation: it runs after the same nodes, if it runs."""
        inputs = self.body.nodes[name].input
        waits = [text for text in inputs if text.startswith("^")]
        if self.body.syntax.dead_values:
            waits += [f"^{self.body.syntax.parse(text).node}" for text in inputs
                      if not text.startswith("^") and text not in refs]  # fmt: skip
        return list(dict.fromkeys(waits))

    def _output_of(self, name: str, index: int) -> str:
        return (
            f"{name}:output:{index}"
            if not self.body.syntax.dead_values
            else (f"{name}:{index}" if index else name)
        )

    # ---- edges ----

    def _edges(self, node: Any) -> list[Edge]:
        known = self._inputs.get(node.name)
        if known is None:
            parse = self.body.syntax.parse
            known = [parse(text) for text in node.input if not text.startswith("^")]
            self._inputs[node.name] = known
        return known

    def _input_side(self, op: tf.Operation, node: Any) -> Side:
        refs = [self._read(node.name, i, edge) for i, edge in enumerate(self._edges(node))]
        return Side(refs, inputs_of(op, node), [size for _, size in input_sizes(node)])

    def _output_side(self, op: tf.Operation, node: Any) -> Side:
        outputs = outputs_of(op, node)
        refs = [self.body.syntax.write(Edge(node.name, i)) for i in range(len(outputs))]
        return Side(refs, outputs, [size for _, size in output_sizes(node)])

    def _change_edge(self, op: tf.Operation, index: int, ref: str) -> None:
        name = self.body.node_name(op)
        self.edges[name, index] = ref
        self.own.setdefault((name, self._edges(self.body.nodes[name])[index]), ref)

    def _read(self, name: str, index: int, edge: Edge) -> str:
        """What an input reads now."""
        found = self.edges.get((name, index))
        if found is not None:
            return found
        forward = self._forward_name.get(name)
        if forward is not None and (forward, edge) in self.own:
            return self.own[forward, edge]
        found = self.tensors.get(edge)
        return self.body.syntax.write(edge) if found is None else found

    def _read_output(self, edge: Edge) -> str:
        found = self.tensors.get(edge)
        return self.body.syntax.write(edge) if found is None else found

    def _connect(self) -> None:
        """Let every input read what it shall, and wait for what was put ahead of its node."""
        for name, node in self.body.nodes.items():
            if name in self.removed:
                continue
            edges = self._edges(node)
            controls = [text[1:] for text in node.input if text.startswith("^")]
            refs = [self._read(name, i, edge) for i, edge in enumerate(edges)]
            waits = [after for one in controls for after in self._behind(one)]
            waits += self.ahead.get(name, [])
            texts = [*refs, *dict.fromkeys(f"^{one}" for one in waits)]
            if list(node.input) != texts:
                del node.input[:]
                node.input.extend(texts)
        for node in self.made:
            for i, text in enumerate(node.input):
                if text.startswith("^") and text[1:] in self.removed:
                    node.input[i] = f"^{self.removed[text[1:]]}"

    def _behind(self, name: str) -> list[str]:
        own = self.removed.get(name, name)
        return [own, *self.behind.get(name, ())]
