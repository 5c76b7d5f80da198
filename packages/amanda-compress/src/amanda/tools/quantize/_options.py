"""Checked options of QuantizeTool, and the rules for the inputs that each op quantises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import amanda
from amanda.tools.mapping import PRODUCTS, SEVERAL_WEIGHTS, MappingTool, product_of
from amanda.tools.quantize._grid import Bits, FloatGrid, Grid, QuantizeError, Rounding
from amanda.tools.quantize._observers import Observer, ObserverName, make_observer
from amanda.tools.quantize._tensorflow import write_recompute
from amanda.tools.select import Paths, unmatched

Method = Literal["static", "dynamic", "qat", "lsq", "lsq+"]

# Some frameworks have convolutions that StandardMapping has no word for.
TYPES = ("conv[!e]*", *(kind for kind in PRODUCTS if kind not in SEVERAL_WEIGHTS))
"""Types of the ops whose inputs are quantised by default."""

_DATA_ALONE = frozenset({"batch_norm", "embedding", "layer_norm", "group_norm"})
"""Types of ops of which only the first input is quantised."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `QuantizeTool`, under the same names."""

    method: Method
    weight_bits: Bits | Mapping[str, Bits | None] | None
    activation_bits: Bits | Mapping[str, Bits | None] | None
    types: tuple[str, ...]
    observer: ObserverName
    weight_observer: ObserverName
    percentile: float
    per_channel: bool
    group_size: int | None
    symmetric_weights: bool
    symmetric_activations: bool
    rounding: Rounding
    averaging: float
    calibration: int

    def __post_init__(self) -> None:
        if self.weight_bits is None and self.activation_bits is None:
            raise QuantizeError("weight_bits and activation_bits are both None: nothing would be quantised")
        for bits_option in (self.weight_bits, self.activation_bits):
            for bits in bits_option.values() if isinstance(bits_option, Mapping) else [bits_option]:
                if isinstance(bits, Mapping) or bits is not None:
                    self._check_grid(Grid.of(bits, False))
        if self.group_size is not None and not self.per_channel:
            raise QuantizeError(
                f"group_size is {self.group_size}, and per_channel False: a group lies within a channel"
            )
        if self.method.startswith("lsq") and self.rounding != "half_even":
            raise QuantizeError(f"{self.method} rounds half to even; rounding is {self.rounding!r}")
        if self.method in ("dynamic", "qat") and self.observer != "minmax":
            raise QuantizeError(
                f"observer is {self.observer!r}, but {self.method} takes the extremes at each execution; "
                'leave it at "minmax", or let method be "static"'
            )

    def _check_grid(self, grid: Grid) -> None:
        """Raise QuantizeError for options that a grid of floating numbers does not support."""
        if not isinstance(grid, FloatGrid):
            return
        unfit = {"method": self.method.startswith("lsq"), "rounding": self.rounding != "half_even",
                 "observer": self.observer == "histogram",
                 "weight_observer": self.weight_observer == "histogram"}  # fmt: skip
        for name, is_so in unfit.items():
            if is_so:
                raise QuantizeError(
                    f"{name} is {getattr(self, name)!r}, which is for integers, and bits are {grid.dtype}"
                )

    @property
    def trains(self) -> bool:
        """True if gradients pass through quantised values."""
        return self.method not in ("static", "dynamic")

    def scale_options(self) -> dict[str, Any]:
        """Return the options that saved scales depend on, by name."""
        names = ("method", "weight_bits", "activation_bits", "per_channel", "group_size",
                 "symmetric_weights", "symmetric_activations")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def for_modules(self, paths: Sequence[str]) -> QuantizeOptions | None:
        """Return the options for an op in modules with these paths; None for no quantisation."""
        weight, activation = (
            next((bits for layers, bits in bits_option if layers(*paths)), None)
            if isinstance(bits_option, list)
            else bits_option
            for bits_option in self._by_layer
        )
        if weight is None and activation is None:
            return None
        return replace(self, weight_bits=weight, activation_bits=activation)

    @cached_property
    def _by_layer(self) -> list[Any]:
        both = {"weight_bits": self.weight_bits, "activation_bits": self.activation_bits}
        return [
            [(Paths(name, glob), bits) for glob, bits in bits_option.items()]
            if isinstance(bits_option, Mapping) else bits_option
            for name, bits_option in both.items()
        ]  # fmt: skip

    def unmatched(self) -> list[str]:
        """Return sentences on globs of `weight_bits` and `activation_bits` that matched no op."""
        return unmatched(
            layers
            for bits_option in self._by_layer
            if isinstance(bits_option, list)
            for layers, _ in bits_option
        )

    def bits(self, weight: bool) -> Any:
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


def operand_rules() -> MappingTool:
    """Return rules that write `operands`, the positions to quantise, `recompute` and `is_called_back`.

    Operands are the factors of a product, and all inputs of most other types.
    is_called_back: True if the program calls routines in Python (JAX); autodiff does not differentiate these,
    so that a routine after the backward op changes the gradients.
    """
    return MappingTool([
        ["*", partial(_write_is_called_back, False)], ["jax", partial(_write_is_called_back, True)],
        ["*", _write_operands],
        ["tensorflow", write_recompute],
    ])  # fmt: skip


def _write_is_called_back(is_called_back: bool, context: amanda.OpContext) -> None:
    context["is_called_back"] = is_called_back


def _write_operands(context: amanda.OpContext) -> None:
    product, count = product_of(context), len(context.get_inputs())
    factors = sorted(product.factors) if product else [0] if context["type"] in _DATA_ALONE else ()
    context["operands"] = [position for position in factors or range(count) if position < count]
