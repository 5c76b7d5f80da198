"""NumPy's functions of whole arrays as nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._array import TracedArray
from ._recorder import NotTraceable, Recorder

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""By the function of NumPy, what records it."""

Axis = int | Sequence[int] | None
_AXES_ARE_INPUT = {"ReduceSum": 13}
_LATELY = 18
"""The opset from which the axes of all reductions are an input."""


def _of(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(record: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, record))
        return record

    return register


def _recorder(*values: Any) -> Recorder:
    return next(one.recorder for one in values if isinstance(one, TracedArray))


def _traced(recorder: Recorder, value: Any) -> TracedArray:
    return value if isinstance(value, TracedArray) else recorder.constant(np.asarray(value))


def _integers(recorder: Recorder, values: Any) -> TracedArray:
    return recorder.constant(np.array(values, np.int64).reshape(-1))


# ---- choosing ----


@_of(np.where)
def where(condition: Any, x: Any, y: Any) -> Any:
    """Where the condition holds `x`, elsewhere `y`."""
    recorder = _recorder(condition, x, y)
    samples = [one if isinstance(one, (bool, int, float)) else np.empty(0, one.dtype) for one in (x, y)]
    dtype = np.result_type(*samples)
    chosen = [one.astype(dtype) if isinstance(one, TracedArray) else recorder.constant(np.asarray(one, dtype))
              for one in (x, y)]  # fmt: skip
    return recorder.add("Where", _traced(recorder, condition).astype(bool), *chosen)


@_of(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, **kwargs: Any) -> Any:
    """Between two bounds, either of which may be None."""
    low, high = kwargs.pop("min", a_min), kwargs.pop("max", a_max)
    _refuse("clip", kwargs)
    made = a if low is None else np.maximum(a, low)
    return made if high is None else np.minimum(made, high)


@_of(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: None = None) -> Any:
    """To so many decimals, half to even."""
    return np.rint(a) if not decimals else np.rint(a * 10.0**decimals) / 10.0**decimals


# ---- reductions ----


def _reduce(op_type: str, a: TracedArray, axis: Axis, keepdims: Any) -> TracedArray:
    recorder = a.recorder
    keep = int(bool(keepdims) and keepdims is not np._NoValue)
    axes = None if axis is None else [axis] if isinstance(axis, int) else list(axis)
    if axes is None:
        return recorder.add(op_type, a, keepdims=keep)
    if not axes:
        return a
    if recorder.opset >= _AXES_ARE_INPUT.get(op_type, _LATELY):
        return recorder.add(op_type, a, _integers(recorder, axes), keepdims=keep)
    return recorder.add(op_type, a, axes=axes, keepdims=keep)


def _reduction(op_type: str, *functions: Any) -> None:
    def record(
        a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: Any = False, **rest: Any
    ) -> Any:
        _refuse(functions[0].__name__, rest)
        if dtype is None:
            sample = functions[0](np.ones(1, a.dtype))
            dtype = sample.dtype
        return _reduce(op_type, a.astype(dtype), axis, keepdims)

    _of(*functions)(record)


_reduction("ReduceSum", np.sum)
_reduction("ReduceProd", np.prod)
_reduction("ReduceMean", np.mean)


@_of(np.max, np.amax)
def max_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """The largest element."""
    _refuse("max", rest)
    return _reduce("ReduceMax", a, axis, keepdims)


@_of(np.min, np.amin)
def min_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """The smallest element."""
    _refuse("min", rest)
    return _reduce("ReduceMin", a, axis, keepdims)


@_of(np.any)
def any_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """Whether an element is true."""
    _refuse("any", rest)
    return _reduce("ReduceMax", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@_of(np.all)
def all_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **rest: Any) -> Any:
    """Whether every element is true."""
    _refuse("all", rest)
    return _reduce("ReduceMin", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@_of(np.count_nonzero)
def count_nonzero(a: Any, axis: Axis = None, *, keepdims: Any = False) -> Any:
    """How many elements are not zero."""
    return np.sum(a != 0, axis, keepdims=keepdims)


@_of(np.var)
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
    _refuse("var", {**rest, **({"ddof": ddof} if ddof else {})})
    distance = a - np.mean(a, axis, keepdims=True)
    return np.mean(distance * distance, axis, keepdims=keepdims)


@_of(np.std)
def std(a: Any, axis: Axis = None, **kwargs: Any) -> Any:
    """The root of the variance."""
    return np.sqrt(np.var(a, axis, **kwargs))


@_of(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Axis = None, keepdims: Any = False) -> Any:
    """The root of the sum of squares, the sum of magnitudes for 1, the largest for infinity."""
    if ord in (None, 2):
        return np.sqrt(np.sum(x * x, axis, keepdims=keepdims))
    if ord == 1:
        return np.sum(np.abs(x), axis, keepdims=keepdims)
    if ord == np.inf:
        return np.max(np.abs(x), axis, keepdims=keepdims)
    raise NotTraceable(f"numpy.linalg.norm of order {ord}")


@_of(np.cumsum)
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: None = None) -> Any:
    """Sums of the elements up to each."""
    if axis is None:
        a, axis = a.reshape(-1), 0
    made = a if dtype is None else a.astype(dtype)
    return made.recorder.add("CumSum", made, made.recorder.constant(np.int64(axis)))


# ---- order ----


@_of(np.argmax)
def argmax(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Where the first largest element is."""
    return _arg("ArgMax", a, axis, keepdims)


@_of(np.argmin)
def argmin(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Where the first smallest element is."""
    return _arg("ArgMin", a, axis, keepdims)


def _arg(op_type: str, a: Any, axis: int | None, keepdims: Any) -> TracedArray:
    if axis is None:
        a, axis = a.reshape(-1), 0
    keep = int(bool(keepdims) and keepdims is not np._NoValue)
    made: TracedArray = a.recorder.add(op_type, a, axis=axis, keepdims=keep)
    return made


@_of(np.sort, np.partition)
def sort(a: Any, *args: Any, axis: int = -1, **kwargs: Any) -> Any:
    """From the lowest; a partition is sorted too."""
    return _ordered(a, axis)[0]


@_of(np.argsort, np.argpartition)
def argsort(a: Any, *args: Any, axis: int = -1, **kwargs: Any) -> Any:
    """The positions of the elements from the lowest."""
    return _ordered(a, axis)[1]


def _ordered(a: TracedArray, axis: int) -> list[TracedArray]:
    length = a.shape[axis]
    if length is None:
        raise NotTraceable(f"it sorts along an axis of {a.shape} whose extent is known as it runs")
    count = _integers(a.recorder, [length])
    return a.recorder.add_all("TopK", [a, count], 2, axis=axis, largest=0, sorted=1)


# ---- shapes ----


@_of(np.shape)
def shape(a: Any) -> Any:
    """Extents."""
    return a.shape


@_of(np.ndim)
def ndim(a: Any) -> int:
    """How many axes there are."""
    return int(a.ndim)


@_of(np.size)
def size(a: Any, axis: int | None = None) -> Any:
    """How many elements there are."""
    return a.size if axis is None else a.shape[axis]


@_of(np.reshape)
def reshape(a: Any, *shape: Any, **kwargs: Any) -> Any:
    """In another shape; one extent may be -1."""
    wanted = kwargs.pop("shape", kwargs.pop("newshape", shape[0] if shape else None))
    kwargs.pop("order", None)
    _refuse("reshape", kwargs)
    extents = [wanted] if isinstance(wanted, (int, np.integer)) else list(wanted)
    if None in extents:
        raise NotTraceable(f"it reshapes to {extents}, of which some are known as it runs")
    zeros = {"allowzero": 1} if a.recorder.opset >= 14 else {}  # otherwise 0 would keep an extent
    return a.recorder.add("Reshape", a, _integers(a.recorder, extents), **zeros)


@_of(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """In one row."""
    return a.reshape(-1)


@_of(np.transpose)
def transpose(a: Any, axes: Any = None) -> Any:
    """With its axes in another order, by default in reverse."""
    order = range(a.ndim)[::-1] if axes is None else [axis % a.ndim for axis in axes]
    return a.recorder.add("Transpose", a, perm=list(order))


@_of(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """With two axes exchanged."""
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return np.transpose(a, order)


@_of(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """With some axes elsewhere."""
    numbered = np.moveaxis(np.empty(tuple(range(a.ndim))), source, destination)
    return np.transpose(a, numbered.shape)


@_of(np.squeeze)
def squeeze(a: Any, axis: Axis = None) -> Any:
    """Without axes of extent 1."""
    if axis is None and None in a.shape:
        raise NotTraceable(f"it squeezes a value of shape {a.shape} without naming axes")
    axes = [i for i, extent in enumerate(a.shape) if extent == 1] if axis is None else axis
    return a.recorder.add("Squeeze", a, _integers(a.recorder, axes)) if axes != [] else a


@_of(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """With new axes of extent 1."""
    return a.recorder.add("Unsqueeze", a, _integers(a.recorder, axis))


@_of(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    """Repeated into a shape."""
    return array.recorder.add("Expand", array, _integers(array.recorder, shape))


@_of(np.concatenate)
def concatenate(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """One after another along an axis."""
    _refuse("concatenate", kwargs)
    recorder = _recorder(*arrays)
    dtype = np.result_type(*(one.dtype for one in arrays))
    return recorder.add("Concat", *(_traced(recorder, one).astype(dtype) for one in arrays), axis=axis)


@_of(np.stack)
def stack(arrays: Sequence[Any], axis: int = 0, **kwargs: Any) -> Any:
    """One after another along a new axis."""
    recorder = _recorder(*arrays)
    return np.concatenate([np.expand_dims(_traced(recorder, one), axis) for one in arrays], axis, **kwargs)


@_of(np.take)
def take(a: Any, indices: Any, axis: int | None = None, **kwargs: Any) -> Any:
    """Elements at indices along an axis."""
    _refuse("take", kwargs)
    recorder = _recorder(a, indices)
    array = _traced(recorder, a)
    if axis is None:
        array, axis = array.reshape(-1), 0
    return recorder.add("Gather", array, _traced(recorder, indices).astype(np.int64), axis=axis)


# ---- filled and multiplied ----


@_of(np.zeros_like)
def zeros_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Zeros in the shape of an array."""
    return np.full_like(a, 0, dtype)


@_of(np.ones_like)
def ones_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Ones in the shape of an array."""
    return np.full_like(a, 1, dtype)


@_of(np.full_like)
def full_like(a: Any, fill_value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """One number in the shape of an array."""
    recorder = _recorder(a, fill_value)
    value = recorder.constant(np.asarray(fill_value, dtype or a.dtype))
    return recorder.add("Expand", value, recorder.add("Shape", a))


@_of(np.copy)
def copy(a: Any, **kwargs: Any) -> Any:
    """Itself: nothing writes into it."""
    return a


@_of(np.dot)
def dot(a: Any, b: Any, out: None = None) -> Any:
    """The product of vectors and matrices."""
    if max(a.ndim, b.ndim) > 2:
        raise NotTraceable("numpy.dot of more than two axes; numpy.matmul has a counterpart")
    return np.matmul(a, b) if a.ndim and b.ndim else a * b


def _refuse(name: str, options: dict[str, Any]) -> None:
    given = [key for key, value in options.items() if value is not None and value is not np._NoValue]
    if given:
        raise NotTraceable(f"numpy.{name} with {', '.join(given)}")
