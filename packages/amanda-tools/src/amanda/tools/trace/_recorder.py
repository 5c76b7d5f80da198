"""The graph while it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NamedTuple

from amanda.tools.trace._graph import Graph, Op, Position, Tensor, each, indices_at
from amanda.tools.trace._values import Facts

_FRAMES_KEPT = 256
UNKNOWN = -1
"""Stands for a tensor that may be any."""


class Frame(NamedTuple):
    """An execution under way.

    target: the recorded op that the execution is one of; None for a new op.  forward: of a backward op.
    given: the tensors among the inputs by flat position.  serial: of the last write before the op.
    number: that autodiff's next node would have had.
    """

    inputs: tuple[Position, ...]
    target: int | None
    forward: int | None = None
    given: Sequence[Any] = ()
    serial: int = 0
    number: int | None = None


@dataclass(slots=True, eq=False)
class ProgramOp:
    """An op of the program, forward or backward, and the recorded ops that are executions of it.

    op: has the fields that all executions share.  framework: its namespace.  forward: of a backward op.
    symbolic: whether it is of a graph, and analysed on symbols.
    ops: the recorded ones.  last: the one that was executed last.
    frames: executions under way, each with its thread, and some that raised.
    nodes: of autodiff that its executions have made: the number of the first, that after the last, the op.
    resumed: the forward op of the backward op under way.  by_forward: of a backward op, by the forward op.
    """

    op: Op
    facts: Facts
    framework: str
    symbolic: bool
    forward: ProgramOp | None
    ops: list[int] = field(default_factory=list)
    last: int | None = None
    frames: list[tuple[int, Frame]] = field(default_factory=list)
    is_dropped: bool = False
    nodes: list[tuple[int, int, int]] = field(default_factory=list)
    resumed: int | None = None
    by_forward: dict[int | None, int] = field(default_factory=dict)

    def begin(self, frame: Frame) -> None:
        """Begin an execution in this thread."""
        self.frames.append((get_ident(), frame))
        del self.frames[:-_FRAMES_KEPT]

    def end(self) -> Frame | None:
        """End the innermost execution in this thread; return None where none is known."""
        thread = get_ident()
        for i in range(len(self.frames) - 1, -1, -1):
            if self.frames[i][0] == thread:
                return self.frames.pop(i)[1]
        return None

    @property
    def position(self) -> int:
        """Return which of the recorded ops the execution under way in this thread is."""
        thread = get_ident()
        frame = next((frame for key, frame in reversed(self.frames) if key == thread), None)
        if frame is None:
            return 0
        return len(self.ops) if frame.target is None else self.ops.index(frame.target)

    def maker(self, number: int | None) -> int | None:
        """Return the op that has made the node of this number; without one, the first op."""
        if number is not None:
            for first, end, op in reversed(self.nodes):
                if first <= number < end:
                    return op
        return self.ops[0] if self.ops else None


@dataclass(slots=True, eq=False)
class Executed:
    """One recorded op.

    op: as it was when its first execution began.  roots: of its inputs, by which executions are told apart.
    written: by the flat position of an input, the tensor that the input is after the op.
    parts: tensors that were found written later, through memory that they share.
    """

    op: Op
    calls: int | None
    roots: tuple[Position, ...]
    recomputations: int = 0
    outputs: tuple[Position, ...] = ()
    written: dict[int, int] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Value:
    """One recorded tensor.

    root: the tensor before it was first written; UNKNOWN for new data from outside.
    consumers: the ops that read it, or write a part of its memory, as keys.
    """

    tensor: Tensor
    root: int
    consumers: dict[int, None] = field(default_factory=dict)


class Recorder:
    """Ops and tensors in the order in which they come.

    executions: most ops of one place; further executions are counted at the last.  limit: most ops.
    """

    def __init__(self, executions: int, limit: int) -> None:
        self.executions, self._limit = executions, limit
        self._frameworks: dict[str, int] = {}
        self.ops: list[Executed] = []
        self.values: list[Value] = []
        self._dropped = 0
        self._graph: Graph | None = None

    def add_tensor(self, described: Tensor, same: bool = False, from_outside: bool = False) -> int:
        """Return the index of a new tensor.

        same: it is its alias, but written or handed on.  from_outside: it is new data in each execution.
        """
        index = root = len(self.values)
        if same and described.alias_of is not None:
            root = self.values[described.alias_of].root
        self.values.append(Value(replace(described, index=index), UNKNOWN if from_outside else root))
        self._graph = None
        return index

    def add_op(
        self, place: ProgramOp, inputs: tuple[Position, ...], forward: int | None, recomputed: bool
    ) -> int:
        """Return the index of a new op, which reads its inputs."""
        index = len(self.ops)
        framework = self._frameworks.setdefault(place.framework, len(self._frameworks))
        op = replace(place.op, index=index, framework=framework, inputs=inputs, forward=forward)
        roots = tuple(each(lambda tensor: self.values[tensor].root, one) for one in inputs)
        calls = None if place.symbolic else int(not recomputed)
        self.ops.append(Executed(op, calls, roots, recomputations=int(recomputed)))
        place.ops.append(index)
        for tensor in indices_at(inputs):
            self.values[tensor].consumers[index] = None
        self._graph = None
        return index

    def count(self, op: int, recomputed: bool = False) -> None:
        """Note a further execution of an op, or a recomputation."""
        executed = self.ops[op]
        if recomputed:
            executed.recomputations += 1
        else:
            executed.calls = (executed.calls or 0) + 1
        self._graph = None

    @property
    def is_full(self) -> bool:
        """Return True if no further op is recorded."""
        return len(self.ops) >= self._limit

    def drops(self, place: ProgramOp) -> bool:
        """Return True for an op that came after the limit, which is counted once."""
        if place.ops or not self.is_full:
            return False
        if not place.is_dropped:
            place.is_dropped = True
            self._dropped += 1
            self._graph = None
        return True

    def op(self, index: int) -> Op:
        """Return a recorded op as it is now."""
        executed = self.ops[index]
        made = set(indices_at(executed.outputs))
        writes = (*executed.written.values(), *executed.parts)
        return replace(
            executed.op, outputs=executed.outputs, calls=executed.calls,
            recomputations=executed.recomputations,
            writes=tuple(one for one in writes if one not in made),
        )  # fmt: skip

    def tensor(self, index: int) -> Tensor:
        """Return a recorded tensor as it is now."""
        value = self.values[index]
        return replace(value.tensor, consumers=tuple(value.consumers))

    def producers(self, op: Op) -> list[Op]:
        """Return the ops that made the tensors which a recorded op reads, or a part of which it writes."""
        parts = [self.values[index].tensor.alias_of for index in op.writes]
        tensors = [*op.reads, *(index for index in parts if index is not None)]
        makers = dict.fromkeys(self.values[index].tensor.producer for index in tensors)
        return [self.op(maker) for maker in makers if maker is not None and maker != op.index]

    def graph(self) -> Graph:
        """Return the graph so far; the same object as long as nothing is added."""
        if self._graph is None:
            ops = tuple(map(self.op, range(len(self.ops))))
            tensors = tuple(map(self.tensor, range(len(self.values))))
            self._graph = Graph(ops, tensors, tuple(self._frameworks), self.executions, self._dropped)
        return self._graph
