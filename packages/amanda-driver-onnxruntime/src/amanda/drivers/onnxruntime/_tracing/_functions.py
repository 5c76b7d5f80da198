"""NumPy's functions of whole arrays, recorded as nodes: all of them, with reductions and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from . import _reductions as _reductions
from . import _shapes as _shapes
from ._array import TracedArray
from ._registry import FUNCTIONS, as_traced, recorder_of, records, refuse

__all__ = ["FUNCTIONS"]


@records(np.where)
def where(condition: Any, x: Any, y: Any) -> Any:
    """Record `x` where the condition holds, and `y` elsewhere."""
    recorder = recorder_of(condition, x, y)
    samples = [
        operand if isinstance(operand, (bool, int, float)) else np.empty(0, operand.dtype)
        for operand in (x, y)
    ]
    dtype = np.result_type(*samples)
    operands = [
        operand.astype(dtype)
        if isinstance(operand, TracedArray)
        else recorder.constant(np.asarray(operand, dtype))
        for operand in (x, y)
    ]
    return recorder.add("Where", as_traced(recorder, condition).astype(bool), *operands)


@records(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, **kwargs: Any) -> Any:
    """Record values clipped to two bounds, either of which may be None."""
    low, high = kwargs.pop("min", a_min), kwargs.pop("max", a_max)
    refuse("clip", kwargs)
    clipped = a if low is None else np.maximum(a, low)
    return clipped if high is None else np.minimum(clipped, high)


@records(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: None = None) -> Any:
    """Record rounding to a number of decimals, half to even."""
    return np.rint(a) if not decimals else np.rint(a * 10.0**decimals) / 10.0**decimals


@records(np.zeros_like)
def zeros_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Record zeros in the shape of an array."""
    return np.full_like(a, 0, dtype)


@records(np.ones_like)
def ones_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Record ones in the shape of an array."""
    return np.full_like(a, 1, dtype)


@records(np.full_like)
def full_like(a: Any, fill_value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Record a number in the shape of an array."""
    recorder = recorder_of(a, fill_value)
    value = recorder.constant(np.asarray(fill_value, dtype or a.dtype))
    return recorder.add("Expand", value, recorder.add("Shape", a))


@records(np.copy)
def copy(a: Any, **kwargs: Any) -> Any:
    """Return the array itself, which nothing writes into."""
    return a


@records(np.dot)
def dot(a: Any, b: Any, out: None = None) -> Any:
    """Record the product of vectors and matrices."""
    if max(a.ndim, b.ndim) > 2:
        raise NotTraceable("numpy.dot of more than two axes; numpy.matmul has a counterpart")
    return np.matmul(a, b) if a.ndim and b.ndim else a * b
