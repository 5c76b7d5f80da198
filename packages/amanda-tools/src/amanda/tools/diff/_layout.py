"""The same numbers in another order of axes: NCHW and NHWC, OIHW and HWIO."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


def arranged(
    array: NDArray[Any], layout: str | None, shape: tuple[int, ...], wanted: str | None
) -> Iterator[NDArray[Any]]:
    """An array as one of another shape and layout; where layouts are not known, in each likely way."""
    if layout and wanted and len(layout) == array.ndim and len(wanted) == len(shape):
        turned = _turned(array, layout, shape, wanted)
        if turned is not None and turned.size == prod(shape):
            yield turned.reshape(shape)
            return
    if array.shape == shape:
        yield array
    if array.ndim >= 3 and array.ndim == len(shape):
        for moved in (np.moveaxis(array, -1, 1), np.moveaxis(array, 1, -1)):
            if moved.shape == shape and (array.ndim > 3 or array.shape != shape):
                yield moved
    if array.shape != shape and array.size == prod(shape) and _is_folded(array.shape, shape):
        yield array.reshape(shape)


def _turned(array: NDArray[Any], layout: str, shape: tuple[int, ...], wanted: str) -> NDArray[Any] | None:
    """Axes in the wanted order.

    A depthwise kernel has either one axis O of outputs, numbered by input, or the axes I and M.
    """
    if sorted(layout) == sorted(wanted):
        return np.transpose(array, [layout.index(axis) for axis in wanted])
    if "M" in layout and "O" in wanted:
        spatial = [layout.index(axis) for axis in wanted if axis not in "OI"]
        return np.transpose(array, [layout.index("I"), layout.index("M"), *spatial])
    if "M" in wanted and layout.startswith("OI"):
        split = (shape[wanted.index("I")], shape[wanted.index("M")], *array.shape[2:])
        if array.size != prod(split):
            return None
        axes = ["IM".index(axis) if axis in "IM" else layout.index(axis) for axis in wanted]
        return np.transpose(array.reshape(split), axes)
    return None


def _is_folded(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether shapes differ in how leading axes are split, or by extents of 1."""
    if [n for n in one if n != 1] == [n for n in other if n != 1]:
        return True
    return bool(one) and bool(other) and one[-1] == other[-1]
