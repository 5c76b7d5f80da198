"""Nodes that call routines, put between an operation's values and what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Any, NamedTuple

import tensorflow as tf
from amanda.backend import Action, OpFacts, Side
from tensorflow.core.framework import node_def_pb2

from ._body import Body, Rewriting, Taped
from ._handles import RESOURCE, Lent
from ._original import original
from ._side import enum, is_plain, nbytes
from ._slots import INT64, Node, Packed, py_func
from ._traced import Traced, tell_python, traced
from ._waits import Waits


class Read(NamedTuple):
    """An input of another operation that a replacement reads: its op id and flat position, and what it is."""

    op_id: int
    position: int
    ref: str
    tensor: Any


Reads = Sequence[Read]


class Insertions:
    """The nodes inserted into one body.

    made: those nodes.  inserted: their names by the operation that they run with.
    ahead, behind: names of those that an operation waits for, or that wait for it.
    sources: where the values are kept that an inserted node gives, by how they are written.
    forward: by the name of a gradient operation, that of its forward operation where it is in this body.
    waits: what the nodes wait for.
    """

    def __init__(self, body: Body, rewriting: Rewriting) -> None:
        self.body = body
        self.rewriting = rewriting
        self.made: list[Any] = []
        self.inserted: dict[str, list[str]] = {}
        self.behind: dict[str, list[str]] = {}
        self.ahead: dict[str, list[str]] = {}
        self.sources: dict[str, tuple[Any, int, int]] = {}
        self.forward: Mapping[str, str] = {}
        self.waits = Waits(body, self.made)
        self._places: dict[int, int] = {}
        self._pack: list[tuple[Node, list[str], list[int], str]] = []
        self._packed_at: set[str] = set()
        self._packed_bytes = 0
        self._flushed: list[str] = []

    def node(self, actions: Sequence[Action], facts: OpFacts, *layout: Any) -> Node:
        """Routines at an operation; layout: what `Insertion` takes besides."""
        node = Node(actions, facts, *layout)
        node.dtypes, node.keeps, node.taped, node.borrows = (), None, False, ()
        node.depth = self.rewriting.depths.get(facts.op_id, 0)
        return node

    def insert_all(
        self, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts, where: str
    ) -> None:
        """Put routines at a side, those that follow one another in one node.

        where: "before" or "after" the operation.
        """
        for (observing, *_), group in groupby(actions, self._kind):
            if observing:
                self._observe(op, list(group), side, facts, where)
            else:
                self._insert(op, list(group), side, facts, where)

    def _kind(self, action: Action) -> tuple[bool, bool, bool, str, int]:
        # Written into a file each tool's are a function of their own, so that it is told which fails.
        tool = id(action.tool) if self.rewriting.written else 0
        restless = self.rewriting.restless(action) if action.traceable else ""
        return action.observer, self.takes_part(action), action.traceable, restless, tool

    def takes_part(self, action: Action) -> bool:
        """Return True if a routine takes part in autodiff."""
        return action.differentiable or self.rewriting.state.autodiff

    def _insert(
        self, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts, where: str
    ) -> None:
        positions = side.selected([action.select for action in actions])
        if side.count == 0 and facts.backward_op is not None:
            self._tell_no_gradient(op, where)
            return
        gives = side.where(positions, is_plain)
        given, out = side.flat(positions), side.flat(gives)
        node = self.node(actions, facts, side.count, positions, [side.sizes[i] for i in positions], gives)
        node.dtypes = [side.symbols[i].dtype.base_dtype for i in out]
        self._let_keep(node, facts, where, given, out, self.takes_part(actions[0]))
        refs = [side.refs[i] for i in given]
        types = [enum(side.symbols[i]) for i in given]
        gives_types = [enum(side.symbols[i]) for i in out]
        inline = None
        if node.keeps is not None:
            self._tell_kept(node)
        elif gives_types:
            inline = traced(node, [side.symbols[i] for i in given], self.rewriting)
        if inline is not None:
            name = self._inline(op, inline, refs, gives_types, where == "before")
        elif self.rewriting.written:
            for action in actions if not gives_types else ():
                tell_python(action, facts, "it is given nothing that it can change", self.rewriting)
            return
        else:
            name = self.add(op, node, refs, types, gives_types, where == "before")
        for k in range(len(given)):
            self.sources.setdefault(refs[k], (node.keeps, 0, k))
        for k, i in enumerate(out):
            side.refs[i] = self.output_of(name, k)
            if k and where == "before" and _decides(op):
                side.refs[i] = self._passed(name, k, gives_types[k])
            self.sources[side.refs[i]] = (node.keeps, 1, k)

    def _tell_no_gradient(self, op: tf.Operation, where: str) -> None:
        if not op.inputs:
            return  # a constant
        what = "enters" if where == "before" else "leaves"
        self.rewriting.report(
            f"routines {where} backward ops that no gradient {what}",
            "in a graph such routines get gradients; ops that compute shapes, among others, have none",
        )

    def _tell_kept(self, node: Node) -> None:
        """Say why a traceable routine is not traced; a @differentiable one is meant to be as it is."""
        if node.taped:
            why = "it takes part in autodiff"
        else:
            why = "what it gives is kept for a backward function in another graph"
        for action in node.actions:
            if not action.differentiable:
                tell_python(action, node.facts, why, self.rewriting)

    def _passed(self, name: str, index: int, kind: int) -> str:
        """An output behind an operation that does nothing, and that TensorFlow does not take away."""
        read = self.output_of(name, index)
        node = node_def_pb2.NodeDef(name=f"{name}/{index}", op="EnsureShape", input=[read])
        node.attr["T"].type = kind
        node.attr["shape"].shape.unknown_rank = True
        self.made.append(node)
        return self.output_of(node.name, 0)

    def _inline(
        self,
        op: tf.Operation,
        routine: Traced,
        refs: Sequence[str],
        gives: Sequence[int],
        ahead: bool,
        waits: Sequence[str] = (),
    ) -> str:
        """Make a node that calls a traced routine; its name."""
        self.rewriting.library += routine.definitions
        numbers = count(len(self.made))  # one that was written into a file may be there already
        name = next(one for i in numbers if (one := f"amanda/traced{i}") not in self.body.nodes)
        if ahead and not refs:
            waits = self._waits(self.body.node_name(op), refs)
        routine.written = "" if self.body.syntax.dead_values else ":output:0"
        self.made += routine.call(name, refs, waits, gives)
        return name

    def _let_keep(
        self, node: Node, facts: OpFacts, where: str, given: list[int], gave: list[int], takes_part: bool
    ) -> None:
        wanted = takes_part or self.body.apart or facts.op.name in self.body.stacked
        if not (wanted and self.rewriting.differentiated) or facts.backward_op is not None:
            return
        count = self._places[facts.op_id] = self._places.get(facts.op_id, 0) + 1
        node.keeps, node.taped = (facts.op_id, where, count), takes_part
        node.readers = self.rewriting.readers[node.keeps]
        node.readers.told = not self.body.apart and facts.op.name not in self.body.stacked
        if takes_part:
            name = f"amanda/{len(self.rewriting.table)}"  # that of the node which is made next
            taped = Taped(where, node.keeps, (self.body.identity, name), given, gave)
            self.rewriting.taped.setdefault(facts.op_id, []).append(taped)

    def _observe(
        self, op: tf.Operation, actions: Sequence[Action], side: Side, facts: OpFacts, where: str
    ) -> None:
        """Make routines see values without a part in what computes them."""
        positions = side.selected([action.select for action in actions])
        if side.count == 0 and facts.backward_op is not None:
            self._tell_no_gradient(op, where)
            return
        flat = side.flat(positions)
        node = self.node(actions, facts, side.count, positions, [side.sizes[i] for i in positions], ())
        refs, types = [side.refs[i] for i in flat], [enum(side.symbols[i]) for i in flat]
        if self.body.alone(op):
            self.add(op, node, refs, types, (), where == "before")
            return
        size = sum(nbytes(side.symbols[i]) for i in flat)
        if self._pack and self._packed_bytes + size > self.rewriting.budget:
            self.flush()
        self._pack.append((node, refs, types, self.body.node_name(op)))
        self._packed_at.add(self.body.node_name(op))
        self._packed_bytes += size

    def flush(self) -> None:
        """Make one node of the observers that have gathered."""
        if not self._pack:
            return
        packed = Packed([(node, len(refs)) for node, refs, _, _ in self._pack])
        refs = [ref for _, refs, _, _ in self._pack for ref in refs]
        types = [one for _, _, types, _ in self._pack for one in types]
        names = list(dict.fromkeys(name for *_, name in self._pack))
        waits = [f"^{name}" for name in (*names, *self._flushed)]  # observers run in the order of their ops
        number = self.body.number
        waits += [one for name in names for one in self._after_forward(name, number)]
        node = self._calling(packed, number, refs, list(dict.fromkeys(waits)), types, ())
        self.waits.note(node.name, "", number)
        for name in names:
            self.inserted.setdefault(name, []).append(node.name)
        self._pack, self._packed_at, self._packed_bytes, self._flushed = [], set(), 0, [node.name]

    def replace(
        self, op: tf.Operation, action: Action, inputs: Side, outputs: Side, facts: OpFacts, reads: Reads
    ) -> str | None:
        """Replace the operation by a routine; return the new node's name, None where that cannot be."""
        if not all(is_plain(tensor) for tensor in outputs.symbols):
            self.rewriting.report(f"the replacement of {op.name}", f"what {op.type} gives is no value")
            return None
        if not self.rewriting.written:
            tell_python(action, facts, f"it replaces {op.type}", self.rewriting)
        positions = inputs.selected([action.select if action.reads else None])
        flat = inputs.flat(positions)
        sizes = [inputs.sizes[i] for i in positions]
        node = self.node([action], facts, inputs.count, positions, sizes, range(outputs.count))
        node.reads = len(reads)
        node.dtypes = [tensor.dtype.base_dtype for tensor in outputs.symbols]
        node.original = original(op) if action.takes_original else None
        given = [*flat, *[-1] * len(reads)]
        self._let_keep(node, facts, "instead", given, list(range(len(outputs.refs))), True)
        if node.keeps is not None:
            self._lead_past(facts, reads, len(flat))
        refs = [*(inputs.refs[i] for i in flat), *(one.ref for one in reads)]
        types = [*(enum(inputs.symbols[i]) for i in flat), *(enum(one.tensor) for one in reads)]
        waits = [text for text in self.body.nodes[self.body.node_name(op)].input if text.startswith("^")]
        gives = [enum(tensor) for tensor in outputs.symbols]
        if self.rewriting.written:
            symbols = [*(inputs.symbols[i] for i in flat), *(one.tensor for one in reads)]
            inline = traced(node, symbols, self.rewriting)
            if inline is None:
                return None
            name = self._inline(op, inline, refs, gives, False, waits)
        else:
            after = waits if reads else None
            name = self.add(op, node, refs, types, gives, ahead=True, instead=True, waits=after)
        outputs.refs = [self.output_of(name, i) for i in range(len(outputs.refs))]
        for i, ref in enumerate(outputs.refs):
            self.sources[ref] = (node.keeps, 1, i)
        return name

    def _lead_past(self, facts: OpFacts, reads: Reads, own: int) -> None:
        """Lead gradients of what a replacement reads of other operations to these."""
        taped = self.rewriting.taped[facts.op_id][-1]
        for reader in dict.fromkeys(one.op_id for one in reads):
            given = [one.position if one.op_id == reader else -1 for one in reads]
            past = replace(taped, side="past", given=[-1] * own + given, maker=facts.op_id)
            self.rewriting.taped.setdefault(reader, []).append(past)

    def replace_gradients(
        self, op: tf.Operation, action: Action, entering: Side, leaving: Side, facts: OpFacts
    ) -> None:
        """Replace the gradients that leave a backward operation by what a routine computes."""
        tell_python(action, facts, f"it replaces {op.type}", self.rewriting)
        gives = [i for i, tensor in enumerate(leaving.symbols) if is_plain(tensor)]
        positions = range(entering.count)
        node = self.node([action], facts, entering.count, positions, entering.sizes, gives, gives)
        node.dtypes = [leaving.symbols[i].dtype for i in gives]
        types = [enum(tensor) for tensor in entering.symbols]
        name = self.add(op, node, entering.refs, types, [enum(leaving.symbols[i]) for i in gives], False)
        for k, i in enumerate(gives):
            leaving.refs[i] = self.output_of(name, k)

    def add(
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
        """Make a node that calls a new slot; its name.

        ahead: whether the operation comes after it, not the reverse.  waits: its control inputs.
        An operation that reads what the node gives need not wait for it, one without inputs stays as it is.
        """
        name = self.body.node_name(op)
        number = self.waits.number_at(op, ahead)
        if waits is None:
            waits = self._waits(name, refs) if ahead else [f"^{name}"]
        if self.forward.get(name) in self._packed_at:
            self.flush()
        waits = list(dict.fromkeys([*waits, *self._after_forward(name, number)]))
        node = self._calling(inserted, number, refs, waits, given, gives)
        self.waits.note(node.name, name, number)
        self.inserted.setdefault(name, []).append(node.name)
        if not instead and not (ahead and (gives or not refs or _decides(op))):
            (self.ahead if ahead else self.behind).setdefault(name, []).append(node.name)
        return str(node.name)

    def _calling(
        self, inserted: Any, number: str, refs: Sequence[str], waits: Sequence[str], given: Sequence[int],
        gives: Sequence[int],
    ) -> Any:  # fmt: skip
        """Make a node that calls a new slot.

        Where there are several devices each handle is lent, but for one that is alone: the node goes there.
        """
        slot, refs, given = self.rewriting.add(inserted), list(refs), list(given)
        handles = [i for i, kind in enumerate(given) if kind == RESOURCE]
        if len(handles) > 1 and self.rewriting.several_devices:
            inserted.borrows = handles
            for i in handles:
                lent = self.rewriting.add(Lent())
                lender = py_func(f"amanda/{lent}", lent, [number, refs[i]], [RESOURCE], [INT64])
                self.made.append(lender)
                refs[i], given[i] = self.output_of(lender.name, 0), INT64
        node = py_func(f"amanda/{slot}", slot, [number, *refs, *waits], given, gives)
        self.made.append(node)
        return node

    def output_of(self, name: str, index: int) -> str:
        """Return an output of an inserted node as it is written as an input."""
        if self.body.syntax.dead_values:
            return f"{name}:{index}" if index else name
        return f"{name}:output:{index}"

    def _after_forward(self, name: str, number: str) -> list[str]:
        """Return what routines at a gradient operation wait for: its forward one's, which hand on `run`."""
        return self.waits.after(self.inserted.get(self.forward.get(name, ""), ()), number)

    def _waits(self, name: str, refs: Sequence[str]) -> list[str]:
        """Control inputs of what runs before an operation: it runs after the same nodes, if it runs."""
        inputs = self.body.nodes[name].input
        waits = [text for text in inputs if text.startswith("^")]
        if self.body.syntax.dead_values:
            waits += [f"^{self.body.syntax.parse(text).node}" for text in inputs
                      if not text.startswith("^") and text not in refs]  # fmt: skip
        return list(dict.fromkeys(waits))


def _decides(op: tf.Operation) -> bool:
    """Return True if a loop may end on an operation.

    TensorFlow's loop optimizer fails where such an operation waits for others, or reads a later output.
    """
    return any(output.dtype == tf.bool for output in op.outputs)
