"""Options of the tool, checked, and which ops and inputs of ops it quantises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, get_args

import amanda
from amanda.tools.kit import check_one_of
from amanda.tools.mapping import MappingTool
from amanda.tools.quantize._grid import Grid, QuantizeError, Rounding
from amanda.tools.quantize._observers import Observer, ObserverName, make_observer
from amanda.tools.quantize._tensorflow import write_recompute

Method = Literal["static", "dynamic", "qat", "lsq", "lsq+"]

TYPES = (
    "conv[!e]*", "depthwise_conv*", "linear", "matmul", "addmm", "baddbmm", "einsum",
    "scaled_dot_product_attention",
)  # fmt: skip
"""Types of the ops whose inputs are quantised by default."""

_ALONE = {"batch_norm": (0,), "embedding": (0,)}
_BEFORE_BIAS = {**_ALONE, "conv": (0, 1), "linear": (0, 1)}
_OPERANDS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "pytorch": {
        **_BEFORE_BIAS, "addmm": (1, 2), "baddbmm": (1, 2), "scaled_dot_product_attention": (0, 1, 2),
        "layer_norm": (0,), "group_norm": (0,),
    },
    "tensorflow": _ALONE,
    "onnxruntime": _BEFORE_BIAS,
    "jax": _ALONE,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of `QuantizeTool`, under the same names."""

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
        for name, least, most in (("percentile", 50, 100), ("averaging", 0, 1)):
            given = getattr(self, name)
            if not isinstance(given, Real):
                raise QuantizeError(f"{name} is {given!r}; give a number")
            if not least < given <= most:  # type: ignore[operator]
                raise QuantizeError(f"{name} is {given!r}; give more than {least} and at most {most}")
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
        """True if gradients pass through quantised values."""
        return self.method not in ("static", "dynamic")

    def told(self) -> dict[str, Any]:
        """Return the options that saved scales depend on."""
        names = ("method", "weight_bits", "activation_bits", "per_channel", "symmetric_weights",
                 "symmetric_activations")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def bits(self, weight: bool) -> int | None:
        """Return the bits of weights, or of activations; None for no quantisation."""
        return self.weight_bits if weight else self.activation_bits

    def grid(self, weight: bool) -> Grid:
        """Return the grid of weights, or of activations."""
        learned = self.method.startswith("lsq")  # activations have an offset, or choose a sign
        symmetric = self.symmetric_weights if weight else self.symmetric_activations and not learned
        return Grid.of(self.bits(weight) or 8, symmetric)

    def make_observer(self, weight: bool, axes: Sequence[int]) -> Observer:
        """Return an observer that calibrates a tensor."""
        name = self.weight_observer if weight else "mse" if self.method == "lsq+" else self.observer
        return make_observer(name, self.grid(weight), axes, self.rounding, self.percentile)


def operands() -> MappingTool:
    """Return rules that write `operands`, the positions to quantise, `recompute` and `is_called_back`.

    All inputs of a type that no table has are operands.  is_called_back: True where the program calls
    routines in Python, through which autodiff does not go: gradients are changed beside the backward op.
    """
    rules = [[framework, partial(_write, found)] for framework, found in _OPERANDS.items()]
    return MappingTool([
        ["*", partial(_write_called, False)], ["jax", partial(_write_called, True)], *rules,
        ["tensorflow", write_recompute],
    ])  # fmt: skip


def _write_called(is_called_back: bool, context: amanda.OpContext) -> None:
    context["is_called_back"] = is_called_back


def _write(found: Mapping[str, Sequence[int]], context: amanda.OpContext) -> None:
    kind, count = context["type"], len(context.get_inputs())
    wanted = found.get("conv" if kind.startswith("conv") else kind, range(count))
    context["operands"] = [position for position in wanted if position < count]
