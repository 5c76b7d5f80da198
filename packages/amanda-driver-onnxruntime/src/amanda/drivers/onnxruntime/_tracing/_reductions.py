"""NumPy's reductions, and its order of elements, as nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import TracedArray
from ._registry import Axis, integers, of, refuse

_AXES_ARE_INPUT = {"ReduceSum": 13}
_LATELY = 18
"""The opset from which the axes of all reductions are an input."""


def _reduce(op_type: str, a: TracedArray, axis: Axis, keepdims: Any) -> TracedArray:
    recorder = a.recorder
    keep = int(bool(keepdims) and keepdims is not np._NoValue)
    axes = None if axis is None else [axis] if isinstance(axis, int) else list(axis)
    if axes is None:
        return recorder.add(op_type, a, keepdims=keep)
    if not axes:
        return a
    if recorder.opset >= _AXES_ARE_INPUT.get(op_type, _LATELY):
        return recorder.add(op_type, a, integers(recorder, axes), keepdims=keep)
    return recorder.add(op_type, a, axes=axes, keepdims=keep)


def _reduction(op_type: str, *functions: Any) -> None:
    def record(
        a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: Any = False, **rest: Any
    ) -> Any:
        refuse(functions[0].__name__, rest)
        if dtype is None:
            sample = functions[0](np.ones(1, a.dtype))
            dtype = sample.dtype
        return _reduce(op_type, a.astype(dtype), axis, keepdims)

    of(*functions)(record)


_reduction("ReduceSum", np.sum)
_reduction("ReduceProd", np.prod)
_reduction("ReduceMean", np.mean)


@of(np.max, np.amax)
def max_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """The largest element."""
    refuse("max", rest)
    return _reduce("ReduceMax", a, axis, keepdims)


@of(np.min, np.amin)
def min_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """The smallest element."""
    refuse("min", rest)
    return _reduce("ReduceMin", a, axis, keepdims)


@of(np.any)
def any_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """Return True if an element is true."""
    refuse("any", rest)
    return _reduce("ReduceMax", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@of(np.all)
def all_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """Return True if every element is true."""
    refuse("all", rest)
    return _reduce("ReduceMin", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@of(np.count_nonzero)
def count_nonzero(a: Any, axis: Axis = None, *, keepdims: Any = False) -> Any:
    """Return how many elements are not zero."""
    return np.sum(a != 0, axis, keepdims=keepdims)


@of(np.var)
def var(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: Any = False,
    **rest: Any,
) -> Any:
    """The mean of the squared distances from the mean."""
    refuse("var", {**rest, **({"ddof": ddof} if ddof else {})})
    distance = a - np.mean(a, axis, keepdims=True)
    return np.mean(distance * distance, axis, keepdims=keepdims)


@of(np.std)
def std(a: Any, axis: Axis = None, **kwargs: Any) -> Any:
    """The root of the variance."""
    return np.sqrt(np.var(a, axis, **kwargs))


@of(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Axis = None, keepdims: Any = False) -> Any:
    """The root of the sum of squares, the sum of magnitudes for 1, the largest for infinity."""
    if ord in (None, 2):
        return np.sqrt(np.sum(x * x, axis, keepdims=keepdims))
    if ord == 1:
        return np.sum(np.abs(x), axis, keepdims=keepdims)
    if ord == np.inf:
        return np.max(np.abs(x), axis, keepdims=keepdims)
    raise NotTraceable(f"numpy.linalg.norm of order {ord}")


@of(np.cumsum)
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: None = None) -> Any:
    """Sums of the elements up to each."""
    if axis is None:
        a, axis = a.reshape(-1), 0
    made = a if dtype is None else a.astype(dtype)
    return made.recorder.add("CumSum", made, made.recorder.constant(np.int64(axis)))


@of(np.argmax)
def argmax(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Return where the first largest element is."""
    return _arg("ArgMax", a, axis, keepdims)


@of(np.argmin)
def argmin(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Return where the first smallest element is."""
    return _arg("ArgMin", a, axis, keepdims)


def _arg(op_type: str, a: Any, axis: int | None, keepdims: Any) -> TracedArray:
    if axis is None:
        a, axis = a.reshape(-1), 0
    keep = int(bool(keepdims) and keepdims is not np._NoValue)
    made: TracedArray = a.recorder.add(op_type, a, axis=axis, keepdims=keep)
    return made


@of(np.sort, np.partition)
def sort(a: Any, *args: Any, axis: int = -1, **kwargs: Any) -> Any:
    """From the lowest; a partition is sorted too."""
    return _ordered(a, axis)[0]


@of(np.argsort, np.argpartition)
def argsort(a: Any, *args: Any, axis: int = -1, **kwargs: Any) -> Any:
    """The positions of the elements from the lowest."""
    return _ordered(a, axis)[1]


def _ordered(a: TracedArray, axis: int) -> list[TracedArray]:
    length = a.shape[axis]
    if length is None:
        raise NotTraceable(f"it sorts along an axis of {a.shape} whose extent is known as it runs")
    count = integers(a.recorder, [length])
    return a.recorder.add_all("TopK", [a, count], 2, axis=axis, largest=0, sorted=1)
