"""The graph while it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NamedTuple

from amanda.tools.trace._graph import Graph, Op, Position, Tensor, indices_at, map_position
from amanda.tools.trace._values import TraceFacts

_FRAMES_LIMIT = 256
UNKNOWN = -1
"""Root of a tensor that fits any other, such as new data from outside."""


class OpenExecution(NamedTuple):
    """An execution under way.

    target: the recorded op that the execution repeats; None for a new op.  forward: op of a backward op.
    input_states: tensors among the inputs by flat position.  serial: of the last write before the op.
    number: of autodiff's next node before the op.
    """

    inputs: tuple[Position, ...]
    target: int | None
    forward: int | None = None
    input_states: Sequence[Any] = ()
    serial: int = 0
    number: int | None = None


@dataclass(slots=True, eq=False)
class ProgramOp:
    """An op of the program, forward or backward, and the recorded ops that are executions of it.

    op: has the fields that all executions share.  framework: its namespace.  forward: of a backward op.
    symbolic: an op of a graph, analysed on symbols.
    ops: indices of the recorded ops.  last: index of the op that was executed last.
    frames: executions under way, each with its thread, and some that raised.
    nodes: autodiff's nodes of each execution: number of the first, number after the last, index of the op.
    resumed: the forward op of the backward op under way.  by_forward: recorded backward ops by forward op.
    """

    op: Op
    facts: TraceFacts
    framework: str
    symbolic: bool
    forward: ProgramOp | None
    ops: list[int] = field(default_factory=list)
    last: int | None = None
    frames: list[tuple[int, OpenExecution]] = field(default_factory=list)
    is_dropped: bool = False
    nodes: list[tuple[int, int, int]] = field(default_factory=list)
    resumed: int | None = None
    by_forward: dict[int | None, int] = field(default_factory=dict)

    def begin(self, frame: OpenExecution) -> None:
        """Begin an execution in this thread."""
        self.frames.append((get_ident(), frame))
        del self.frames[:-_FRAMES_LIMIT]

    def end(self) -> OpenExecution | None:
        """End the innermost execution in this thread; return it, or None without one."""
        thread = get_ident()
        for i in range(len(self.frames) - 1, -1, -1):
            if self.frames[i][0] == thread:
                return self.frames.pop(i)[1]
        return None

    @property
    def position(self) -> int:
        """Return the position in `ops` of the execution under way in this thread."""
        thread = get_ident()
        frame = next((frame for key, frame in reversed(self.frames) if key == thread), None)
        if frame is None:
            return 0
        return len(self.ops) if frame.target is None else self.ops.index(frame.target)

    def op_of_node(self, number: int | None) -> int | None:
        """Return the op that made the node of this number; the first op for None or an unknown number."""
        if number is not None:
            for first, end, op in reversed(self.nodes):
                if first <= number < end:
                    return op
        return self.ops[0] if self.ops else None


@dataclass(slots=True, eq=False)
class RecordedOp:
    """A recorded op.

    op: at the begin of the first execution.  roots: of the inputs, which tell ops of one place apart.
    written: index of each written input after the op, by flat position.
    parts: tensors that share written memory, and were read after the write.
    """

    op: Op
    calls: int | None
    roots: tuple[Position, ...]
    recomputations: int = 0
    outputs: tuple[Position, ...] = ()
    written: dict[int, int] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RecordedTensor:
    """A recorded tensor.

    root: the tensor before it was first written; UNKNOWN for new data from outside.
    consumers: the ops that read it, or write a part of its memory, as keys.
    """

    tensor: Tensor
    root: int
    consumers: dict[int, None] = field(default_factory=dict)


class Recorder:
    """Ops and tensors in the order of execution.

    executions: most ops of one place; further executions are counted at the last.  limit: most ops.
    """

    def __init__(self, executions: int, limit: int) -> None:
        self.executions, self._limit = executions, limit
        self._frameworks: dict[str, int] = {}
        self.ops: list[RecordedOp] = []
        self.values: list[RecordedTensor] = []
        self._dropped = 0
        self._graph: Graph | None = None

    def add_tensor(self, described: Tensor, same: bool = False, from_outside: bool = False) -> int:
        """Return the index of a new tensor.

        same: the tensor is its alias after a write, or handed on.  from_outside: new data at each execution.
        """
        index = root = len(self.values)
        if same and described.alias_of is not None:
            root = self.values[described.alias_of].root
        self.values.append(RecordedTensor(replace(described, index=index), UNKNOWN if from_outside else root))
        self._graph = None
        return index

    def add_op(
        self, place: ProgramOp, inputs: tuple[Position, ...], forward: int | None, recomputed: bool
    ) -> int:
        """Add an op as a reader of its inputs; return its index."""
        index = len(self.ops)
        framework = self._frameworks.setdefault(place.framework, len(self._frameworks))
        op = replace(place.op, index=index, framework=framework, inputs=inputs, forward=forward)
        roots = tuple(map_position(lambda tensor: self.values[tensor].root, position) for position in inputs)
        calls = None if place.symbolic else int(not recomputed)
        self.ops.append(RecordedOp(op, calls, roots, recomputations=int(recomputed)))
        place.ops.append(index)
        for tensor in indices_at(inputs):
            self.values[tensor].consumers[index] = None
        self._graph = None
        return index

    def count(self, op: int, recomputed: bool = False) -> None:
        """Count a further execution of an op, or a recomputation."""
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
        """Return True for a new op after the limit; count the op once."""
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
        outputs = set(indices_at(executed.outputs))
        writes = (*executed.written.values(), *executed.parts)
        return replace(
            executed.op, outputs=executed.outputs, calls=executed.calls,
            recomputations=executed.recomputations,
            writes=tuple(tensor for tensor in writes if tensor not in outputs),
        )  # fmt: skip

    def tensor(self, index: int) -> Tensor:
        """Return a recorded tensor as it is now."""
        value = self.values[index]
        return replace(value.tensor, consumers=tuple(value.consumers))

    def producers(self, op: Op) -> list[Op]:
        """Return the ops that made the tensors that a recorded op reads or writes."""
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
