"""Cuts of work into stages, by order or by minimum cut, their schedule, and the plan that files keep."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from amanda.errors import AmandaError
from amanda.tools.libraries import networkx
from amanda.tools.libraries import numpy as np
from amanda.tools.partition._step_work import Floats, StepWork, TensorSpan
from amanda.tools.results import read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda.tools.partition._pytorch_pipeline import Pipeline

Stages: TypeAlias = "NDArray[np.int64]"
"""The stage of each forward op."""

Schedule = Literal["1f1b", "gpipe"]

_TINY = sys.float_info.min
_MAX_ORDERS, _MAX_ORDERED_OPS = 40, 1_000
"""Orders that are tried besides that of the execution: at most, and ops in all of them."""


class PartitionError(AmandaError, ValueError, module="amanda.tools.partition"):
    """No cut meets the options."""


@dataclass(frozen=True)
class CutRequest:
    """Options of a cut; `amanda.tools.partition.PartitionTool` describes them."""

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
        # 1F1B: the last stage goes backward at once, each stage before it holds one micro-batch more.
        return min(self.microbatches, self.stages - stage) / self.microbatches

    def parameter_copies(self, work: StepWork) -> int:
        """Return how often a device holds a parameter: in training with its gradient and Adam's moments."""
        if self.copies is not None:
            return self.copies
        return 4 if work.has_backward else 1


def cut(work: StepWork, request: CutRequest) -> Stages:
    """Return the stage of each forward op, by the method of the request.

    Raises PartitionError if there are more stages than ops, or no cut meets the request.
    """
    op_count = len(work.ops)
    if request.stages > op_count:
        raise PartitionError(
            f"stages={request.stages}, but the traced step has {op_count} forward ops; give fewer stages, or "
            "run the model in the scope"
        )
    return min_cut(work, request) if request.method == "min_cut" else cut_in_order(work, request)


def cut_in_order(work: StepWork, request: CutRequest) -> Stages:
    """Cut the order of execution into stages so that the slowest stage or link is as fast as can be.

    Another order in which the ops can run is taken where that is faster by more than `tolerance`.
    Of the cuts that are slower by `tolerance` at most, the one across which the fewest bytes go.
    Raises PartitionError where no stages fit into the memory.
    Source: Narayanan et al. 2019 (PipeDream), sec. 3.1; Zheng et al. 2022 (Alpa), sec. 5.
    """
    orders = [
        _OrderedOps(work.reordered(positions), request, np.array(positions))
        for positions in _topological_orders(work)
    ]
    # First the least load alone, then the fewest bytes among all cuts within the tolerance of it.
    least_load_by_order = [order.find_least_load() for order in orders]
    least_load = min(least_load_by_order)
    if np.isinf(least_load):
        raise _memory_error(work, request, min(order.find_least_memory() for order in orders))
    # The order of execution, the first, is preferred: its stages are ranges of the program.
    if least_load_by_order[0] <= least_load * (1 + request.tolerance):
        least_load = least_load_by_order[0]
        orders = orders[:1]
    max_load = least_load * (1 + request.tolerance)
    cuts = [order.find_cut_of_fewest_bytes(max_load) for order in orders]
    _, stages = min(cuts, key=lambda bytes_and_stages: bytes_and_stages[0])
    return stages


def _memory_error(work: StepWork, request: CutRequest, least_memory: float) -> PartitionError:
    """Return the error for stages that do not fit.  least_memory: of a device, with which they would."""
    return PartitionError(
        f"no {request.stages} stages fit into memory={request.memory:,} bytes each; with "
        f"microbatches={request.microbatches} and schedule={request.schedule!r} the least that does is "
        f"{int(np.ceil(least_memory)):,}: give more memory, stages or micro-batches, or copies= below "
        f"{request.parameter_copies(work)}"
    )


def _topological_orders(work: StepWork) -> list[list[int]]:
    """Return topological orders of the ops: the order of execution, and random ones."""
    # A fixed seed: the same step is cut in the same way each time.
    op_count, random = len(work.ops), np.random.default_rng(0)
    graph = networkx.DiGraph(work.dependencies)
    graph.add_nodes_from(range(op_count))
    orders = [list(range(op_count))]
    # Dynamic programming takes the square of the ops, so large graphs get few orders or none.
    for _ in range(min(_MAX_ORDERS, _MAX_ORDERED_OPS // op_count)):
        rank = random.permutation(op_count)
        orders.append(list(networkx.lexicographical_topological_sort(graph, key=rank.__getitem__)))
    return orders


class _OrderedOps:
    """Forward ops in some order, to be cut into stages.  positions: of these ops in the order of execution.

    Methods of a stage return an array: the stage ends ahead of `end`, and each entry is for one start of it.
    """

    def __init__(self, work: StepWork, request: CutRequest, positions: Stages) -> None:
        self._work, self._request, self._positions = work, request, positions
        costs, activations = work.total, work.activations
        self._cost_sums, self._activation_sums = (
            # Running sums: the load of any range is one difference.
            np.concatenate(([0.0], np.cumsum(values)))
            for values in (costs, activations)
        )
        self._copies, self._crossing_bytes = request.parameter_copies(work), work.crossing

    def find_least_memory(self) -> float:
        """Return the least memory of a device with which all stages fit."""
        return _best_cut(self._work, self._request.stages, self._stage_memory, np.maximum)[0]

    def find_least_load(self) -> float:
        """Return the cost of the slowest stage or link in the best cut; infinite where memory allows none."""
        return _best_cut(self._work, self._request.stages, self._stage_load, np.maximum)[0]

    def find_cut_of_fewest_bytes(self, max_load: float) -> tuple[float, Stages]:
        """Return the fewest bytes across a cut whose stages and links cost max_load at most, and the cut."""

        def link_bytes(stage: int, end: int, parameter_bytes: Floats) -> Floats:
            """Return the bytes across the link ahead of a stage, for each start; inf beyond the limit."""
            # A stage that is too slow is not an option, however few bytes cross ahead of it.
            bytes_across: Floats = np.where(
                self._stage_load(stage, end, parameter_bytes) <= max_load, self._crossing_bytes[:end], np.inf
            )
            return bytes_across

        crossing_bytes, starts = _best_cut(self._work, self._request.stages, link_bytes, np.add)
        stages = np.zeros(len(self._positions), np.int64)
        # Ops from the start of stage n on are of stage n or later.
        for start in starts[1:]:
            stages[self._positions[start:]] += 1
        return crossing_bytes, stages

    def _stage_memory(self, stage: int, end: int, parameter_bytes: Floats) -> Floats:
        """Return the bytes of a stage that ends ahead of a position, for each start."""
        activations = self._activation_sums[end] - self._activation_sums[:end]
        memory: Floats = self._copies * parameter_bytes + self._request.in_flight(stage) * activations
        return memory

    def _stage_load(self, stage: int, end: int, parameter_bytes: Floats) -> Floats:
        """Return the larger of the costs of a stage and of the link ahead of it, for each start.

        inf for a stage that does not fit into the memory.
        """
        load: Floats = np.maximum(
            # Stages and links work at the same time: the slower of the two counts.
            self._cost_sums[end] - self._cost_sums[:end],
            self._request.byte_cost * self._crossing_bytes[:end],
        )
        if self._request.memory is not None:
            load[self._stage_memory(stage, end, parameter_bytes) > self._request.memory] = np.inf
        return load


def _best_cut(
    work: StepWork, stage_count: int, stage_values: Callable[[int, int, Floats], Floats], combine: np.ufunc
) -> tuple[float, list[int]]:
    """Return the least combined value of all cuts of an order, and the starts of the stages of the best cut.

    stage_values: function of a stage's number, its end and the bytes of its parameters for each start;
    returns the value of the stage for each start.  combine: adds the values of stages, or takes the larger.
    Dynamic programming: least[n, end] is the least value of n stages over the first `end` ops, and
    last_start[n, end] the start of the last of these stages.
    """
    op_count = len(work.ops)
    least = np.full((stage_count + 1, op_count + 1), np.inf)
    last_start = np.zeros((stage_count + 1, op_count + 1), np.int64)
    least[0, 0] = 0.0  # no stages over no ops
    for end, parameter_bytes in enumerate(work.parameter_bytes_by_start(), 1):
        for stage in range(min(stage_count, end)):  # a stage has one op at least
            # All starts at once: a loop over them in Python would be cubic.
            values = combine(least[stage, :end], stage_values(stage, end, parameter_bytes))
            last_start[stage + 1, end] = values.argmin()
            least[stage + 1, end] = values[last_start[stage + 1, end]]
    # Starts are found from the end backwards.
    return float(least[stage_count, op_count]), list(_read_stage_starts(last_start))[::-1]


def _read_stage_starts(last_start: NDArray[np.int64]) -> Iterator[int]:
    """Yield the starts of the stages of the best cut, the last stage first; see `_best_cut`."""
    stage_count, end = last_start.shape[0] - 1, last_start.shape[1] - 1
    for count in range(stage_count, 0, -1):
        end = int(last_start[count, end])
        yield end


def min_cut(work: StepWork, request: CutRequest) -> Stages:
    """Cut into two sides with few bytes between them, none slower than half by more than `tolerance`.

    Returns 0 or 1 for each op, and makes two sides whatever `stages` says.  Raises PartitionError where no
    such sides are found.  Source: Yang & Wong 1996, "Efficient network flow based min-cut balanced
    partitioning".
    """
    candidates: list[tuple[float, list[int]]] = []  # bytes between the sides, positions of the first side
    for order in _topological_orders(work):
        # The first and the last op of an order are fixed to a side, so other orders give other cuts.
        ordered_work = work.reordered(order)
        first_side = _balanced_side(ordered_work, request.tolerance)
        if first_side is not None:
            cut_spans = [span for span in ordered_work.spans if _is_cut(span, first_side)]
            cut_bytes = sum(span.tensor.bytes or 0 for span in cut_spans)
            candidates.append((cut_bytes, [order[i] for i in first_side]))
    if not candidates:
        # Work that was not measured has no cost at all.
        share = float(work.total.max()) / max(float(work.total.sum()), _TINY)
        raise PartitionError(
            f"no two sides were found within tolerance={request.tolerance} of half; the heaviest op has "
            f"{share:.1%} of the cost: give a larger tolerance, or method='order'"
        )
    _, first_positions = min(candidates)
    stages = np.ones(len(work.ops), np.int64)
    stages[first_positions] = 0
    return stages


def _is_cut(span: TensorSpan, first_side: set[int]) -> bool:
    """Return True if a tensor is produced or read on both sides."""
    return len({position in first_side for position in (span.produced_at, *span.read_at)}) > 1


def _balanced_side(work: StepWork, tolerance: float) -> set[int] | None:
    """Return the positions of the first side; None where no balanced one is found.

    A minimum cut of the flow network has the fewest bytes; while a side is too light, one more op is fixed to
    it and the cut is computed again.  No op of the first side depends on an op of the second.
    """
    op_count, load_up_to = len(work.ops), np.cumsum(work.total)
    total_load = load_up_to[-1]
    max_load = 0.5 * (1 + tolerance) * float(total_load)
    # Ops are fixed to the first side as long as those behind them weigh more than the second side may have,
    # and to the second side once they and those before them weigh more than the first side may have.
    first_count = int(np.searchsorted(load_up_to, total_load - max_load, "right"))
    second_begin = int(np.searchsorted(load_up_to, max_load)) + 1
    # No side is empty: the first and the last op are fixed in any case.
    fixed_first = {0, *range(first_count)}
    fixed_second = {op_count - 1, *range(second_begin, op_count)}
    flow = _flow_network(work)
    while not fixed_first & fixed_second:
        first_side = _minimum_cut_side(flow, fixed_first, fixed_second)
        load = float(work.total[list(first_side)].sum())
        if load <= max_load and total_load - load <= max_load:
            return first_side
        second_side = set(range(op_count)) - first_side
        # Yang and Wong: fix the light side and one op of the heavy side to it, and cut again.
        if load > max_load:
            fixed_second = second_side | {max(first_side)}
        else:
            fixed_first = first_side | {min(second_side)}
    return None


def _flow_network(work: StepWork) -> networkx.DiGraph[Any]:
    """Return a flow network: a node for each op and tensor, and an edge with the bytes of each tensor.

    The tensor's node makes the bytes count once, however many ops read the tensor.
    """
    flow: networkx.DiGraph[Any] = networkx.DiGraph()
    flow.add_nodes_from(range(len(work.ops)))
    for producer, reader in work.dependencies:
        flow.add_edge(reader, producer)  # no capacity means infinite: a reader is never before its producer
    for span in work.spans:
        node = ("tensor", span.tensor.index)
        # Not always the producer: gradients are read at earlier positions than they are made at.
        flow.add_edge(span.first, node, capacity=span.tensor.bytes or 0)
        flow.add_edges_from((node, position) for position in {span.produced_at, *span.read_at} - {span.first})
    return flow


def _minimum_cut_side(flow: networkx.DiGraph[Any], fixed_first: set[int], fixed_second: set[int]) -> set[int]:
    """Return the ops on the first side of a minimum cut.  fixed_first, fixed_second: ops of either side."""
    flow = flow.copy()
    # Edges without a capacity are never cut.
    flow.add_edges_from(("first", op) for op in fixed_first)
    flow.add_edges_from((op, "second") for op in fixed_second)
    _, (first_nodes, _) = networkx.minimum_cut(flow, "first", "second")
    # Without the nodes of tensors and the two ends.
    return {node for node in first_nodes if isinstance(node, int)}


@dataclass(frozen=True)
class Slot:
    """The time from `begin` to `end` in which a stage computes a micro-batch, forward or backward."""

    stage: int
    microbatch: int
    backward: bool
    begin: float
    end: float


def microbatch_order(
    schedule: Schedule, stage: int, stages: int, microbatches: int
) -> list[tuple[int, bool]]:
    """Return the passes of a stage in order: pairs of a micro-batch, and True for its backward pass.

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (PipeDream), sec. 3.2 (1F1B).
    """
    forward, backward = False, True
    in_flight = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    steady_count = microbatches - in_flight
    passes = [(i, forward) for i in range(in_flight)]
    # One backward pass, then one forward pass: as many micro-batches stay in flight.
    for i in range(steady_count):
        passes += [(i, backward), (i + in_flight, forward)]
    return passes + [(i, backward) for i in range(steady_count, microbatches)]


def schedule_slots(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], microbatches: int
) -> list[Slot]:
    """Return the times at which each stage computes the passes of each micro-batch.

    forward, backward: time of each stage for a whole batch, of which micro-batches take equal parts; if
    all times of `backward` are 0 there are no backward passes.  Sending a tensor takes no time.
    """
    stage_count, has_backward = len(forward), any(backward)
    slots: list[Slot] = []
    end_times: dict[tuple[int, int, bool], float] = {}  # by stage, micro-batch and is_backward
    free_at = [0.0] * stage_count  # the time from which each stage can compute its next micro-batch
    untimed_by_stage: list[deque[tuple[int, bool]]] = []  # for each stage the passes that have no time yet
    for stage in range(stage_count):
        order = microbatch_order(schedule, stage, stage_count, microbatches)
        untimed_by_stage.append(deque(
            (microbatch, is_backward) for microbatch, is_backward in order if has_backward or not is_backward
        ))  # fmt: skip
    while any(untimed_by_stage):  # each round runs every stage as far as its neighbours' passes have ended
        for stage, untimed_passes in enumerate(untimed_by_stage):
            while untimed_passes:
                microbatch, is_backward = untimed_passes[0]
                sender = stage + 1 if is_backward else stage - 1
                # The first stage of a direction waits for nobody.
                has_sender = 0 <= sender < stage_count
                received_at = end_times.get((sender, microbatch, is_backward)) if has_sender else 0.0
                if received_at is None:
                    break
                # A stage computes one micro-batch at a time.
                begin = max(free_at[stage], received_at)
                end = begin + (backward if is_backward else forward)[stage] / microbatches
                slots.append(Slot(stage, microbatch, is_backward, begin, end))
                end_times[stage, microbatch, is_backward] = free_at[stage] = end
                untimed_passes.popleft()
    return slots


def bubble_share(slots: Sequence[Slot], stages: int) -> float:
    """Return the share of all stages' time in which a stage waits; (p-1)/(m+p-1) where stages are equal."""
    total_time = stages * max((slot.end for slot in slots), default=0.0)
    busy_time = sum(slot.end - slot.begin for slot in slots)
    return 1 - busy_time / total_time if total_time else 0.0


class PlannedOp(NamedTuple):
    """A forward op in the order of execution, and its stage."""

    type: str
    module: str
    stage: int


@dataclass(frozen=True)
class Plan:
    """The stage of each op of a model, from which `pipeline` builds the stages.

    parameters: the stages that read each parameter or buffer, by its path.
    `PartitionResult.plan` returns a plan, `PartitionResult.save("partition.json")` writes it with the result,
    and `load` reads it from that file.
    """

    stages: int
    schedule: Schedule
    microbatches: int
    ops: Sequence[PlannedOp]
    parameters: Mapping[str, Sequence[int]]

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan in a file.

        Args:
            path: A "partition.json" that `PartitionResult.save` wrote.

        Raises:
            PartitionError: For another file.
            FileError: Where the file cannot be read.
        """
        return read_json(path, "file that partition saved, partition.json", cls._from_json, PartitionError)

    @classmethod
    def _from_json(cls, content: Any) -> Plan:
        """Return the plan in a file's content; raise ValueError for a file of another kind or schedule."""
        # Results of other kinds are JSON files too.
        schema = content.get("schema") if isinstance(content, dict) else type(content).__name__
        if schema != "amanda.partition" or "parameters" not in content:
            raise ValueError(f"it holds {schema!r}")
        ops = [
            PlannedOp(str(op["type"]), str(op["module"]), int(op["stage"]))
            for op in content["ops"]
            if op["phase"] == "forward"
        ]
        parameters = {
            str(name): [int(stage) for stage in stages] for name, stages in content["parameters"].items()
        }
        # A file may come from a later version, or from hand.
        if content["schedule"] not in get_args(Schedule):
            raise ValueError(f"its schedule is {content['schedule']!r}")
        stage_count = len(content["rows"])  # the file has a row for each stage
        return cls(stage_count, content["schedule"], int(content["microbatches"]), ops, parameters)

    def pipeline(
        self, model: Any, mb_args: tuple[Any, ...], mb_kwargs: Mapping[str, Any] | None = None
    ) -> Pipeline:
        """Return the model of PyTorch, cut into the stages of this plan.

        The model is exported, for which its ops run once; no tool sees them.

        Args:
            model: The model whose trace was cut.
            mb_args: An example of the model's inputs, of the size of one micro-batch.
            mb_kwargs: See `mb_args`.

        Raises:
            PartitionError: For another model than the traced one, or one that cannot be cut at these ops.
        """
        from amanda.tools.partition._pytorch_pipeline import Pipeline

        return Pipeline(self, model, mb_args, dict(mb_kwargs or {}))
