"""The graph while it is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda.tools.trace._graph import Graph, Op, Position, Tensor, spread
from amanda.tools.trace._values import Description

UNKNOWN = -1
"""Stands for a tensor that may be any."""


@dataclass(slots=True, eq=False)
class Place:
    """An op of the program, forward or backward, and the recorded ops that are executions of it.

    makes: kind of the tensors that it makes; "" for that of its first input.
    written: positions of inputs that it writes.
    brings_in: whether what it makes is new data from outside, as of an iterator.
    in_backward: whether it is a forward op that a backward pass executed first.
    last: the op that was executed last.
    made: with which numbers autodiff counts the nodes of an op: the first, the one after the last, the op.
    recalled: the forward op that a backward op under way belongs to.
    by_forward: of a backward op, its op for each forward op.
    """

    id: int
    phase: str
    type: str
    name: str
    framework: str
    module: str
    source: str
    in_place: bool = False
    attributes: Mapping[str, Any] | None = None
    forward: Place | None = None
    makes: str = "activation"
    symbolic: bool = False
    written: Sequence[int] = ()
    brings_in: bool = False
    ops: list[int] = field(default_factory=list)
    is_dropped: bool = False
    in_backward: bool = False
    last: int | None = None
    made: list[tuple[int, int, int]] = field(default_factory=list)
    recalled: int | None = None
    by_forward: dict[int | None, int] = field(default_factory=dict)

    def maker(self, number: int | None) -> int | None:
        """The op that has made a node of this number; without one, the first."""
        if number is not None:
            for first, end, op in reversed(self.made):
                if first <= number < end:
                    return op
        return self.ops[0] if self.ops else None


@dataclass(slots=True, eq=False)
class Executed:
    """One recorded op.

    roots: of its inputs, by which another execution is told to be the same op.
    written: by the flat position of an input, the tensor that it is after the op.
    parts: tensors that others saw written since, through memory that they share.
    """

    place: Place
    inputs: tuple[Position, ...]
    outputs: tuple[Position, ...]
    forward: int | None
    calls: int | None
    roots: tuple[Position, ...] = ()
    written: dict[int, int] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Value:
    """One recorded tensor.

    root: what it was before it was written for the first time; UNKNOWN of new data from outside.
    """

    described: Description
    kind: str
    name: str | None
    producer: int | None
    alias_of: int | None
    root: int
    consumers: list[int] = field(default_factory=list)


class Recorder:
    """Ops and tensors in the order in which they come."""

    def __init__(self, executions: int = 1) -> None:
        self._executions = executions
        self._frameworks: dict[str, int] = {}
        self.ops: list[Executed] = []
        self.values: list[Value] = []
        self.dropped = 0
        self._frozen: tuple[tuple[int, ...], Graph] | None = None
        self._changes = 0

    def add_tensor(
        self,
        described: Description,
        kind: str,
        name: str | None = None,
        producer: int | None = None,
        alias_of: int | None = None,
        same: bool = False,
    ) -> int:
        """The index of a new tensor. same: as its alias, but written or handed on."""
        index = len(self.values)
        root = self.values[alias_of].root if same and alias_of is not None else index
        self.values.append(Value(described, kind, name, producer, alias_of, root))
        return index

    def add_op(
        self, place: Place, inputs: tuple[Position, ...], forward: int | None, calls: int | None = 1
    ) -> int:
        """The index of a new op, which reads its inputs."""
        index = len(self.ops)
        roots = tuple(map(self._root, inputs))
        self.ops.append(Executed(place, inputs, (), forward, calls, roots))
        place.ops.append(index)
        self._frameworks.setdefault(place.framework, len(self._frameworks))
        for tensor in spread(inputs):
            self.add_consumer(tensor, index)
        return index

    def _root(self, position: Position) -> Position:
        if isinstance(position, tuple):
            return tuple(map(self._root, position))  # type: ignore[arg-type]
        return None if position is None else self.values[position].root

    def add_consumer(self, tensor: int, op: int) -> None:
        """Note that an op reads a tensor, or writes a part of its memory."""
        consumers = self.values[tensor].consumers
        if op not in consumers[-1:] and op not in consumers:
            consumers.append(op)

    def count(self, op: int) -> None:
        """Note a further execution of an op."""
        executed = self.ops[op]
        executed.calls = (executed.calls or 0) + 1
        self._changes += 1

    def drop(self, place: Place) -> None:
        """Count an op that is not recorded."""
        if not place.is_dropped:
            place.is_dropped = True
            self.dropped += 1

    # ---- what was recorded ----

    def op(self, index: int) -> Op:
        """A recorded op as it is now."""
        executed = self.ops[index]
        place = executed.place
        made = set(spread(executed.outputs))
        written = [*executed.written.values(), *executed.parts]
        return Op(
            index, place.id, place.phase, place.type, place.name, self._frameworks[place.framework],
            place.module, place.source, executed.inputs, executed.outputs,
            tuple(one for one in written if one not in made), executed.forward, executed.calls,
            place.in_place, place.attributes,
        )  # fmt: skip

    def producers(self, op: Op) -> list[Op]:
        """The ops that made what a recorded op reads, or wrote a part of."""
        parts = [self.values[index].alias_of for index in op.writes]
        tensors = [*op.reads, *(index for index in parts if index is not None)]
        makers = dict.fromkeys(self.values[index].producer for index in tensors)
        return [self.op(maker) for maker in makers if maker is not None and maker != op.index]

    def tensor(self, index: int) -> Tensor:
        """A recorded tensor as it is now."""
        one = self.values[index]
        return Tensor(
            index, *one.described, one.kind, one.name, one.producer, tuple(one.consumers), one.alias_of
        )

    def graph(self) -> Graph:
        """The graph so far; the same object as long as nothing is added."""
        state = (len(self.ops), len(self.values), self.dropped, self._changes)
        if self._frozen is None or self._frozen[0] != state:
            ops = tuple(map(self.op, range(len(self.ops))))
            tensors = tuple(map(self.tensor, range(len(self.values))))
            graph = Graph(ops, tensors, tuple(self._frameworks), self._executions, self.dropped)
            self._frozen = state, graph
        return self._frozen[1]
