"""Costs of an architecture: FLOPs and bytes of each op, by the shares of the candidates that are chosen."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import amanda
from amanda.tools.flops import Cost, FlopsTool
from amanda.tools.kit import parameter_inputs, parameter_store
from amanda.tools.mapping import itemsize
from amanda.tools.search._errors import SearchError
from amanda.tools.search._site import Site


class Weight(NamedTuple):
    """The numbers in a weight, and their bytes."""

    numbers: int
    size: int


class Costs(amanda.Tool):
    """Notes what each forward op costs, and the bytes of the parameters that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._flops: dict[int, Cost] = {}
        self._sizes: dict[int, dict[Hashable, int]] = {}
        self._weights: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self.depends_on(FlopsTool())
        self.add_inst_for_op(self._look, require_outputs=True, guard="shape")

    def _look(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        cost, op_id, inputs = context.get("cost"), context.get_op_id(), context.get_inputs()
        self._flops[op_id] = cost if isinstance(cost, Cost) else Cost()
        for position in parameter_inputs(context):
            extents = context["shape"](inputs[position])
            numbers = prod(extents)
            size = numbers * (itemsize(context["dtype"](inputs[position])) or 4)
            variable = context.get_variable(position)
            holder = parameter_store(variable).identity(variable)
            self._sizes.setdefault(op_id, {})[holder] = size
            if position == context["weight_index"]:
                self._weights[op_id] = holder
                self._numbers[holder] = numbers

    def of_ops(self, op_ids: Iterable[int]) -> tuple[int, dict[Hashable, Weight]]:
        """Return the FLOPs of the products of some ops, and the weights that they read, by holder."""
        own = [one for one in op_ids if one in self._flops]
        weights = {
            holder: Weight(self._numbers[holder], self._sizes[one][holder])
            for one in own
            if (holder := self._weights.get(one)) is not None
        }
        return sum(2 * self._flops[one].macs for one in own), weights

    def totals(self) -> tuple[float, float]:
        """Return the FLOPs of the forward pass, and the bytes of all parameters."""
        return self.flops((), {}), self.size((), {})

    def flops(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return FLOPs of the forward pass; what an op does besides products, such as a bias, stays."""
        shares, skipped = self._shares(sites, architecture)
        total = 0.0
        for op, cost in self._flops.items():
            share = 0.0 if op in skipped else shares.get(op, (1.0, 1.0))[0]
            total += 2 * cost.macs * share + (cost.flops - 2 * cost.macs) * (share > 0)
        return total

    def size(self, sites: Sequence[Site], architecture: Mapping[str, str]) -> float:
        """Return bytes of parameters; one that several ops read counts once, by the largest share."""
        shares, skipped = self._shares(sites, architecture)
        found: dict[Hashable, float] = {}
        for op, sizes in self._sizes.items():
            flops, weight = shares.get(op, (1.0, 1.0))
            for holder, size in sizes.items():
                share = weight if holder == self._weights.get(op) or not flops else 1.0
                left = 0.0 if op in skipped else share * size
                found[holder] = max(found.get(holder, 0.0), left)
        return sum(found.values())

    def _shares(
        self, sites: Sequence[Site], architecture: Mapping[str, str]
    ) -> tuple[dict[int, tuple[float, float]], set[int]]:
        if not self._flops:
            raise SearchError("SearchTool: the costs of ops are not known; call prepare(model, x) first")
        shares: dict[int, tuple[float, float]] = {}
        skipped: set[int] = set()
        for site in sites:
            chosen = site.candidates[architecture[site.decision.name]]
            shares |= dict.fromkeys(site.op_ids, chosen.shares(site))
            if chosen.skips and site.branch:
                skipped |= site.branch
        return shares, skipped
