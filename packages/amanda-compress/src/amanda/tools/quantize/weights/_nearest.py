"""Round to nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.tools.quantize.weights._calibrated import INDEXED_ROWS, CalibratedWeight
from amanda.tools.quantize.weights._grouping import quantized
from amanda.tools.quantize.weights._integers import IntegerTool


class NearestTool(IntegerTool):
    """Rounds weights to the nearest integers of so many bits, with a scale for each group of inputs.

    bits: 2 to 8.  group_size: number of consecutive inputs of an output that share a scale; None: all.
    symmetric: signed integers with zero as zero point, else unsigned ones.
    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.

    Ops compute with the rounded weights, and `finalize` writes them into a model.
    Raises QuantizeError for options that make no sense.

    >>> nearest = NearestTool(bits=8, group_size=None)
    """

    leaves_rows = INDEXED_ROWS

    def on_read(self, weight: CalibratedWeight, present: Callable[[], Any]) -> None:
        """Round a weight to the nearest when it is read first."""
        if not weight.is_ready:
            matrix = weight.matrix(present())
            self.write(weight, matrix, quantized(matrix, self.grid, self.size(weight)))
            weight.updated = 0
