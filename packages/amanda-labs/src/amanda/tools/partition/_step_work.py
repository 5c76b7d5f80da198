"""The work of a traced step: its forward ops by position in an order, with costs, bytes and dependencies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from amanda.tools.flops import FlopsResult, OpCost
from amanda.tools.libraries import numpy as np
from amanda.tools.profile import ProfileResult
from amanda.tools.trace import Graph, Op, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True)
class TensorSpan:
    """A tensor, with the positions of the forward op that makes it and of the ops that read it.

    A backward op counts at the position of its forward op.
    """

    tensor: Tensor
    produced_at: int
    read_at: tuple[int, ...]

    @property
    def first(self) -> int:
        """Return the first position."""
        return min(self.produced_at, *self.read_at)

    @property
    def last(self) -> int:
        """Return the last position."""
        return max(self.produced_at, *self.read_at)


class StepWork:
    """Forward ops of a graph, with the costs of each in a step, forward and backward.

    costs: of ops of the graph by their index, in `unit`.  remarks: on ops without a cost.
    ops: the forward ops in a topological order; None for the order in which they ran.
    """

    def __init__(
        self, graph: Graph, costs: Mapping[int, float], unit: str, remarks: Sequence[str] = (),
        ops: Sequence[Op] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.unit, self.remarks, self._costs = graph, unit, remarks, costs
        self.ops = [op for op in graph.ops if op.phase == "forward"] if ops is None else ops
        self.has_backward = any(op.phase == "backward" for op in graph.ops)
        self.unstaged_ops = sum(op.phase not in ("forward", "backward") for op in graph.ops)
        # By index of the op; a backward op has the position of its forward op.
        self._position = {op.index: i for i, op in enumerate(self.ops)}
        for op in graph.ops:
            # A backward op runs on the device that holds what its forward op has saved.
            if op.phase == "backward" and self.ops:
                forward_position = self._position.get(-1 if op.forward is None else op.forward)
                # Without a forward op, such as the gradient of the loss, it counts at the end of the pass.
                self._position[op.index] = len(self.ops) - 1 if forward_position is None else forward_position
        self.forward = self._sum_by_position(costs, "forward")
        self.backward = self._sum_by_position(costs, "backward")
        self.total = self.forward + self.backward

    def reordered(self, order: Sequence[int]) -> StepWork:
        """Return the same work with the forward ops at these positions, in this order, without remarks."""
        return StepWork(self.graph, self._costs, self.unit, ops=[self.ops[i] for i in order])

    @property
    def dependencies(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of positions of forward ops: the producer of a tensor, and a reader behind it."""
        for position, op in enumerate(self.ops):
            for producer in self.graph.producers(op):
                producer_position = self._position.get(producer.index)
                if producer_position is None or producer.phase != "forward":
                    continue
                # A loop's graph may have an edge back, which no order could meet.
                if producer_position < position:
                    yield producer_position, position

    def _sum_by_position(self, costs: Mapping[int, float], phase: str) -> Floats:
        """Return the cost of a phase at the position of each forward op."""
        sums = np.zeros(len(self.ops))
        for op in self.graph.ops:
            if op.phase == phase and op.index in self._position:
                sums[self._position[op.index]] += costs.get(op.index, 0.0)
        return sums

    def position(self, op: Op) -> int | None:
        """Return the position of an op, or of its forward op; None for an op of another phase."""
        return self._position.get(op.index)

    @cached_property
    def activations(self) -> Floats:
        """Return the bytes of the outputs of each forward op, without views."""
        sizes = np.zeros(len(self.ops))
        for i, op in enumerate(self.ops):
            # A view needs no memory of its own.
            sizes[i] = sum(tensor.bytes or 0 for tensor in self.graph.outputs(op) if tensor.alias_of is None)
        return sizes

    @cached_property
    def parameters(self) -> Mapping[int, tuple[int, ...]]:
        """Return by index of parameter or buffer the positions of ops that read it, or a view of it."""
        reader_positions: dict[int, list[int]] = defaultdict(list)
        for position, op in enumerate(self.ops):
            # An op may read one parameter several times.
            for root in dict.fromkeys(self.root(index).index for index in op.reads):
                if self.graph.tensors[root].kind in ("parameter", "buffer"):
                    reader_positions[root].append(position)
        return {root: tuple(positions) for root, positions in reader_positions.items()}

    @cached_property
    def parameter_bytes(self) -> Mapping[int, int]:
        """Return the bytes of each parameter or buffer, by its tensor's index."""
        sizes = {index: self.graph.tensors[index].bytes or 0 for index in self.parameters}
        for tensor in self.graph.tensors:
            root = self.root(tensor.index).index
            if root in sizes and self.graph.tensors[root].bytes is None:
                # TensorFlow's variable is a handle without a size; the tensor that is read counts as a view.
                sizes[root] = max(sizes[root], tensor.bytes or 0)
        return sizes

    def root(self, index: int) -> Tensor:
        """Return the tensor whose memory a tensor shares, itself if it is not a view."""
        tensor = self.graph.tensors[index]
        # Views of views, and versions after writes, lead to one root.
        while tensor.alias_of is not None and tensor.alias_of != tensor.index:
            tensor = self.graph.tensors[tensor.alias_of]
        return tensor

    @cached_property
    def spans(self) -> Sequence[TensorSpan]:
        """Return the tensors that an op at one position makes and an op at another reads."""
        spans = []
        for tensor in self.graph.tensors:
            producer_position = None if tensor.producer is None else self._position.get(tensor.producer)
            reader_positions = {self._position[op] for op in tensor.consumers if op in self._position}
            if producer_position is not None and reader_positions - {producer_position}:
                spans.append(TensorSpan(tensor, producer_position, tuple(sorted(reader_positions))))
        return spans

    @cached_property
    def crossing(self) -> Floats:
        """Return the bytes of the tensors that cross a cut ahead of each position, in both directions."""
        differences = np.zeros(len(self.ops) + 1)
        for span in self.spans:
            # A tensor counts at every cut behind its first position up to its last.
            differences[span.first + 1] += span.tensor.bytes or 0
            differences[span.last + 1] -= span.tensor.bytes or 0
        crossing: Floats = np.cumsum(differences)
        return crossing

    def parameter_bytes_by_start(self) -> Iterator[Floats]:
        """Yield for each last op of a stage an array of the bytes of its parameters, for each first op.

        A parameter that several ops of a stage read counts once.
        """
        bytes_by_start, last_reader = np.zeros(len(self.ops)), dict[int, int]()
        parameters_read_at: dict[int, list[int]] = defaultdict(list)
        for index, positions in self.parameters.items():
            for position in positions:
                parameters_read_at[position].append(index)
        for end in range(len(self.ops)):
            for index in parameters_read_at[end]:
                # Stages that start no later than the reader before this one have the parameter already.
                first_new_start = last_reader.get(index, -1) + 1
                bytes_by_start[first_new_start : end + 1] += self.parameter_bytes[index]
                last_reader[index] = end
            # A view of one array, which grows from yield to yield: a copy for each end would take quadratic
            # memory.
            yield bytes_by_start[: end + 1]


def work_in_flops(graph: Graph, flops: FlopsResult, steps: int) -> StepWork:
    """Return the work of a step in FLOPs.

    FLOPs are counted by phase, type, module and line; ops that agree in these divide them by their calls.
    """
    sums = ((_op_key(place), (place.flops or 0) * place.calls) for place in flops.ops)
    return StepWork(graph, _cost_by_op(graph, sums, _op_key, steps), "FLOPs", list(flops.notes()[1:]))


def work_in_seconds(graph: Graph, profile: ProfileResult, steps: int) -> StepWork:
    """Return the work of one of several steps in seconds, which a profile measured op by op."""
    # `own` is self time in nanoseconds, so that an op within another counts once.
    sums = (((place.phase, place.type, place.op_id), place.own / 1e9) for place in profile.ops)
    costs = _cost_by_op(graph, sums, lambda op: (op.phase, op.type, op.id), steps)
    untimed_count = sum(place.calls - place.timed for place in profile.ops)
    remarks = [f"{untimed_count:,} executions have no time and count as 0."] if untimed_count else []
    return StepWork(graph, costs, "s", remarks)


def _op_key(op: Op | OpCost) -> Hashable:
    return op.phase, op.type, op.module, op.source


def _cost_by_op(
    graph: Graph, sums: Iterable[tuple[Hashable, float]], key: Callable[[Op], Hashable], steps: int
) -> dict[int, float]:
    """Return the cost of each op of a graph in one step, by the op's index.

    sums: costs of all steps, each for a key; ops of one key divide the sum of its costs by their calls.
    """
    cost_by_key, calls_by_key = defaultdict[Any, float](float), Counter[Any]()
    for op_key, cost in sums:
        cost_by_key[op_key] += cost
    for op in graph.ops:
        # Executions of graphs are not counted, and taken for one.
        calls_by_key[key(op)] += op.calls or 1
    return {
        op.index: cost_by_key[key(op)] * (op.calls or 1) / calls_by_key[key(op)] / steps for op in graph.ops
    }
