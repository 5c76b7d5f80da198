"""NumPy's functions that put elements in another shape or place, as nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._registry import Axis, integers, of, recorder_of, refuse, traced


@of(np.shape)
def shape(a: Any) -> Any:
    """Extents."""
    return a.shape


@of(np.ndim)
def ndim(a: Any) -> int:
    """Return how many axes there are."""
    return int(a.ndim)


@of(np.size)
def size(a: Any, axis: int | None = None) -> Any:
    """Return how many elements there are."""
    return a.size if axis is None else a.shape[axis]


@of(np.reshape)
def reshape(a: Any, *shape: Any, **kwargs: Any) -> Any:
    """In another shape; one extent may be -1."""
    wanted = kwargs.pop("shape", kwargs.pop("newshape", shape[0] if shape else None))
    kwargs.pop("order", None)
    refuse("reshape", kwargs)
    extents = [wanted] if isinstance(wanted, (int, np.integer)) else list(wanted)
    if None in extents:
        raise NotTraceable(f"it reshapes to {extents}, of which some are known as it runs")
    zeros = {"allowzero": 1} if a.recorder.opset >= 14 else {}  # otherwise 0 would keep an extent
    return a.recorder.add("Reshape", a, integers(a.recorder, extents), **zeros)


@of(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """In one row."""
    return a.reshape(-1)


@of(np.transpose)
def transpose(a: Any, axes: Any = None) -> Any:
    """With its axes in another order, by default in reverse."""
    order = range(a.ndim)[::-1] if axes is None else [axis % a.ndim for axis in axes]
    return a.recorder.add("Transpose", a, perm=list(order))


@of(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """With two axes exchanged."""
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return np.transpose(a, order)


@of(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """With some axes elsewhere."""
    numbered = np.moveaxis(np.empty(tuple(range(a.ndim))), source, destination)
    return np.transpose(a, numbered.shape)


@of(np.squeeze)
def squeeze(a: Any, axis: Axis = None) -> Any:
    """Without axes of extent 1."""
    if axis is None and None in a.shape:
        raise NotTraceable(f"it squeezes a value of shape {a.shape} without naming axes")
    axes = [i for i, extent in enumerate(a.shape) if extent == 1] if axis is None else axis
    return a.recorder.add("Squeeze", a, integers(a.recorder, axes)) if axes != [] else a


@of(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """With new axes of extent 1."""
    return a.recorder.add("Unsqueeze", a, integers(a.recorder, axis))


@of(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    """Repeated into a shape."""
    return array.recorder.add("Expand", array, integers(array.recorder, shape))


@of(np.concatenate)
def concatenate(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """One after another along an axis."""
    refuse("concatenate", kwargs)
    recorder = recorder_of(*arrays)
    dtype = np.result_type(*(one.dtype for one in arrays))
    return recorder.add("Concat", *(traced(recorder, one).astype(dtype) for one in arrays), axis=axis)


@of(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """One after another along a new axis."""
    recorder = recorder_of(*arrays)
    return np.concatenate([np.expand_dims(traced(recorder, one), axis) for one in arrays], axis, **kwargs)


@of(np.take)
def take(a: Any, indices: Any, axis: int | None = None, **kwargs: Any) -> Any:
    """Elements at indices along an axis."""
    refuse("take", kwargs)
    recorder = recorder_of(a, indices)
    array = traced(recorder, a)
    if axis is None:
        array, axis = array.reshape(-1), 0
    return recorder.add("Gather", array, traced(recorder, indices).astype(np.int64), axis=axis)
