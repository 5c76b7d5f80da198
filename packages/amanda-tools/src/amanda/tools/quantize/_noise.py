"""Signal and quantisation noise."""

from __future__ import annotations

from math import inf, log10
from typing import Any

import numpy as np

from amanda.tools.quantize._arithmetic import as_array


class Noise:
    """Sums of squares of values, and of what quantisation changed in them, over executions."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, x: Any, quantised: Any) -> None:
        """Take in a tensor and what took its place."""
        wanted, found = (as_array(one).astype(np.float64) for one in (x, quantised))
        self.signal += float(np.square(wanted).sum())
        self.noise += float(np.square(found - wanted).sum())

    @property
    def sqnr(self) -> float | None:
        """Signal-to-quantisation-noise ratio in dB, infinite without noise; None where none was measured."""
        if not self.signal and not self.noise:
            return None
        return sqnr(self.signal, self.noise)


def sqnr(signal: float, noise: float) -> float:
    """10 log10(signal / noise) in dB.

    >>> sqnr(100.0, 1.0)
    20.0
    """
    if noise == 0:
        return inf
    return 10 * log10(signal / noise) if signal else -inf
