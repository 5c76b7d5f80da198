"""Nodes that call routines, put between an operation's values and what reads them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import tensorflow as tf

from ._body import Body, Rewriting
from ._handles import RESOURCE, Lent
from ._nodes import INT64, passed
from ._packed import Packed
from ._side import enum, nbytes
from ._slots import Node, py_func
from ._traced import Traced
from ._waits import Waits


class _Pack:
    """Observers that will share a node.

    given: index and type of each tensor of the node, by how it is read.  names: of the operations that they
    are at; True where the node waits for the operation.
    """

    def __init__(self, number: str) -> None:
        self.number = number
        self.members: list[tuple[Node, Sequence[int]]] = []
        self.given: dict[str, tuple[int, int]] = {}
        self.names: dict[str, bool] = {}
        self.nbytes = 0


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
        self._packs: dict[Hashable, _Pack] = {}
        self._flushed: dict[Hashable, str] = {}

    def source_of(self, ref: str) -> tuple[Any, int, int] | None:
        """Return the place that keeps a value, its side and position there; None where none does."""
        source = self.sources.get(ref)
        return None if source is None or source[0] is None else source

    def passed(self, name: str, index: int, kind: int) -> str:
        """An output behind an operation that does nothing, and that TensorFlow does not take away."""
        self.made.append(passed(f"{name}/{index}", [self.output_of(name, index)], kind))
        return self.output_of(f"{name}/{index}", 0)

    def call_function(
        self,
        op: tf.Operation,
        routine: Traced,
        refs: Sequence[str],
        gives: Sequence[int],
        ahead: bool,
        waits: Sequence[str],
    ) -> str:
        """Make a node that calls a traced routine; its name."""
        self.rewriting.library += routine.definitions
        numbers = count(len(self.made))  # one that was written into a file may be there already
        name = next(one for i in numbers if (one := f"amanda/traced{i}") not in self.body.nodes)
        if ahead and not refs:
            waits = self._waits(self.body.node_name(op), refs)
        output = "" if self.body.syntax.dead_values else ":output:0"
        self.made += routine.call(name, refs, waits, gives, output)
        return name

    def shares(self, op: tf.Operation, tensors: Sequence[Any]) -> bool:
        """Return True if observers of some values of an operation share a node with others."""
        return self.body.frames is None or self.body.frames.group(op, tensors) is not None

    def observe(
        self, op: tf.Operation, node: Node, refs: Sequence[str], tensors: Sequence[Any], ahead: bool
    ) -> None:
        """Make routines see values without a part in what computes them."""
        frames = self.body.frames
        group = () if frames is None else frames.group(op, tensors)
        if group is None:
            packed = Packed([(node, range(len(refs)))])
            self.add(op, packed, refs, [enum(one) for one in tensors], (), ahead)
            return
        name = self.body.node_name(op)
        forward = self.forward.get(name)
        for other in [one for one in self._packs if one != group]:
            if forward in self._packs[other].names or frames.encloses(other, group):
                self._flush(other)
        pack = self._packs.get(group)
        sizes = {ref: nbytes(one) for ref, one in zip(refs, tensors, strict=True)}
        if pack is not None:
            size = sum(size for ref, size in sizes.items() if ref not in pack.given)
            if pack.nbytes + size > self.rewriting.budget:
                self._flush(group)
                pack = None
        if pack is None:
            pack = self._packs[group] = _Pack(self.body.number_at(op, ahead))
        for ref, one in zip(refs, tensors, strict=True):
            if ref not in pack.given:
                pack.given[ref] = len(pack.given), enum(one)
                pack.nbytes += sizes[ref]
        pack.members.append((node, [pack.given[ref][0] for ref in refs]))
        pack.names[name] = pack.names.get(name, False) or frames is None or not frames.is_flow(op)

    def flush(self) -> None:
        """Make the nodes of all observers that have gathered."""
        for group in list(self._packs):
            self._flush(group)

    def _flush(self, group: Hashable) -> None:
        """Make one node of a group's observers; a tensor that several observe enters it once."""
        pack = self._packs.pop(group)
        refs, types = list(pack.given), [kind for _, kind in pack.given.values()]
        waits = [f"^{name}" for name, is_waited_for in pack.names.items() if is_waited_for]
        if group in self._flushed:  # observers run in the order of their ops
            waits.append(f"^{self._flushed[group]}")
        waits += [one for name in pack.names for one in self._after_forward(name, pack.number)]
        node = self._calling(Packed(pack.members), pack.number, refs, list(dict.fromkeys(waits)), types, ())
        self.waits.note(node.name, next(iter(pack.names)), pack.number)
        for name in pack.names:
            self.inserted.setdefault(name, []).append(node.name)
        self._flushed[group] = node.name

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
        number = self.body.number_at(op, ahead)
        if waits is None:
            waits = self._waits(name, refs) if ahead else [f"^{name}"]
        for group in [one for one, pack in self._packs.items() if self.forward.get(name) in pack.names]:
            self._flush(group)
        waits = list(dict.fromkeys([*waits, *self._after_forward(name, number)]))
        node = self._calling(inserted, number, refs, waits, given, gives)
        self.waits.note(node.name, name, number)
        self.inserted.setdefault(name, []).append(node.name)
        if not instead and not (ahead and (gives or not refs or decides(op))):
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


def decides(op: tf.Operation) -> bool:
    """Return True if a loop may end on an operation.

    TensorFlow's loop optimizer fails where such an operation waits for others, or reads a later output.
    """
    return any(output.dtype == tf.bool for output in op.outputs)
