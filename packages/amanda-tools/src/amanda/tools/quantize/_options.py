"""Options of the tool, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from amanda.tools.kit import check_one_of
from amanda.tools.quantize._grid import Grid, QuantizeError, Rounding
from amanda.tools.quantize._observers import Observer, ObserverName, make_observer

Method = Literal["static", "dynamic", "qat", "lsq", "lsq+"]

TYPES = (
    "conv*", "depthwise_conv*", "linear", "matmul", "addmm", "baddbmm", "einsum",
    "scaled_dot_product_attention",
)  # fmt: skip
"""Types of the ops whose inputs are quantised where none are given."""


@dataclass(frozen=True)
class Options:
    """Options of `QuantizeTool`, under the names that they have there."""

    method: Method
    weight_bits: int | None
    activation_bits: int | None
    types: tuple[str, ...]
    observer: ObserverName
    weight_observer: ObserverName
    percentile: float
    per_channel: bool
    symmetric_weights: bool
    symmetric_activations: bool
    rounding: Rounding
    averaging: float
    calibration: int

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "method": Method, "observer": ObserverName, "weight_observer": ObserverName, "rounding": Rounding
        }  # fmt: skip
        for name, known in choices.items():
            check_one_of(name, getattr(self, name), get_args(known), QuantizeError)
        if self.weight_bits is None and self.activation_bits is None:
            raise QuantizeError("weight_bits and activation_bits are both None: nothing would be quantised")
        for bits in (self.weight_bits, self.activation_bits):
            if bits is not None:
                Grid.of(bits, False)
        for name in ("percentile", "averaging"):
            if not isinstance(getattr(self, name), Real):
                raise QuantizeError(f"{name} is {getattr(self, name)!r}; give a number")
        if not 50 < self.percentile <= 100:
            raise QuantizeError(f"percentile is {self.percentile!r}; give more than 50 and at most 100")
        if not 0 < self.averaging <= 1:
            raise QuantizeError(f"averaging is {self.averaging!r}; give more than 0 and at most 1")
        count = self.calibration
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
            raise QuantizeError(f"calibration is {count!r}; give a number of executions, 0 for none")
        if self.method.startswith("lsq") and self.rounding != "half_even":
            raise QuantizeError(f"{self.method} rounds half to even; rounding is {self.rounding!r}")
        if self.method in ("dynamic", "qat") and self.observer != "minmax":
            raise QuantizeError(
                f"observer is {self.observer!r}, but {self.method} takes the extremes at each execution; "
                'leave it at "minmax", or let method be "static"'
            )

    @property
    def trains(self) -> bool:
        """True if gradients go through what takes the place of a value."""
        return self.method not in ("static", "dynamic")

    def told(self) -> dict[str, Any]:
        """Return the options without which a scale means something else."""
        names = ("method", "weight_bits", "activation_bits", "per_channel", "symmetric_weights",
                 "symmetric_activations")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def bits(self, weight: bool) -> int | None:
        """Return the bits of weights, or of activations; None where they stay as they are."""
        return self.weight_bits if weight else self.activation_bits

    def grid(self, weight: bool) -> Grid:
        """Return the integers of weights, or of activations."""
        learned = self.method.startswith("lsq")  # whose activations have an offset, or a sign if need be
        symmetric = self.symmetric_weights if weight else self.symmetric_activations and not learned
        return Grid.of(self.bits(weight) or 8, symmetric)

    def make_observer(self, weight: bool, axes: Sequence[int]) -> Observer:
        """Return an observer that calibrates a tensor."""
        name = self.weight_observer if weight else "mse" if self.method == "lsq+" else self.observer
        return make_observer(name, self.grid(weight), axes, self.rounding, self.percentile)
