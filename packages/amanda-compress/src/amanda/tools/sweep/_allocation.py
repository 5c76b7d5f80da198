"""Costs of a model, and the assignment of levels to ops under a budget: the multiple-choice knapsack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import amanda
from amanda.tools.flops import Cost, FlopsTool
from amanda.tools.kit import parameter_inputs
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import itemsize
from amanda.tools.sweep._result import Point, Site, SweepError
from amanda.tools.weights import parameter_store

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WeightSize(NamedTuple):
    """The number of elements of a weight, and their bytes."""

    numbers: int
    size: int


class OpCosts(amanda.Tool):
    """Records what each forward op costs, and the bytes of the parameters that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._cost_by_op: dict[int, Cost] = {}
        self._sizes_by_op: dict[int, dict[Hashable, int]] = {}
        self._weight_by_op: dict[int, Hashable] = {}
        self._element_counts: dict[Hashable, int] = {}
        self.depends_on(FlopsTool())
        # Costs depend on shapes: an op is analysed again when these change.
        self.add_inst_for_op(self._record_costs, require_outputs=True, guard="shape")

    def _record_costs(self, context: amanda.OpContext) -> None:
        """Record the FLOPs of an op, the sizes of the parameters that it reads, and which is its weight."""
        if context["phase"] != "forward":
            return
        cost, op_id, inputs = context.get("cost"), context.get_op_id(), context.get_inputs()
        self._cost_by_op[op_id] = cost if isinstance(cost, Cost) else Cost()
        for position in parameter_inputs(context):
            element_count = prod(context["shape"](inputs[position]))
            # Unknown types count as float32.
            size = element_count * (itemsize(context["dtype"](inputs[position])) or 4)
            variable = context.get_variable(position)
            parameter = parameter_store(variable).identity(variable)
            self._sizes_by_op.setdefault(op_id, {})[parameter] = size
            if position == context["weight_index"]:
                self._weight_by_op[op_id] = parameter
                self._element_counts[parameter] = element_count

    @property
    def is_empty(self) -> bool:
        """Return True if no op was recorded."""
        return not self._cost_by_op

    def of_ops(self, op_ids: Iterable[int]) -> tuple[int, dict[Hashable, WeightSize]]:
        """Return the FLOPs of the products of some ops, and the sizes of the weights that they read."""
        recorded_ids = [op_id for op_id in op_ids if op_id in self._cost_by_op]
        weights = {
            parameter: WeightSize(self._element_counts[parameter], self._sizes_by_op[op_id][parameter])
            for op_id in recorded_ids
            if (parameter := self._weight_by_op.get(op_id)) is not None
        }
        return sum(2 * self._cost_by_op[op_id].macs for op_id in recorded_ids), weights

    def flops(
        self, shares: Mapping[int, tuple[float, float]] | None = None, skipped: Collection[int] = ()
    ) -> float:
        """Return FLOPs of the forward pass; what an op does besides products, such as a bias, stays.

        Args:
            shares: What is left of an op's products, and of its weight, by op id.
            skipped: Ops that do not run.
        """
        total = 0.0
        for op_id, cost in self._cost_by_op.items():
            products_share, _ = (shares or {}).get(op_id, (1.0, 1.0))
            # A bias or an activation runs in full as long as the op runs.
            if op_id not in skipped and products_share > 0:
                total += 2 * cost.macs * products_share + (cost.flops - 2 * cost.macs)
        return total

    def size(
        self, shares: Mapping[int, tuple[float, float]] | None = None, skipped: Collection[int] = ()
    ) -> float:
        """Return bytes of parameters; one that several ops read counts once, by the largest share.

        Args:
            shares: Share of an op's products, and of its weight, that remains, by op id.
            skipped: Ops that do not run.
        """
        bytes_by_parameter: dict[Hashable, float] = {}
        for op_id, sizes in self._sizes_by_op.items():
            products_share, weight_share = (shares or {}).get(op_id, (1.0, 1.0))
            for parameter, size in sizes.items():
                # Without products that are left, other parameters such as a bias go with the weight.
                goes_with_weight = parameter == self._weight_by_op.get(op_id) or products_share == 0
                share = weight_share if goes_with_weight else 1.0
                bytes_left = 0.0 if op_id in skipped else share * size
                # A parameter is stored once, for the reader that needs most of it.
                bytes_by_parameter[parameter] = max(bytes_by_parameter.get(parameter, 0.0), bytes_left)
        return sum(bytes_by_parameter.values())


CostOption: TypeAlias = "Literal['size', 'flops'] | Callable[..., Any] | None"
RemainingShare: TypeAlias = "Callable[[Any, WeightSize], float]"
"""Returns the share of a weight's bytes, or of its op's FLOPs, that remains at a level."""


class SweepCost:
    """The cost of a model, and the cost that a level of some ops saves.

    cost: "size", "flops", or a function that measures the cost with the tools of each point in force.
    remaining_share: returns the share of the cost that remains at a level.
    """

    def __init__(self, cost: CostOption, remaining_share: RemainingShare | None) -> None:
        self.cost, self._remaining_share = cost, remaining_share
        self.op_costs = OpCosts()
        """Tool that records costs of ops while the model is evaluated without the swept tool."""
        self.measured: float | None = None

    @property
    def name(self) -> str:
        """Name of the cost in results."""
        return self.cost if isinstance(self.cost, str) else getattr(self.cost, "__name__", "cost")

    @property
    def total(self) -> float:
        """The cost of the model without a tool."""
        if self.measured is not None:
            return self.measured
        return self.op_costs.size() if self.cost == "size" else self.op_costs.flops()

    def weights(self, site: Site) -> dict[Hashable, WeightSize]:
        """Return the weights that an op reads, by parameter."""
        return self.op_costs.of_ops(site.op_ids)[1]

    def saved_cost(self, sites: Sequence[Site], level: float, points: Sequence[Point]) -> float:
        """Return the cost that a level of ops which share weights saves; points: of each op alone.

        A point that failed has no measured cost, and counts as nothing saved; so does an op without a weight
        for FLOPs.
        """
        if self.measured is not None:
            # Measured savings of single ops are added up; the total of a choice is measured after it.
            return sum(self.measured - point.cost for point in points if point.cost is not None)
        remaining_share = self._remaining_share
        assert remaining_share is not None
        if self.cost == "size":
            # A weight that several ops share is saved once.
            sizes = {parameter: size for site in sites for parameter, size in self.weights(site).items()}
            return sum(size.size * (1 - remaining_share(level, size)) for size in sizes.values())
        saved_flops = []
        for flops, weights in (self.op_costs.of_ops(site.op_ids) for site in sites):
            if weights:
                first_weight = next(iter(weights.values()))
                saved_flops.append(flops * (1 - remaining_share(level, first_weight)))
        return sum(saved_flops)


KEEP = "keep"
"""The label of an op that the tool does not change."""
_MOST_ASSIGNMENTS = 20_000
"""Number of partial assignments beyond which one stays for each of as many equal steps of cost."""


class LevelOutcome(NamedTuple):
    """Saved cost and drop of the metric of a group of ops at one level."""

    level: str
    saved: float
    drop: float


class Assignment(NamedTuple):
    """A level for each group, with the sums of saved costs and of drops."""

    saved: float
    drop: float
    levels: tuple[str, ...]


def pareto_assignments(groups: Sequence[Sequence[LevelOutcome]]) -> list[Assignment]:
    """Return the Pareto front of assignments of a level to each group, in rising order of saved cost.

    An assignment that saves no more than another at no smaller drop is not in the list. The front is exact
    up to 20,000 partial assignments; each further group may lose up to a 20,000th of the largest saving.
    """
    saved, drop = np.zeros(1), np.zeros(1)  # of each partial assignment on the front
    # Of each group its outcomes, and by assignment the row of the one before and the outcome's index.
    steps = []
    for outcomes in groups:
        # Every partial assignment with every outcome of the next group, of which the dominated ones go at
        # once: the front stays small.
        saved = np.add.outer(saved, [outcome.saved for outcome in outcomes]).ravel()
        drop = np.add.outer(drop, [outcome.drop for outcome in outcomes]).ravel()
        survivors = _pareto_indices(saved, drop)
        if len(survivors) > _MOST_ASSIGNMENTS:
            # Equal steps of saved cost leave assignments for every budget.
            cells = (saved[survivors] / saved[survivors[-1]] * _MOST_ASSIGNMENTS).astype(int)
            _, first_indices = np.unique(cells, return_index=True)
            last_index = len(survivors) - 1  # of the largest saving, which serves the smallest budget
            survivors = survivors[np.union1d(first_indices, last_index)]
        saved, drop = saved[survivors], drop[survivors]
        # The flat index of a survivor holds its row of the partial assignments before, and its outcome.
        parent_rows, outcome_indices = divmod(survivors, len(outcomes))
        steps.append((outcomes, parent_rows, outcome_indices))
    # Backtrack from the whole assignments to the outcome that each group contributes.
    rows = np.arange(len(saved))
    levels_of_groups: list[list[str]] = []  # the last group first; of each the level in every assignment
    for outcomes, parent_rows, outcome_indices in reversed(steps):
        levels_of_groups.append([outcomes[i].level for i in outcome_indices[rows]])
        rows = parent_rows[rows]
    levels: Iterable[tuple[str, ...]] = zip(*reversed(levels_of_groups), strict=True)
    if not levels_of_groups:
        levels = [()]  # without groups the one assignment is empty
    return [
        Assignment(float(saved_cost), float(metric_drop), chosen_levels)
        for saved_cost, metric_drop, chosen_levels in zip(saved, drop, levels, strict=True)
    ]


def _pareto_indices(saved: NDArray[Any], drop: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of the Pareto front, in rising order of saved cost."""
    # From the largest saving down, an assignment is on the front if it drops less than all before it.
    order = np.lexsort((drop, -saved))
    least_drop_before = np.minimum.accumulate(np.concatenate(([np.inf], drop[order])))[:-1]
    indices: NDArray[Any] = order[drop[order] < least_drop_before][::-1]
    return indices


def group_by_weights(weights_by_op: Mapping[str, frozenset[object]]) -> list[list[str]]:
    """Return the names of ops in groups; ops that read a weight in common are in one group."""
    groups: list[tuple[set[object], list[str]]] = []
    for name, weights in weights_by_op.items():
        # An op may join groups that were apart so far.
        merged_weights, merged_names = set(weights), list[str]()
        other_groups = []
        for group_weights, names in groups:
            if group_weights & weights:
                merged_weights |= group_weights
                merged_names += names
            else:
                other_groups.append((group_weights, names))
        groups = [*other_groups, (merged_weights, [*merged_names, name])]
    return [names for _, names in groups]


class Allocation:
    """The measurements of a sweep as outcomes of levels, from which budgets choose.

    sites: the ops.  points: by name and level, of which failed ones are no outcomes.
    dense: the metric without the tool.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        levels: Sequence[float],
        points: Mapping[tuple[str, Any], Point],
        dense: float,
        cost_model: SweepCost,
    ) -> None:
        self._cost_model = cost_model
        weights_by_op = {name: frozenset(cost_model.weights(site)) for name, site in sites.items()}
        self._groups = group_by_weights(weights_by_op)
        self._outcomes = [[LevelOutcome(KEEP, 0.0, 0.0)] for _ in self._groups]
        self._saved: list[dict[str, float]] = [{KEEP: 0.0} for _ in self._groups]
        for names, outcomes, saved_by_level in zip(self._groups, self._outcomes, self._saved, strict=True):
            for level in levels:
                group_points = [points[name, level] for name in names]
                saved_cost = cost_model.saved_cost([sites[name] for name in names], level, group_points)
                saved_by_level[f"{level:g}"] = saved_cost
                if not any(point.error for point in group_points):
                    # A metric that rises by chance must not pay for the loss of another op.
                    drop = sum(max(dense - (point.metric or 0.0), 0.0) for point in group_points)
                    outcomes.append(LevelOutcome(f"{level:g}", saved_cost, drop))

    @cached_property
    def _assignments(self) -> list[Assignment]:
        return pareto_assignments(self._outcomes)

    def choose(self, budget: float) -> dict[str, str]:
        """Return a label for each op: the least sum of drops within a budget, a share of the cost.

        Raises SweepError for a budget below the cost of the harshest levels.
        """
        cost_model = self._cost_model
        # In rising order of saved cost, in which drops rise too: the first that fits has the least drop.
        for assignment in self._assignments:
            # The factor allows for rounding of sums, for a budget that a level meets exactly.
            if cost_model.total - assignment.saved <= budget * cost_model.total * (1 + 1e-9):
                group_levels = zip(self._groups, assignment.levels, strict=True)
                return {name: label for names, label in group_levels for name in names}
        lowest_share = 1 - self._assignments[-1].saved / cost_model.total
        raise SweepError(
            f"a budget is {budget:g}; the harshest levels leave {lowest_share:.3g} of the {cost_model.name}"
        )

    def cost(self, architecture: Mapping[str, str]) -> float:
        """Return the cost of the model at the labels of its ops, from the savings of each op alone."""
        group_savings = zip(self._groups, self._saved, strict=True)
        return self._cost_model.total - sum(saved[architecture[names[0]]] for names, saved in group_savings)
