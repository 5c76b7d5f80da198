"""Costs of the ops of a model: FLOPs, and bytes of the parameters that they read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import prod
from typing import ClassVar, NamedTuple

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.tools.flops import Cost, FlopsTool
from amanda.tools.kit import parameter_inputs
from amanda.tools.mapping import itemsize
from amanda.tools.weights import parameter_store


class WeightSize(NamedTuple):
    """The numbers in a weight, and their bytes."""

    numbers: int
    size: int


class OpCosts(amanda.Tool):
    """Records the cost of each forward op, and the bytes of the parameters that it reads."""

    error: ClassVar[type[AmandaError]] = ToolError
    """The error for totals that are asked for before an op has run."""

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

    def of_ops(self, op_ids: Iterable[int]) -> tuple[int, dict[Hashable, WeightSize]]:
        """Return the FLOPs of the products of some ops, and the weights that they read, by holder."""
        own = [one for one in op_ids if one in self._flops]
        weights = {
            holder: WeightSize(self._numbers[holder], self._sizes[one][holder])
            for one in own
            if (holder := self._weights.get(one)) is not None
        }
        return sum(2 * self._flops[one].macs for one in own), weights

    def totals(self) -> tuple[float, float]:
        """Return the FLOPs of the forward pass, and the bytes of all parameters, each once.

        Raises `error` where no op has run in a scope of the tool.
        """
        if not self._flops:
            raise self.error(
                f"{type(self).__name__}: the costs of ops are not known; run the model in a scope of it"
            )
        sizes: dict[Hashable, int] = {}
        for of_op in self._sizes.values():
            sizes |= of_op
        return float(sum(cost.flops for cost in self._flops.values())), float(sum(sizes.values()))
