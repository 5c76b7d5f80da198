"""Cost of a model: FLOPs of each op, bytes of the parameters that it reads, and what levels of ops save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import amanda
from amanda.tools.flops import Cost, FlopsTool
from amanda.tools.kit import parameter_inputs
from amanda.tools.mapping import itemsize
from amanda.tools.sweep._result import Point, Site
from amanda.tools.weights import parameter_store


class WeightSize(NamedTuple):
    """The number of elements of a weight, and their bytes."""

    numbers: int
    size: int


class OpCosts(amanda.Tool):
    """Records what each forward op costs, and the bytes of the parameters that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._flops: dict[int, Cost] = {}
        self._sizes: dict[int, dict[Hashable, int]] = {}
        self._weights: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self.depends_on(FlopsTool())
        self.add_inst_for_op(self._record_costs, require_outputs=True, guard="shape")

    def _record_costs(self, context: amanda.OpContext) -> None:
        """Record the FLOPs of an op and the sizes of the parameters that it reads."""
        if context["phase"] != "forward":
            return
        cost, op_id, inputs = context.get("cost"), context.get_op_id(), context.get_inputs()
        self._flops[op_id] = cost if isinstance(cost, Cost) else Cost()
        for position in parameter_inputs(context):
            numbers = prod(context["shape"](inputs[position]))
            size = numbers * (itemsize(context["dtype"](inputs[position])) or 4)
            variable = context.get_variable(position)
            parameter = parameter_store(variable).identity(variable)
            self._sizes.setdefault(op_id, {})[parameter] = size
            if position == context["weight_index"]:
                self._weights[op_id] = parameter
                self._numbers[parameter] = numbers

    @property
    def is_empty(self) -> bool:
        """Return True if no op was recorded."""
        return not self._flops

    def of_ops(self, op_ids: Iterable[int]) -> tuple[int, dict[Hashable, WeightSize]]:
        """Return the FLOPs of the products of some ops, and the sizes of the weights that they read."""
        recorded = [op_id for op_id in op_ids if op_id in self._flops]
        weights = {
            parameter: WeightSize(self._numbers[parameter], self._sizes[op_id][parameter])
            for op_id in recorded
            if (parameter := self._weights.get(op_id)) is not None
        }
        return sum(2 * self._flops[op_id].macs for op_id in recorded), weights

    def flops(
        self, shares: Mapping[int, tuple[float, float]] | None = None, skipped: Collection[int] = ()
    ) -> float:
        """Return FLOPs of the forward pass; what an op does besides products, such as a bias, stays.

        shares: what is left of an op's products, and of its weight, by op id.  skipped: ops that do not run.
        """
        total = 0.0
        for op_id, cost in self._flops.items():
            share = 0.0 if op_id in skipped else (shares or {}).get(op_id, (1.0, 1.0))[0]
            total += 2 * cost.macs * share + (cost.flops - 2 * cost.macs) * (share > 0)
        return total

    def size(
        self, shares: Mapping[int, tuple[float, float]] | None = None, skipped: Collection[int] = ()
    ) -> float:
        """Return bytes of parameters; one that several ops read counts once, by the largest share."""
        remaining: dict[Hashable, float] = {}
        for op_id, sizes in self._sizes.items():
            products, weight = (shares or {}).get(op_id, (1.0, 1.0))
            for parameter, size in sizes.items():
                share = weight if parameter == self._weights.get(op_id) or not products else 1.0
                bytes_left = 0.0 if op_id in skipped else share * size
                remaining[parameter] = max(remaining.get(parameter, 0.0), bytes_left)
        return sum(remaining.values())


CostOption: TypeAlias = "Literal['size', 'flops'] | Callable[..., Any] | None"
RemainingShare: TypeAlias = "Callable[[Any, WeightSize], float]"
"""Returns the share of a weight's bytes, or of its op's FLOPs, that remains at a level."""


class CostModel:
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

    def saved(self, sites: Sequence[Site], level: float, points: Sequence[Point]) -> float:
        """Return the cost that a level of ops which share weights saves; points: of each op alone.

        A point that failed has no measured cost, and counts as nothing saved.
        """
        if self.measured is not None:
            return sum(self.measured - point.cost for point in points if point.cost is not None)
        remaining_share = self._remaining_share
        assert remaining_share is not None
        if self.cost == "size":
            # A weight that several ops share is saved once.
            sizes = {parameter: size for site in sites for parameter, size in self.weights(site).items()}
            return sum(size.size * (1 - remaining_share(level, size)) for size in sizes.values())
        site_costs = [self.op_costs.of_ops(site.op_ids) for site in sites]
        return sum(
            flops * (1 - remaining_share(level, next(iter(weights.values()))))
            for flops, weights in site_costs
            if weights
        )
