"""Products with a weight: the input that is multiplied, as rows beside the weight as a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import amanda
from amanda.tools.kit import Window, windows_of
from amanda.tools.weights import WeightInput

if TYPE_CHECKING:
    from torch import Tensor

_FACTORS = {"linear": (0, 1), "matmul": (0, 1), "addmm": (1, 2)}
"""Positions of the factors of each product of matrices."""


class Product(NamedTuple):
    """The input of an op that its weight multiplies.

    position: among the op's inputs.  axis: of the input's channels, from the end.  rows: returns an input as
    (n, K), where K is the number of weights of each output, in the order of the weight's canonical form.
    """

    position: int
    axis: int
    rows: Callable[[Tensor], Tensor]


def product(context: amanda.OpContext, read: WeightInput) -> Product | str:
    """Return the product that an op of PyTorch computes, or why there is none that a matrix computes."""
    kind, weight = context["type"], context.get_inputs()[read.index]
    if kind in _FACTORS:
        factors = _FACTORS[kind]
        if weight.dim() != 2 or read.index not in factors:
            return f"its weight has {weight.dim()} axes, and a product of matrices is expected"
        (position,) = (one for one in factors if one != read.index)
        is_left = read.index < position
        axis = -2 if is_left and context.get_inputs()[position].dim() > 1 else -1
        return Product(position, axis, partial(_rows, axis=axis))
    if kind in ("conv1d", "conv2d", "conv3d") and read.layout is not None:
        attributes = context.get_attrs()
        if attributes.get("groups", 1) != 1:
            return f"its convolution has {attributes['groups']} groups, each of which reads other inputs"
        windows = windows_of(attributes, "NC" + "DHW"[-len(read.layout) + 2 :], weight.shape[2:])
        return Product(0, 1 - len(read.layout), partial(_patches, windows=windows))
    return f"it is a {kind}; the method is for linear layers, products of matrices and convolutions"


def _rows(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, -1).reshape(-1, x.shape[axis])


def _patches(x: Tensor, windows: Sequence[Window]) -> Tensor:
    """Return what each place of a convolution's window reads, in the order of channels and window."""
    from torch.nn.functional import pad

    count = len(windows)
    if x.dim() == count + 1:
        x = x.unsqueeze(0)
    sizes = x.shape[-count:]
    ends = [one for size, window in zip(sizes, windows, strict=True) for one in reversed(window.pads(size))]
    x = pad(x, ends[::-1])
    for i, window in enumerate(windows):
        x = x.unfold(2 + i, window.reach, window.stride)[..., :: window.dilation]
    return x.movedim(1, 1 + count).flatten(0, count).flatten(1)
