"""The work of a traced step in the order of its forward ops: what stages cost, hold and hand on."""

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
class Span:
    """A tensor, by the positions of the first and the last forward op that make it or read it.

    A backward op counts at the position of its forward op.
    """

    tensor: Tensor
    made: int
    positions: tuple[int, ...]

    @property
    def first(self) -> int:
        """Return the first position."""
        return min(self.made, *self.positions)

    @property
    def last(self) -> int:
        """Return the last position."""
        return max(self.made, *self.positions)


class Work:
    """Forward ops of a graph with what each costs in a step, forward and backward.

    costs: of ops of the graph by their index, in `unit`.  remarks: what these costs leave out.
    ops: the forward ops in an order in which they can run; None for that in which they did.
    """

    def __init__(
        self, graph: Graph, costs: Mapping[int, float], unit: str, remarks: Sequence[str] = (),
        ops: Sequence[Op] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.unit, self.remarks, self._costs = graph, unit, remarks, costs
        self.ops = [op for op in graph.ops if op.phase == "forward"] if ops is None else ops
        self.has_backward = any(op.phase == "backward" for op in graph.ops)
        self.others = sum(op.phase not in ("forward", "backward") for op in graph.ops)
        self._position = {op.index: i for i, op in enumerate(self.ops)}
        for op in graph.ops:
            if op.phase == "backward" and self.ops:
                of = self._position.get(-1 if op.forward is None else op.forward)
                self._position[op.index] = len(self.ops) - 1 if of is None else of
        self.forward, self.backward = self._sums(costs, "forward"), self._sums(costs, "backward")
        self.total = self.forward + self.backward

    def in_order(self, order: Sequence[int]) -> Work:
        """Return the same work with the forward ops at these positions, in this order."""
        return Work(self.graph, self._costs, self.unit, ops=[self.ops[i] for i in order])

    @property
    def dependencies(self) -> Iterator[tuple[int, int]]:
        """Yield the positions of forward ops of which the first makes what the second reads."""
        for op in self.ops:
            for maker in self.graph.producers(op):
                made = self._position.get(maker.index)
                if made is not None and maker.phase == "forward" and made < self._position[op.index]:
                    yield made, self._position[op.index]

    def _sums(self, costs: Mapping[int, float], phase: str) -> Floats:
        sums = np.zeros(len(self.ops))
        for op in self.graph.ops:
            if op.phase == phase and op.index in self._position:
                sums[self._position[op.index]] += costs.get(op.index, 0.0)
        return sums

    def position(self, op: Op) -> int | None:
        """Return the position of an op's forward op; None for an op of another phase."""
        return self._position.get(op.index)

    @cached_property
    def activations(self) -> Floats:
        """Return the bytes that each forward op makes, without views of what is there already."""
        made = np.zeros(len(self.ops))
        for i, op in enumerate(self.ops):
            made[i] = sum(one.bytes or 0 for one in self.graph.outputs(op) if one.alias_of is None)
        return made

    @cached_property
    def parameters(self) -> Mapping[int, tuple[int, ...]]:
        """Return the positions of the forward ops that read each parameter or buffer, by its tensor."""
        readers: dict[int, dict[int, None]] = defaultdict(dict)
        for i, op in enumerate(self.ops):
            for index in op.reads:
                tensor = self.root(index)
                if tensor.kind in ("parameter", "buffer"):
                    readers[tensor.index][i] = None
        return {index: tuple(positions) for index, positions in readers.items()}

    @cached_property
    def parameter_bytes(self) -> Mapping[int, int]:
        """Return the bytes of each parameter or buffer by its tensor; of a handle, those that are read."""
        sizes = {index: self.graph.tensors[index].bytes or 0 for index in self.parameters}
        for tensor in self.graph.tensors:
            root = self.root(tensor.index).index
            if root in sizes and self.graph.tensors[root].bytes is None:
                sizes[root] = max(sizes[root], tensor.bytes or 0)
        return sizes

    def root(self, index: int) -> Tensor:
        """Return the tensor in whose memory a tensor lies."""
        tensor = self.graph.tensors[index]
        while tensor.alias_of is not None and tensor.alias_of != tensor.index:
            tensor = self.graph.tensors[tensor.alias_of]
        return tensor

    @cached_property
    def spans(self) -> Sequence[Span]:
        """Return the tensors that one op makes and another op reads, forward or backward."""
        found = []
        for tensor in self.graph.tensors:
            made = None if tensor.producer is None else self._position.get(tensor.producer)
            read = {self._position[op] for op in tensor.consumers if op in self._position}
            if made is not None and read - {made}:
                found.append(Span(tensor, made, tuple(sorted(read))))
        return found

    @cached_property
    def crossing(self) -> Floats:
        """Return the bytes of the tensors that cross a cut ahead of each position, in both directions."""
        change = np.zeros(len(self.ops) + 1)
        for span in self.spans:
            change[span.first + 1] += span.tensor.bytes or 0
            change[span.last + 1] -= span.tensor.bytes or 0
        crossing: Floats = np.cumsum(change)
        return crossing

    def held(self) -> Iterator[Floats]:
        """Yield for each end the bytes of the parameters that a stage from each start to this end reads.

        A parameter that several ops of a stage read counts once.
        """
        held, before = np.zeros(len(self.ops)), dict[int, int]()
        read: dict[int, list[int]] = defaultdict(list)
        for index, positions in self.parameters.items():
            for position in positions:
                read[position].append(index)
        for position in range(len(self.ops)):
            for index in read[position]:
                held[before.get(index, -1) + 1 : position + 1] += self.parameter_bytes[index]
                before[index] = position
            yield held[: position + 1]


def of_flops(graph: Graph, flops: FlopsResult, steps: int) -> Work:
    """Return the work in FLOPs of a step.

    Ops that agree in phase, type, module and line share what these took by their calls.
    """
    sums = ((_names(place), (place.flops or 0) * place.calls) for place in flops.places)
    return Work(graph, _shared(graph, sums, _names, steps), "FLOPs", list(flops.notes()[1:]))


def of_time(graph: Graph, profile: ProfileResult, steps: int) -> Work:
    """Return the work in seconds of a step, as they were measured op by op."""
    sums = (((place.phase, place.type, place.op_id), place.own / 1e9) for place in profile.places)
    costs = _shared(graph, sums, lambda op: (op.phase, op.type, op.id), steps)
    untimed = sum(place.calls - place.timed for place in profile.places)
    remarks = [f"{untimed:,} executions have no time and count as 0."] if untimed else []
    return Work(graph, costs, "s", remarks)


def _names(one: Op | OpCost) -> Hashable:
    return one.phase, one.type, one.module, one.source


def _shared(
    graph: Graph, sums: Iterable[tuple[Hashable, float]], key: Callable[[Op], Hashable], steps: int
) -> dict[int, float]:
    """Return the cost of each op of a graph in a step: a share of its key's sum by its calls."""
    totals, calls = defaultdict[Any, float](float), Counter[Any]()
    for one, value in sums:
        totals[one] += value
    for op in graph.ops:
        calls[key(op)] += op.calls or 1
    return {op.index: totals[key(op)] * (op.calls or 1) / calls[key(op)] / steps for op in graph.ops}
