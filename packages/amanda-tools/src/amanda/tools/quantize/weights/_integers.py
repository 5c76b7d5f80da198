"""Weights as integers: options, state and result that all methods share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import amanda
from amanda.tools._libraries import numpy as np
from amanda.tools.kit import Weight, WeightResult, WeightTool
from amanda.tools.quantize._grid import Grid, QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight
from amanda.tools.quantize.weights._grouping import Codes, dequantized
from amanda.tools.results import Column


class QuantizedWeights(WeightResult):
    """The weights that were quantised, with their bits and the number of weights that share a scale."""

    name: ClassVar[str] = "quantized_weights"
    title = "Quantised weights"
    state = ("integers", ".codes")
    columns: ClassVar[Sequence[Column]] = (
        *WeightResult.columns, Column("bits", number=True), Column("group_size", number=True),
    )  # fmt: skip

    def __init__(self, tool: IntegerTool) -> None:
        self._tool = tool
        super().__init__(tool)

    def row(self, weight: Weight) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        bits = None if weight.is_left else self._tool.grid.bits
        return (*super().row(weight), bits, None if weight.is_left else self._tool.size(weight))


class IntegerTool(WeightTool[CalibratedWeight]):
    """Base of tools whose ops compute with weights of integers, with a scale for each group of inputs."""

    error = QuantizeError
    weight_type = CalibratedWeight

    def __init__(
        self,
        bits: int = 4,
        group_size: int | None = 128,
        symmetric: bool = True,
        type: list[str] | str | None = None,
        module: list[str] | str | None = None,
        exclude: list[str] | str | None = None,
    ) -> None:
        super().__init__(type, module, exclude)
        self.grid = Grid.of(bits, symmetric)
        if not isinstance(bits, int) or bits > 8:
            raise QuantizeError(f"bits is {bits!r}; give a number from 2 to 8")
        if group_size is not None and (not isinstance(group_size, int) or group_size < 1):
            raise QuantizeError(f"group_size is {group_size!r}; give a number of inputs, or None for all")
        self.group_size = group_size

    @property
    def result(self) -> QuantizedWeights:
        """The weights that were met, and those that are left."""
        return QuantizedWeights(self)

    def size(self, weight: Weight) -> int:
        """Return the number of weights that share a scale."""
        return self.group_size or int(np.prod(weight.canonical_shape[1:]))

    def on_weight(self, weight: CalibratedWeight) -> str | None:
        """Make room for the integers of a weight, unless groups do not fit."""
        if weight.layout is None:
            return "which of its axes are inputs is not known"
        outputs, *inputs = weight.canonical_shape
        count, size = int(np.prod(inputs)), self.size(weight)
        if count % size:
            return f"its {count} inputs are no multiple of group_size {size}"
        weight.keep("codes", np.zeros((outputs, count), "int8" if self.grid.symmetric else "uint8"))
        weight.keep("scale", np.ones((outputs, count // size), "float32"))
        weight.keep("zero_point", np.zeros((outputs, count // size), "float32"))
        return None

    def write(self, weight: CalibratedWeight, codes: Codes) -> None:
        """Keep the integers of a weight."""
        for name, value in codes._asdict().items():
            weight[name] = value

    @amanda.traceable
    def transform(self, value: Any, codes: Any, scale: Any, zero_point: Any, smoothing: Any = None) -> Any:
        """Return what the integers stand for, divided by the scales of the inputs where there are some."""
        made = dequantized(codes, scale, zero_point)
        return (made if smoothing is None else made / smoothing).reshape(value.shape)
