"""NumPy's functions of whole arrays as nodes: those of its reductions and shapes, and the others here."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from . import _reductions as _reductions
from . import _shapes as _shapes
from ._array import TracedArray
from ._registry import FUNCTIONS, of, recorder_of, refuse, traced

__all__ = ["FUNCTIONS"]


@of(np.where)
def where(condition: Any, x: Any, y: Any) -> Any:
    """Return where the condition holds `x`, elsewhere `y`."""
    recorder = recorder_of(condition, x, y)
    samples = [one if isinstance(one, (bool, int, float)) else np.empty(0, one.dtype) for one in (x, y)]
    dtype = np.result_type(*samples)
    chosen = [one.astype(dtype) if isinstance(one, TracedArray) else recorder.constant(np.asarray(one, dtype))
              for one in (x, y)]  # fmt: skip
    return recorder.add("Where", traced(recorder, condition).astype(bool), *chosen)


@of(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, **kwargs: Any) -> Any:
    """Between two bounds, either of which may be None."""
    low, high = kwargs.pop("min", a_min), kwargs.pop("max", a_max)
    refuse("clip", kwargs)
    made = a if low is None else np.maximum(a, low)
    return made if high is None else np.minimum(made, high)


@of(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: None = None) -> Any:
    """To so many decimals, half to even."""
    return np.rint(a) if not decimals else np.rint(a * 10.0**decimals) / 10.0**decimals


@of(np.zeros_like)
def zeros_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Zeros in the shape of an array."""
    return np.full_like(a, 0, dtype)


@of(np.ones_like)
def ones_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Ones in the shape of an array."""
    return np.full_like(a, 1, dtype)


@of(np.full_like)
def full_like(a: Any, fill_value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """One number in the shape of an array."""
    recorder = recorder_of(a, fill_value)
    value = recorder.constant(np.asarray(fill_value, dtype or a.dtype))
    return recorder.add("Expand", value, recorder.add("Shape", a))


@of(np.copy)
def copy(a: Any, **kwargs: Any) -> Any:
    """Itself: nothing writes into it."""
    return a


@of(np.dot)
def dot(a: Any, b: Any, out: None = None) -> Any:
    """The product of vectors and matrices."""
    if max(a.ndim, b.ndim) > 2:
        raise NotTraceable("numpy.dot of more than two axes; numpy.matmul has a counterpart")
    return np.matmul(a, b) if a.ndim and b.ndim else a * b
