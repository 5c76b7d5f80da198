"""NumPy's reductions and sorting functions, recorded as nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import TracedArray
from ._registry import Axis, integers, records, refuse

_AXES_ARE_INPUT = {"ReduceSum": 13}
_AXES_INPUT_OPSET = 18
"""The opset from which the axes of all reductions are an input."""


def _record_reduction(op_type: str, a: TracedArray, axis: Axis, keepdims: Any) -> TracedArray:
    """Record a reduction, with its axes as an input or as an attribute, as the opset has them."""
    recorder = a.recorder
    keep = int(bool(keepdims) and keepdims is not np._NoValue)
    axes = None if axis is None else [axis] if isinstance(axis, int) else list(axis)
    if axes is None:
        return recorder.add(op_type, a, keepdims=keep)
    if not axes:
        return a
    if recorder.opset >= _AXES_ARE_INPUT.get(op_type, _AXES_INPUT_OPSET):
        return recorder.add(op_type, a, integers(recorder, axes), keepdims=keep)
    return recorder.add(op_type, a, axes=axes, keepdims=keep)


def _register_reduction(op_type: str, *functions: Any) -> None:
    """Register the recorder of a reduction that takes a dtype; NumPy's default dtype is found on a sample."""

    def record(
        a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: Any = False, **options: Any
    ) -> Any:
        refuse(functions[0].__name__, options)
        if dtype is None:
            # NumPy sums small integers in a larger type; a sample tells which.
            sample = functions[0](np.ones(1, a.dtype))
            dtype = sample.dtype
        return _record_reduction(op_type, a.astype(dtype), axis, keepdims)

    records(*functions)(record)


_register_reduction("ReduceSum", np.sum)
_register_reduction("ReduceProd", np.prod)
_register_reduction("ReduceMean", np.mean)


@records(np.max, np.amax)
def max_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record the largest element."""
    refuse("max", options)
    return _record_reduction("ReduceMax", a, axis, keepdims)


@records(np.min, np.amin)
def min_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record the smallest element."""
    refuse("min", options)
    return _record_reduction("ReduceMin", a, axis, keepdims)


@records(np.any)
def any_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record whether an element is true."""
    refuse("any", options)
    # ONNX has no reduction of booleans in older opsets.
    return _record_reduction("ReduceMax", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@records(np.all)
def all_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record whether every element is true."""
    refuse("all", options)
    return _record_reduction("ReduceMin", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@records(np.count_nonzero)
def count_nonzero(a: Any, axis: Axis = None, *, keepdims: Any = False) -> Any:
    """Record the number of elements that are not zero."""
    return np.sum(a != 0, axis, keepdims=keepdims)


@records(np.var)
def var(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: Any = False,
    **options: Any,
) -> Any:
    """Record the mean of the squared distances from the mean."""
    refuse("var", {**options, **({"ddof": ddof} if ddof else {})})
    # The two-pass formula, as in NumPy: the mean of squares would cancel.
    distance = a - np.mean(a, axis, keepdims=True)
    return np.mean(distance * distance, axis, keepdims=keepdims)


@records(np.std)
def std(a: Any, axis: Axis = None, **kwargs: Any) -> Any:
    """Record the root of the variance."""
    return np.sqrt(np.var(a, axis, **kwargs))


@records(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Axis = None, keepdims: Any = False) -> Any:
    """Record the root of the sum of squares, or for 1 the sum of magnitudes, for infinity the largest."""
    if ord in (None, 2):
        return np.sqrt(np.sum(x * x, axis, keepdims=keepdims))
    if ord == 1:
        return np.sum(np.abs(x), axis, keepdims=keepdims)
    if ord == np.inf:
        return np.max(np.abs(x), axis, keepdims=keepdims)
    raise NotTraceable(f"numpy.linalg.norm of order {ord}")


@records(np.cumsum)
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: None = None) -> Any:
    """Record the sums of the elements up to each."""
    if axis is None:
        a, axis = a.reshape(-1), 0
    summands = a if dtype is None else a.astype(dtype)
    return summands.recorder.add("CumSum", summands, summands.recorder.constant(np.int64(axis)))


@records(np.argmax)
def argmax(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Record the position of the first largest element."""
    return _record_arg("ArgMax", a, axis, keepdims)


@records(np.argmin)
def argmin(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Record the position of the first smallest element."""
    return _record_arg("ArgMin", a, axis, keepdims)


def _record_arg(op_type: str, a: Any, axis: int | None, keepdims: Any) -> TracedArray:
    """Record the positions of extreme elements; of the flat array where the axis is None."""
    if axis is None:
        a, axis = a.reshape(-1), 0
    keep = int(bool(keepdims) and keepdims is not np._NoValue)
    result: TracedArray = a.recorder.add(op_type, a, axis=axis, keepdims=keep)
    return result


@records(np.sort, np.partition)
def sort(a: Any, *args: Any, axis: int = -1, **kwargs: Any) -> Any:
    """Record the sorted elements, from the lowest; a partition is sorted, too."""
    return _record_sort(a, axis)[0]


@records(np.argsort, np.argpartition)
def argsort(a: Any, *args: Any, axis: int = -1, **kwargs: Any) -> Any:
    """Record the positions of the elements in sorted order."""
    return _record_sort(a, axis)[1]


def _record_sort(a: TracedArray, axis: int) -> list[TracedArray]:
    """Record a sort; return elements and positions."""
    length = a.shape[axis]
    if length is None:
        raise NotTraceable(f"it sorts along an axis of {a.shape} whose extent is known as it runs")
    count = integers(a.recorder, [length])
    return a.recorder.add_all("TopK", [a, count], 2, axis=axis, largest=0, sorted=1)
