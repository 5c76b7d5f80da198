"""FLOPs of each op and bytes of the parameters that it reads, to price a change of some ops."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from math import prod
from typing import NamedTuple

import amanda
from amanda.tools.flops import Cost, FlopsTool
from amanda.tools.kit import parameter_inputs
from amanda.tools.mapping import itemsize
from amanda.tools.weights import parameter_store


class WeightSize(NamedTuple):
    """The count of numbers in a weight, and their bytes."""

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
