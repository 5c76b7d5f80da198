"""Candidates that give an op another weight: another window or groups, fewer channels, fewer bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import canonical, restored, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize import Grid, choose_qparams, extremes, fake_quantize, fake_quantize_gradient
from amanda.tools.search._candidates import Candidate, Original

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


class WeightCandidate(Candidate):
    """Base for candidates that give the op another weight."""

    def weight(self, value: Any, site: Site) -> Any:
        """Return the weight that takes the place of the op's own."""
        raise NotImplementedError

    def bias(self, value: Any, site: Site) -> Any:
        """Return the bias that takes the place of the op's own."""
        return value

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse ops without a weight."""
        is_known = site.weight is not None and site.layout is not None and "O" in site.layout
        return "" if is_known else f"{site.type} has no weight with output channels"

    def start(self, context: amanda.OpContext, site: Site) -> Any:
        """Return the op's weight as an array of NumPy: outputs, inputs, window."""
        assert site.weight is not None
        value = context.get_value(site.weight)
        return canonical(tensors_of(value).to_numpy(value), site.layout)

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return what the op gives of the other weight."""
        return original(*self.changed(inputs, site))

    def changed(self, inputs: Sequence[Any], site: Site) -> list[Any]:
        """Return the inputs with the other weight and bias."""
        values = list(inputs)
        values[site.weight or 0] = self.weight(values[site.weight or 0], site)
        if site.bias is not None:
            values[site.bias] = self.bias(values[site.bias], site)
        return values


class Convolution(WeightCandidate):
    """A convolution of another kernel size or other groups, with a weight of its own and the op's bias.

    The weight starts as the op's: cut around the centre, or with zeros around it; of groups it has the blocks
    on the diagonal.
    """

    def __init__(self, label: str, kernel: int, groups: int) -> None:
        super().__init__(label)
        self.kernel, self.groups = kernel, groups

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Make the weight; refuse what is no convolution, or one whose window or channels do not fit."""
        reason = super().fit(context, site)
        layout: str | None = context["layout"]
        if reason or layout is None or not re.fullmatch("conv[123]d", site.type):
            return reason or f"{site.type} is no convolution"
        channels = context["shape"](context.get_inputs()[0])[layout.index("C")]
        outputs, inputs, *window = site.weight_shape
        if channels % self.groups or outputs % self.groups:
            return f"{channels} to {outputs} channels are not {self.groups} groups"
        if any((size - self.kernel) % 2 for size in window):
            return f"windows of {window[0]} and {self.kernel} have no common centre"
        reason = site.library.unread(context, site) or site.library.refusal(
            context, [self.kernel - size for size in window], channels // inputs
        )
        if not reason:
            site.keep(self.label, lambda: self._start(context, site, channels), True)
        return reason

    def _start(self, context: amanda.OpContext, site: Site, channels: int) -> Any:
        own = self.start(context, site)
        dense = _regrouped(own, channels // own.shape[1], 1)
        made = _regrouped(_resized(dense, self.kernel), 1, self.groups)
        return restored(made, site.layout, made.shape)

    def weight(self, value: Any, site: Site) -> Any:
        """Return the candidate's own."""
        return site.read(self.label, value)

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the convolution."""
        change = [self.kernel - size for size in site.weight_shape[2:]]
        return site.library.convolve(original, self.changed(inputs, site), site, change, self.groups)

    def shares(self, site: Site) -> tuple[float, float]:
        """Return the share of elements of the weight."""
        share = np.size(site.array(self.label)) / np.prod(site.weight_shape)
        return share, share


class Width(WeightCandidate):
    """A share of the output channels, those whose weights were largest; the others give zero."""

    def __init__(self, label: str, share: float) -> None:
        super().__init__(label)
        self._share = share

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Make the mask."""
        reason = super().fit(context, site) or site.library.unread(context, site)
        if not reason:
            site.keep(self.label, lambda: self._mask(context, site), False)
        return reason

    def _mask(self, context: amanda.OpContext, site: Site) -> Any:
        own = self.start(context, site)
        norms = np.abs(own).reshape(len(own), -1).sum(1)
        mask = np.zeros(len(own), np.float32)
        mask[np.argsort(-norms, kind="stable")[: ceil(self._share * len(own))]] = 1
        return mask

    def weight(self, value: Any, site: Site) -> Any:
        """Return the weight with zeros."""
        mask = site.read(self.label, value)
        extents = [-1 if axis == "O" else 1 for axis in site.layout or ""]
        return value * tensors_of(mask).reshape(mask, extents)

    def bias(self, value: Any, site: Site) -> Any:
        """Return the bias with zeros."""
        return value * site.read(self.label, value)

    def shares(self, site: Site) -> tuple[float, float]:
        """Return the share of channels."""
        share = float(np.mean(site.array(self.label)))
        return share, share


class Bits(WeightCandidate):
    """The weight on a grid of integers, each output channel with a scale; gradients pass straight through.

    The numbers are those of `QuantizeTool(method="dynamic", activation_bits=None)`.
    """

    def __init__(self, label: str, bits: int) -> None:
        super().__init__(label)
        self._grid = Grid.of(bits, symmetric=True)

    def weight(self, value: Any, site: Site) -> Any:
        """Return the weight on the grid."""
        xp, axes = tensors_of(value), ((site.layout or "").index("O"),)
        given = (*choose_qparams(*extremes(xp.detach(value), axes), self._grid), self._grid, axes)

        def backward(gradient: Any, x: Any) -> tuple[Any]:
            return (fake_quantize_gradient(gradient, x, *given),)

        return xp.with_gradient(lambda x: fake_quantize(x, *given, kernel=False), backward, [value])

    def shares(self, site: Site) -> tuple[float, float]:
        """Return the share of bits."""
        return 1.0, self._grid.bits / (8 * site.itemsize)


def _regrouped(weight: Any, groups: int, wanted: int) -> Any:
    """Return a weight (O, I, ...) of some groups as one of others: with zeros, or of the blocks alone."""
    outputs, inputs, *window = weight.shape
    dense = np.zeros((outputs, inputs * groups, *window), weight.dtype)
    for i, row in enumerate(weight):
        group = i * groups // outputs
        dense[i, group * inputs : (group + 1) * inputs] = row
    size = dense.shape[1] // wanted
    starts = [i * wanted // outputs * size for i in range(outputs)]
    return np.stack([dense[i, start : start + size] for i, start in enumerate(starts)])


def _resized(weight: Any, kernel: int) -> Any:
    """Return a weight (O, I, ...) with a window of another size around the same centre."""
    for axis in range(2, weight.ndim):
        margin = (kernel - weight.shape[axis]) // 2
        if margin >= 0:
            pads = [(margin, margin) if i == axis else (0, 0) for i in range(weight.ndim)]
            weight = np.pad(weight, pads)
        else:
            weight = np.moveaxis(np.moveaxis(weight, axis, 0)[-margin:margin], 0, axis)
    return weight
