"""NumPy's functions that rearrange elements, recorded as nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._registry import Axis, as_traced, integers, recorder_of, records, refuse


@records(np.shape)
def shape(a: Any) -> Any:
    """Return the extents."""
    return a.shape


@records(np.ndim)
def ndim(a: Any) -> int:
    """Return the number of axes."""
    return int(a.ndim)


@records(np.size)
def size(a: Any, axis: int | None = None) -> Any:
    """Return the number of elements, or the extent of an axis."""
    return a.size if axis is None else a.shape[axis]


@records(np.reshape)
def reshape(a: Any, *shape: Any, **kwargs: Any) -> Any:
    """Record an array in another shape; one extent may be -1."""
    target = kwargs.pop("shape", kwargs.pop("newshape", shape[0] if shape else None))
    kwargs.pop("order", None)
    refuse("reshape", kwargs)
    extents = [target] if isinstance(target, (int, np.integer)) else list(target)
    if None in extents:
        raise NotTraceable(f"it reshapes to {extents}, of which some are known as it runs")
    zeros = {"allowzero": 1} if a.recorder.opset >= 14 else {}  # without it, 0 means "as before"
    return a.recorder.add("Reshape", a, integers(a.recorder, extents), **zeros)


@records(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """Record an array with a single axis."""
    return a.reshape(-1)


@records(np.transpose)
def transpose(a: Any, axes: Any = None) -> Any:
    """Record an array with its axes in another order, by default in reverse."""
    order = range(a.ndim)[::-1] if axes is None else [axis % a.ndim for axis in axes]
    return a.recorder.add("Transpose", a, perm=list(order))


@records(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Record an array with two axes exchanged."""
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return np.transpose(a, order)


@records(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """Record an array with some axes at other positions."""
    # NumPy moves the axes of an array whose extents are their numbers.
    numbered = np.moveaxis(np.empty(tuple(range(a.ndim))), source, destination)
    return np.transpose(a, numbered.shape)


@records(np.squeeze)
def squeeze(a: Any, axis: Axis = None) -> Any:
    """Record an array without axes of extent 1."""
    if axis is None and None in a.shape:
        raise NotTraceable(f"it squeezes a value of shape {a.shape} without naming axes")
    axes = [i for i, extent in enumerate(a.shape) if extent == 1] if axis is None else axis
    return a.recorder.add("Squeeze", a, integers(a.recorder, axes)) if axes != [] else a


@records(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """Record an array with new axes of extent 1."""
    return a.recorder.add("Unsqueeze", a, integers(a.recorder, axis))


@records(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    """Record an array broadcast to a shape."""
    return array.recorder.add("Expand", array, integers(array.recorder, shape))


@records(np.concatenate)
def concatenate(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """Record arrays joined along an axis."""
    refuse("concatenate", kwargs)
    recorder = recorder_of(*arrays)
    dtype = np.result_type(*(array.dtype for array in arrays))
    return recorder.add("Concat", *(as_traced(recorder, array).astype(dtype) for array in arrays), axis=axis)


@records(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """Record arrays joined along a new axis."""
    recorder = recorder_of(*arrays)
    return np.concatenate(
        [np.expand_dims(as_traced(recorder, array), axis) for array in arrays], axis, **kwargs
    )


@records(np.take)
def take(a: Any, indices: Any, axis: int | None = None, **kwargs: Any) -> Any:
    """Record the elements at indices along an axis."""
    refuse("take", kwargs)
    recorder = recorder_of(a, indices)
    array = as_traced(recorder, a)
    if axis is None:
        array, axis = array.reshape(-1), 0
    return recorder.add("Gather", array, as_traced(recorder, indices).astype(np.int64), axis=axis)
