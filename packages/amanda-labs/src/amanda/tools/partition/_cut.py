"""Cuts of work into stages: by dynamic programming over the order, and by minimum cut into two sides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from amanda.errors import AmandaError
from amanda.tools.libraries import networkx
from amanda.tools.libraries import numpy as np
from amanda.tools.partition._work import Floats, Span, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

Stages: TypeAlias = "NDArray[np.int64]"
"""The stage of each forward op."""

Schedule = Literal["1f1b", "gpipe"]

_TINY = sys.float_info.min
_ORDERS, _OPS = 40, 1_000
"""Orders that are tried besides that of the execution: at most, and ops in all of them."""


class PartitionError(AmandaError, ValueError):
    """No cut is what was asked for."""


@dataclass(frozen=True)
class Request:
    """The cut that is asked for; `amanda.tools.partition.PartitionTool` says what the fields mean."""

    stages: int
    method: Literal["order", "min_cut"]
    microbatches: int
    schedule: Schedule
    memory: int | None
    copies: int | None
    byte_cost: float
    tolerance: float

    def in_flight(self, stage: int) -> float:
        """Return the share of a batch's activations that a stage holds at once."""
        if self.schedule == "gpipe":
            return 1.0
        return min(self.microbatches, self.stages - stage) / self.microbatches

    def copies_of(self, work: Work) -> int:
        """Return how often a parameter's bytes are held: with its gradient and Adam's moments in training."""
        return self.copies if self.copies is not None else 4 if work.has_backward else 1


def cut(work: Work, request: Request) -> Stages:
    """Return the stage of each forward op.  Raises PartitionError where there is no such cut."""
    count = len(work.ops)
    if request.stages > count:
        raise PartitionError(
            f"stages={request.stages}, but the traced step has {count} forward ops; give fewer stages, or "
            "run the model in the scope"
        )
    return min_cut(work, request) if request.method == "min_cut" else in_order(work, request)


def in_order(work: Work, request: Request) -> Stages:
    """Cut the order of execution into stages so that the slowest stage or link is as fast as can be.

    Another order in which the ops can run is taken where that is faster by more than `tolerance`.
    Of the cuts that are slower by `tolerance` at most, the one across which the fewest bytes go.
    Source: Narayanan et al. 2019 (PipeDream), sec. 3.1; Zheng et al. 2022 (Alpa), sec. 5.
    """
    orders = [_Order(work.in_order(order), request, np.array(order)) for order in _orders(work)]
    slowest = [order.slowest() for order in orders]
    least = min(slowest)
    if slowest[0] <= least * (1 + request.tolerance):
        least, orders = slowest[0], orders[:1]
    if np.isinf(least):
        needed = min(order.memory() for order in orders)
        raise PartitionError(
            f"no {request.stages} stages fit into memory={request.memory:,} bytes each; with "
            f"microbatches={request.microbatches} and schedule={request.schedule!r} the least that does is "
            f"{int(np.ceil(needed)):,}: give more memory, stages or micro-batches, or copies= below "
            f"{request.copies_of(work)}"
        )
    cuts = (order.fewest_bytes(least * (1 + request.tolerance)) for order in orders)
    return min(cuts, key=lambda found: found[0])[1]


def _orders(work: Work) -> list[list[int]]:
    """Return orders in which the ops can run: that in which they did, and some others."""
    count, random = len(work.ops), np.random.default_rng(0)
    graph = networkx.DiGraph(work.dependencies)
    graph.add_nodes_from(range(count))
    found = [list(range(count))]
    for _ in range(min(_ORDERS, _OPS // count)):
        rank = random.permutation(count)
        found.append(list(networkx.lexicographical_topological_sort(graph, key=rank.__getitem__)))
    return found


class _Order:
    """Cuts of one order of the ops.  positions: of these ops in the order in which they ran."""

    def __init__(self, work: Work, request: Request, positions: Stages) -> None:
        self._work, self._request, self._positions = work, request, positions
        costs, made = work.total, work.activations
        self._ends, self._made = (np.concatenate(([0.0], np.cumsum(one))) for one in (costs, made))
        self._copies, self._crossing = request.copies_of(work), work.crossing

    def memory(self) -> float:
        """Return the bytes that the device of the largest stage has to have at least."""
        return _best(self._work, self._request.stages, self._memory, np.maximum)[0]

    def slowest(self) -> float:
        """Return the least cost of the slowest stage or link; infinite where memory allows no cut."""
        return _best(self._work, self._request.stages, self._load, np.maximum)[0]

    def fewest_bytes(self, most: float) -> tuple[float, Stages]:
        """Return the fewest bytes across a cut whose stages and links cost at most so much, and the cut."""

        def across(stage: int, end: int, held: Floats) -> Floats:
            bytes_across: Floats = np.where(
                self._load(stage, end, held) <= most, self._crossing[:end], np.inf
            )
            return bytes_across

        crossing, starts = _best(self._work, self._request.stages, across, np.add)
        stages = np.zeros(len(self._positions), np.int64)
        for start in starts[1:]:
            stages[self._positions[start:]] += 1
        return crossing, stages

    def _memory(self, stage: int, end: int, held: Floats) -> Floats:
        activations = self._made[end] - self._made[:end]
        memory: Floats = self._copies * held + self._request.in_flight(stage) * activations
        return memory

    def _load(self, stage: int, end: int, held: Floats) -> Floats:
        load: Floats = np.maximum(
            self._ends[end] - self._ends[:end], self._request.byte_cost * self._crossing[:end]
        )
        if self._request.memory is not None:
            load[self._memory(stage, end, held) > self._request.memory] = np.inf
        return load


def _best(
    work: Work, stages: int, value: Callable[[int, int, Floats], Floats], combine: np.ufunc
) -> tuple[float, list[int]]:
    """Return the least combined value of all cuts in order, and where the stages of such a cut start.

    value: of a stage that ends ahead of a position, for each start, given the bytes of its parameters.
    """
    count = len(work.ops)
    best = np.full((stages + 1, count + 1), np.inf)
    start_of = np.zeros((stages + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for end, held in enumerate(work.held(), 1):
        for stage in range(min(stages, end)):
            values = combine(best[stage, :end], value(stage, end, held))
            start_of[stage + 1, end] = values.argmin()
            best[stage + 1, end] = values[start_of[stage + 1, end]]
    return float(best[stages, count]), list(_starts(start_of))[::-1]


def _starts(start_of: NDArray[np.int64]) -> Iterator[int]:
    """Yield where the stages of the best cut start, the last first."""
    end = start_of.shape[1] - 1
    for stage in range(start_of.shape[0] - 1, 0, -1):
        end = int(start_of[stage, end])
        yield end


def min_cut(work: Work, request: Request) -> Stages:
    """Cut into two sides with few bytes between them, none slower than half by more than `tolerance`.

    Raises PartitionError where no such sides are found.  Source: Yang & Wong 1996, "Efficient network flow
    based min-cut balanced partitioning".
    """
    found: list[tuple[float, list[int]]] = []
    for order in _orders(work):
        ordered = work.in_order(order)
        first = _balanced_side(ordered, request.tolerance)
        if first is not None:
            crossing = sum(one.tensor.bytes or 0 for one in ordered.spans if _is_cut(one, first))
            found.append((crossing, [order[i] for i in first]))
    if not found:
        share = float(work.total.max()) / max(float(work.total.sum()), _TINY)
        raise PartitionError(
            f"no two sides were found within tolerance={request.tolerance} of half; the heaviest op has "
            f"{share:.1%} of the cost: give a larger tolerance, or method='order'"
        )
    stages = np.ones(len(work.ops), np.int64)
    stages[min(found)[1]] = 0
    return stages


def _is_cut(span: Span, first: set[int]) -> bool:
    return len({position in first for position in (span.made, *span.positions)}) > 1


def _balanced_side(work: Work, tolerance: float) -> set[int] | None:
    """Return the positions of the first side; None where no balanced one is found.

    A maximum flow gives the fewest bytes; as long as a side is too light, it is given one more op and the
    flow is computed again.  No op of the first side depends on one of the second.
    """
    count, ends = len(work.ops), np.cumsum(work.total)
    most = 0.5 * (1 + tolerance) * float(ends[-1])
    first = {0, *range(int(np.searchsorted(ends, ends[-1] - most, "right")))}
    second = {count - 1, *range(int(np.searchsorted(ends, most)) + 1, count)}
    flow = _flow(work)
    while not first & second:
        side = _first_side(flow, first, second)
        load = float(work.total[list(side)].sum())
        if load <= most and ends[-1] - load <= most:
            return side
        others = set(range(count)) - side
        if load > most:
            second = others | {max(side)}
        else:
            first = side | {min(others)}
    return None


def _flow(work: Work) -> networkx.DiGraph[Any]:
    """Return edges with the bytes of each tensor: from its maker to a node of its own, and on to readers."""
    flow: networkx.DiGraph[Any] = networkx.DiGraph()
    flow.add_nodes_from(range(len(work.ops)))
    for before, after in work.dependencies:
        flow.add_edge(after, before)  # without a capacity, which is one without bound
    for span in work.spans:
        node = ("tensor", span.tensor.index)
        flow.add_edge(span.first, node, capacity=span.tensor.bytes or 0)
        flow.add_edges_from((node, position) for position in {span.made, *span.positions} - {span.first})
    return flow


def _first_side(flow: networkx.DiGraph[Any], first: set[int], second: set[int]) -> set[int]:
    """Return the ops on the side of the first ones in a minimum cut."""
    flow = flow.copy()
    flow.add_edges_from(("first", i) for i in first)
    flow.add_edges_from((i, "second") for i in second)
    _, (side, _) = networkx.minimum_cut(flow, "first", "second")
    return {one for one in side if isinstance(one, int)}
