"""Costs that levels save: bytes of weights, FLOPs, or the result of a user's function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias

from amanda.tools.sweep._costs import OpCosts, WeightSize
from amanda.tools.sweep._result import Point, Site

Cost: TypeAlias = "Literal['size', 'flops'] | Callable[..., Any] | None"
Left: TypeAlias = "Callable[[Any, WeightSize], float]"
"""The share of a weight's bytes, or of the FLOPs of an op that reads it, that a level leaves."""


class Prices:
    """The cost of a model, and what is saved where some ops are at a level.

    cost: "size", "flops", or a function that was called with the tools of each point in force.
    """

    def __init__(self, cost: Cost, left: Left | None) -> None:
        self.cost, self._left = cost, left
        self.noted = OpCosts()
        """Is applied while the model is evaluated without the tool."""
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
        return self.noted.size() if self.cost == "size" else self.noted.flops()

    def weights(self, site: Site) -> dict[Hashable, WeightSize]:
        """Return the weights that an op reads, by holder."""
        return self.noted.of_ops(site.op_ids)[1]

    def saved(self, sites: Sequence[Site], level: float, points: Sequence[Point]) -> float:
        """Return what is saved where ops that share weights are at a level; points: of each op alone.

        A point that failed has no measured cost, and counts as nothing saved.
        """
        if self.measured is not None:
            return sum(self.measured - one.cost for one in points if one.cost is not None)
        left = self._left
        assert left is not None
        if self.cost == "size":
            weights = {holder: one for site in sites for holder, one in self.weights(site).items()}
            return sum(one.size * (1 - left(level, one)) for one in weights.values())
        found = [self.noted.of_ops(site.op_ids) for site in sites]
        return sum(flops * (1 - left(level, next(iter(own.values())))) for flops, own in found if own)
