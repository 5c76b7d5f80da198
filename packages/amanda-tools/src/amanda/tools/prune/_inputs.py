"""Inputs that a weight multiplies, as rows of a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import tensors_of, windows_of
from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import FACTORS, spatial_axes
from amanda.tools.prune._arrays import Array
from amanda.tools.weights import WeightInput

_TURNED = ("transA", "transpose_a", "adj_x", "transB", "transpose_b", "adj_y")


class Reading(NamedTuple):
    """Where an op has the input that its weight multiplies.

    position: among the op's inputs.  axis: the one that a product sums over.
    layout: axes of a convolution's input, such as "NCHW"; None of a product.  attributes: of the op.
    """

    position: int
    axis: int
    layout: str | None
    attributes: Mapping[str, Any]


def unread(type: str, layout: str | None) -> str | None:
    """Return why the inputs of an op's weight are not read; None where they are."""
    if layout is None:
        return "which of its axes are outputs and inputs is not known"
    if type.startswith("conv_transpose") or type == "bilinear":
        return f"the inputs that {type} multiplies by it are not followed"
    return None


def reading_of(context: amanda.OpContext, read: WeightInput) -> Reading | None:
    """Return where the input is; None for a product of transposed factors, and for an unknown layout."""
    kind, attributes = context["type"], context.get_attrs()
    if kind != "linear" and kind not in FACTORS:
        layout: str | None = context["layout"]
        return None if layout is None else Reading(0, 1, layout, attributes)
    first, second = FACTORS.get(kind, (0, 1))
    index = second if read.index == first else first
    if "dimension_numbers" in attributes:  # JAX sums over any axis
        return Reading(index, attributes["dimension_numbers"][0][index][0], None, attributes)
    if any(attributes.get(name) for name in _TURNED):
        return None
    return Reading(index, -1 if index == first else -2, None, attributes)


def rows_of(x: Any, reading: Reading, extents: Sequence[int]) -> Array:
    """Return the inputs as a matrix for each group of a convolution: (groups, positions, inputs * window).

    extents: of the weight, (outputs, inputs, window).
    """
    plain = tensors_of(x).plain(x)
    if reading.layout is None:
        return do("reshape", do("moveaxis", plain, reading.axis, -1), (1, -1, extents[1]))
    layout = reading.layout if "N" in reading.layout else f"N{reading.layout}"
    plain = plain if len(shape(plain)) == len(layout) else plain[None]
    plain = do("transpose", plain, (layout.index("N"), layout.index("C"), *spatial_axes(layout)))
    _, channels, *sizes = shape(plain)
    for window, size in zip(windows_of(reading.attributes, layout, extents[2:]), sizes, strict=True):
        places = window.positions(size, window.places(size))
        inside = tensors_of(plain).cast((places >= 0) & (places < size), plain)
        taken = tensors_of(plain).beside(np.clip(places, 0, size - 1), plain)
        plain = do("moveaxis", plain, 2, -1)[..., taken] * inside
    rank = len(sizes)
    order = (0, *range(2, 2 + 2 * rank, 2), 1, *range(3, 3 + 2 * rank, 2))
    groups = channels // extents[1]
    rows = do("reshape", do("transpose", plain, order), (-1, groups, prod(extents[1:])))
    return do("moveaxis", rows, 1, 0)


def squares(rows: Array) -> Array:
    """Return the sum of squares of each input over all positions: (groups, inputs * window)."""
    return (rows**2).sum(1)


def products(rows: Array) -> Array:
    """Return the sum of products of each pair of inputs: (groups, inputs * window, inputs * window)."""
    return do("matmul", do("moveaxis", rows, 1, 2), rows)
