"""Arithmetic of dynamic pruning, on tensors of any framework that autoray knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from amanda.tools.axes import Window
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import astype, do, get_dtype_name
from amanda.tools.libraries import numpy as np


def saliency(x: Any, weight: Any, bias: Any) -> Any:
    """Return the predicted saliency of each output channel: relu(x weight + bias).

    x: (N, I).  weight: (I, O).  bias: (O,).  Returns (N, O).  Source: Gao et al. 2019.
    """
    predicted = x @ weight + bias
    return predicted * as_type_of(predicted > 0, predicted)


def top_mask(values: Any, count: int) -> Any:
    """Return a 0/1 mask of the `count` largest along the last axis; of equal ones the first.

    values: (..., C).  Source: k-winners-take-all, Gao et al. 2019.
    """
    # Ranks instead of a threshold, so that ties keep exactly `count`.
    return as_type_of(tensors_of(values).ranks(-detached(values)) < count, values)


def normalised_gate(gate: Any) -> Any:
    """Return a gate divided by the mean of its nonzero values along the last axis."""
    count = do("sum", as_type_of(gate > 0, gate), axis=-1, keepdims=True)
    return gate * count / _total(gate)


def density_count(density: float, size: int) -> int:
    """Return the number of kept units of `size`: the share `density`, rounded up, at least one."""
    # Less a billionth: 0.07 * 100 is 7.000000000000001 in floating point, of which the ceiling is 8.
    return min(size, max(1, math.ceil(density * size - 1e-9)))


def as_type_of(value: Any, like: Any) -> Any:
    """Return a tensor in the element type of another; a condition as 0/1."""
    return astype(value, get_dtype_name(like))


def binary_gumbel(logits: Any, noise: Any = None, temperature: float = 1.0) -> Any:
    """Return 1 where logits plus noise are above zero, else 0, with the gradient of their sigmoid.

    noise: logistic, of the shape of logits, or None.
    Source: Jang et al. 2017 for two classes; Verelst & Tuytelaars 2020.
    """
    shifted = logits if noise is None else logits + noise
    # The sigmoid by tanh, which every library has under this name and which does not overflow.
    soft = (do("tanh", shifted / (2 * temperature)) + 1) / 2
    hard = as_type_of(shifted > 0, logits)
    # The value is hard, the gradient that of soft: straight through without a function for autograd of each
    # framework.
    return soft + detached(hard - soft)


def detached(value: Any) -> Any:
    """Return a tensor through which no gradient goes."""
    return tensors_of(value).detach(value)


def convolve_3x3(x: Any, kernel: Any, stride: Sequence[int], layout: str) -> Any:
    """Return a 3x3 convolution to one channel, with padding 1: (N, height, width).

    x: (N, C, H, W) or (N, H, W, C), as the layout says.  kernel: (3, 3, C).
    """
    if layout.index("C") == 1:
        x = do("transpose", x, (0, 2, 3, 1))
    # One product and nine shifted sums: libraries name their convolutions differently, and a mask has one
    # channel.  (N, height, width, 9): what each element of the kernel adds, at the place that it reads.
    products = x @ do("transpose", do("reshape", kernel, (9, kernel.shape[-1])), (1, 0))
    products = do("pad", products, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = (int(products.shape[i]) - 2 for i in (1, 2))
    return sum(
        products[:, i : i + height : stride[0], j : j + width : stride[1], 3 * i + j]
        for i in range(3) for j in range(3)
    )  # fmt: skip


def needed_inputs(mask: Any, windows: Sequence[Window], size: Sequence[int]) -> Any:
    """Return 0/1 of the input positions that a convolution reads for the output positions in `mask`.

    mask: 0/1, (N, height, width), of the output.  size: of the input.  Returns (N, *size).
    """
    # A convolution of 1x1 reads what it writes, which most convolutions of a bottleneck are.
    if all(
        window.reach == window.stride == 1 and not any(window.pads(extent))
        for window, extent in zip(windows, size, strict=True)
    ):
        return mask
    rows, columns = (
        tensors_of(mask).cast(_read_matrix(window, extent, int(count)), mask)
        for window, extent, count in zip(windows, size, mask.shape[1:], strict=True)
    )
    # A dilation of the mask, axis by axis, as two products with 0/1 matrices; sums count how many outputs
    # read an input.
    return as_type_of(do("transpose", rows, (1, 0)) @ detached(mask) @ columns > 0.5, mask)


def _read_matrix(window: Window, size: int, count: int) -> Any:
    """Return (count, size), 1 where the window of an output reads an input, else 0."""
    is_read = window.positions(size, count)[:, :, None] == np.arange(size)
    return is_read.any(1).astype(np.float32)


def per_unit(values: Any, size: int) -> Any:
    """Return means over blocks of `size` along the last axis; the last block may be shorter.

    values: (..., T).  Returns (..., ceil(T / size)).
    """
    if size == 1:
        return values
    length = values.shape[-1]
    unit_means = [do("mean", values[..., start : start + size], axis=-1) for start in range(0, length, size)]
    return do("stack", unit_means, axis=-1)


def per_token(units: Any, size: int, length: int) -> Any:
    """Return each unit's value for each of its `size` tokens: (..., length)."""
    if size == 1:
        return units
    repeated = do("stack", [units] * size, axis=-1)
    return do("reshape", repeated, (*units.shape[:-1], units.shape[-1] * size))[..., :length]


def renormalised(probabilities: Any, keys: Any) -> Any:
    """Return a softmax over the kept keys alone.

    probabilities: (..., S), rows of sum 1.  keys: 0/1, broadcast against it.
    """
    masked = probabilities * keys
    return masked / _total(masked)


def _total(values: Any) -> Any:
    """Return the sum along the last axis as a divisor, 1 for a sum of 0."""
    total = do("sum", values, axis=-1, keepdims=True)
    # Rows whose tokens are all dropped stay 0 instead of NaN.
    return total + as_type_of(total == 0, total)


def budget_loss(
    macs_used: Sequence[Any], macs_dense: Sequence[Any], target: float, progress: float = 1.0
) -> Any:
    """Return the squared distance of the blocks' cost from the target share, and from relaxing bounds.

    macs_used, macs_dense: multiply-accumulates of each block.  progress: of the training, from 0, where the
    bounds of each block are the target, to 1, where there are no bounds.
    Source: Verelst & Tuytelaars 2020, with the annealing of their code.
    """
    # Bounds of each block fade out, since the budget of all blocks together is the aim in the end.
    strictness = math.cos(min(max(progress, 0.0), 1.0) * math.pi / 2) ** 2
    lower, upper = strictness * target, 1 - strictness * (1 - target)
    shares = [block_macs / block_total for block_macs, block_total in zip(macs_used, macs_dense, strict=True)]
    loss = (sum(macs_used) / sum(macs_dense) - target) ** 2
    for share in shares:
        shortfall = as_type_of(share < lower, share) * (lower - share)
        excess = as_type_of(share > upper, share) * (share - upper)
        loss = loss + (shortfall**2 + excess**2) / len(shares)
    return loss
