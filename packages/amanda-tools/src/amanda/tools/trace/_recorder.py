"""The graph while it is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda.tools.trace._graph import Graph, Op, Position, Tensor, spread
from amanda.tools.trace._values import Description


@dataclass(slots=True, eq=False)
class Place:
    """An op of the program, forward or backward, and the recorded ops that are executions of it.

    makes: kind of the tensors that it makes; "" for that of its first input.  written: positions of
    inputs that it writes.  recalled: of a backward op that is executed,
    the forward op, where several are executions of one.
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
    ops: list[int] = field(default_factory=list)
    is_dropped: bool = False
    recalled: int | None = None

    @property
    def forward_op(self) -> int | None:
        """The recorded op whose backward op is executed: the one recalled, or the last."""
        if self.recalled is not None or self.forward is None:
            return self.recalled
        return self.forward.ops[-1] if self.forward.ops else None


@dataclass(slots=True, eq=False)
class Executed:
    """One recorded op.

    written: by the flat position of an input, the tensor that it is after the op.
    parts: tensors that others saw written since, through memory that they share.
    """

    place: Place
    inputs: tuple[Position, ...]
    outputs: tuple[Position, ...]
    forward: int | None
    calls: int | None
    written: dict[int, int] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Value:
    """One recorded tensor."""

    described: Description
    kind: str
    name: str | None
    producer: int | None
    alias_of: int | None
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
    ) -> int:
        """The index of a new tensor."""
        self.values.append(Value(described, kind, name, producer, alias_of))
        return len(self.values) - 1

    def add_op(
        self, place: Place, inputs: tuple[Position, ...], forward: int | None, calls: int | None = 1
    ) -> int:
        """The index of a new op, which reads its inputs."""
        index = len(self.ops)
        self.ops.append(Executed(place, inputs, (), forward, calls))
        place.ops.append(index)
        self._frameworks.setdefault(place.framework, len(self._frameworks))
        for tensor in spread(inputs):
            self.add_consumer(tensor, index)
        return index

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
