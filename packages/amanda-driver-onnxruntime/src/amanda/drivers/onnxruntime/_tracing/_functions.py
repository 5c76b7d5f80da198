"""NumPy's functions, recorded as nodes: of whole arrays, of shapes, reductions and sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import NodeRecorder, TracedArray

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""By a function of NumPy, the function that records it."""

Axis = int | Sequence[int] | None


def records(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the recorder of these functions of NumPy."""

    def register(record: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, record))
        return record

    return register


def recorder_of(*values: Any) -> NodeRecorder:
    """Return the recorder of the first traced array."""
    return next(value.recorder for value in values if isinstance(value, TracedArray))


def as_traced(recorder: NodeRecorder, value: Any) -> TracedArray:
    """Return a traced array, or another value as a traced constant."""
    return value if isinstance(value, TracedArray) else recorder.constant(np.asarray(value))


def integers(recorder: NodeRecorder, values: Any) -> TracedArray:
    """Return extents, axes or positions as a traced constant."""
    return recorder.constant(np.array(values, np.int64).reshape(-1))


def refuse_options(name: str, options: dict[str, Any]) -> None:
    """Raise NotTraceable for options without a counterpart in ONNX."""
    names = [key for key, value in options.items() if value is not None and value is not np._NoValue]
    if names:
        raise NotTraceable(f"numpy.{name} with {', '.join(names)}")


LAYOUT_OPTIONS = ("order", "subok", "device")
"""Options of NumPy for how a result lies in memory: an array in a graph has no layout."""

__all__ = ["FUNCTIONS"]


@records(np.where)
def where(condition: Any, x: Any, y: Any) -> Any:
    """Record `x` where the condition holds, and `y` elsewhere."""
    recorder = recorder_of(condition, x, y)
    # Python numbers stay numbers, which in NumPy's promotion do not widen the type of an array.
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
    refuse_options("clip", kwargs)
    values = a if low is None else np.maximum(a, low)
    return values if high is None else np.minimum(values, high)


@records(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: None = None) -> Any:
    """Record rounding to a number of decimals, half to even."""
    refuse_options("round", {"out": out})
    return np.rint(a) if not decimals else np.rint(a * 10.0**decimals) / 10.0**decimals


@records(np.zeros_like)
def zeros_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Record zeros in the shape of an array."""
    return np.full_like(a, 0, dtype, **kwargs)


@records(np.ones_like)
def ones_like(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Record ones in the shape of an array."""
    return np.full_like(a, 1, dtype, **kwargs)


@records(np.full_like)
def full_like(a: Any, fill_value: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Record a number in the shape of an array; NotTraceable for a shape of its own."""
    refuse_options("full_like", {name: value for name, value in kwargs.items() if name not in LAYOUT_OPTIONS})
    recorder = recorder_of(a, fill_value)
    value = recorder.constant(np.asarray(fill_value, dtype or a.dtype))
    # The shape is read at execution, so that an array of unknown extents works, too.
    return recorder.add("Expand", value, recorder.add("Shape", a))


@records(np.copy)
def copy(a: Any, **kwargs: Any) -> Any:
    """Return the array itself, which nothing writes into."""
    return a


@records(np.dot)
def dot(a: Any, b: Any, out: None = None) -> Any:
    """Record the product of vectors and matrices; NotTraceable for more than two axes."""
    refuse_options("dot", {"out": out})
    if max(a.ndim, b.ndim) > 2:
        raise NotTraceable("numpy.dot of more than two axes; numpy.matmul has a counterpart")
    return np.matmul(a, b) if a.ndim and b.ndim else a * b


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
    """Record an array in another shape; one extent may be -1.

    Raises NotTraceable for an unknown extent, and for the order of columns.
    """
    target_shape = shape[0] if shape else None
    # NumPy has called the keyword `newshape` before version 2.1.
    target_shape = kwargs.pop("newshape", target_shape)
    target_shape = kwargs.pop("shape", target_shape)
    _require_row_major("reshape", kwargs.pop("order", "C"))
    kwargs.pop("copy", None)
    refuse_options("reshape", kwargs)
    extents = [target_shape] if isinstance(target_shape, (int, np.integer)) else list(target_shape)
    if None in extents:
        raise NotTraceable(f"it reshapes to {extents}, of which some are known as it runs")
    zero_option = {"allowzero": 1} if a.recorder.opset >= 14 else {}  # without it, 0 means "as before"
    return a.recorder.add("Reshape", a, integers(a.recorder, extents), **zero_option)


@records(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """Record an array with a single axis; NotTraceable for the order of columns."""
    _require_row_major("ravel", order)
    return a.reshape(-1)


def _require_row_major(name: str, order: str | None) -> None:
    """Raise NotTraceable for elements in the order of columns, which no operator of ONNX has."""
    if order not in (None, "C", "A", "K"):
        raise NotTraceable(f"numpy.{name} with order={order!r}")


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
    """Record an array without axes of extent 1; without `axis`, NotTraceable for an unknown extent."""
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
    refuse_options("concatenate", kwargs)
    recorder = recorder_of(*arrays)
    # Concat of ONNX takes arrays of one type, while NumPy promotes.
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
    """Record the elements at indices along an axis, by default of the flat array."""
    refuse_options("take", kwargs)
    recorder = recorder_of(a, indices)
    array = as_traced(recorder, a)
    if axis is None:
        array, axis = array.reshape(-1), 0
    return recorder.add("Gather", array, as_traced(recorder, indices).astype(np.int64), axis=axis)


# ONNX moved the axes from an attribute to an input: for ReduceSum five opsets before the other reductions.
_AXES_ARE_INPUT = {"ReduceSum": 13}
_AXES_INPUT_OPSET = 18
"""The opset from which the axes of all reductions are an input."""


def _record_reduction(op_type: str, a: TracedArray, axis: Axis, keepdims: Any) -> TracedArray:
    """Record a reduction, with its axes as an input or as an attribute, as the opset has them.

    Return the array itself for empty axes.
    """
    recorder = a.recorder
    keeps_axes = int(bool(keepdims) and keepdims is not np._NoValue)
    if axis is None:
        return recorder.add(op_type, a, keepdims=keeps_axes)
    axes = [axis] if isinstance(axis, int) else list(axis)
    # Empty axes mean all axes in ONNX, and none in NumPy.
    if not axes:
        return a
    if recorder.opset >= _AXES_ARE_INPUT.get(op_type, _AXES_INPUT_OPSET):
        return recorder.add(op_type, a, integers(recorder, axes), keepdims=keeps_axes)
    return recorder.add(op_type, a, axes=axes, keepdims=keeps_axes)


def _register_reduction(op_type: str, *functions: Any) -> None:
    """Register the recorder of a reduction that takes a dtype; NumPy's default dtype is found on a sample."""

    def record(
        a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: Any = False, **options: Any
    ) -> Any:
        """Record the reduction in a dtype; raise NotTraceable where `out` or another option is passed."""
        refuse_options(functions[0].__name__, {"out": out, **options})
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
    refuse_options("max", {"out": out, **options})
    return _record_reduction("ReduceMax", a, axis, keepdims)


@records(np.min, np.amin)
def min_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record the smallest element."""
    refuse_options("min", {"out": out, **options})
    return _record_reduction("ReduceMin", a, axis, keepdims)


@records(np.any)
def any_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record whether an element is true."""
    refuse_options("any", {"out": out, **options})
    # ONNX has no reduction of booleans in older opsets.
    return _record_reduction("ReduceMax", a.astype(bool).astype(np.int32), axis, keepdims).astype(bool)


@records(np.all)
def all_(a: Any, axis: Axis = None, out: None = None, keepdims: Any = False, **options: Any) -> Any:
    """Record whether every element is true."""
    refuse_options("all", {"out": out, **options})
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
    """Record the mean of the squared distances from the mean; NotTraceable for `dtype`, `out`, `ddof`."""
    refuse_options("var", {"dtype": dtype, "out": out, "ddof": ddof or None, **options})
    # The two-pass formula, as in NumPy: the mean of squares would cancel.
    distance = a - np.mean(a, axis, keepdims=True)
    return np.mean(distance * distance, axis, keepdims=keepdims)


@records(np.std)
def std(a: Any, axis: Axis = None, **kwargs: Any) -> Any:
    """Record the root of the variance."""
    return np.sqrt(np.var(a, axis, **kwargs))


@records(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Axis = None, keepdims: Any = False) -> Any:
    """Record the norm of vectors: the root of the sum of squares, for 1 of magnitudes, for inf the largest.

    Without an order it is also that of matrices; NotTraceable for their other norms.
    """
    if isinstance(axis, Sequence):
        is_of_matrices = len(axis) == 2
    else:
        is_of_matrices = axis is None and x.ndim == 2
    if ord is not None and is_of_matrices:
        raise NotTraceable(f"numpy.linalg.norm of order {ord} of matrices")
    if ord in (None, 2):
        return np.sqrt(np.sum(x * x, axis, keepdims=keepdims))
    if ord == 1:
        return np.sum(np.abs(x), axis, keepdims=keepdims)
    if ord == np.inf:
        return np.max(np.abs(x), axis, keepdims=keepdims)
    raise NotTraceable(f"numpy.linalg.norm of order {ord}")


@records(np.cumsum)
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: None = None) -> Any:
    """Record the sums of the elements up to each, by default of the flat array."""
    refuse_options("cumsum", {"out": out})
    if axis is None:
        a, axis = a.reshape(-1), 0
    # NumPy sums small integers in a larger type; a sample tells which.
    summands = a.astype(np.cumsum(np.ones(1, a.dtype)).dtype if dtype is None else dtype)
    return summands.recorder.add("CumSum", summands, summands.recorder.constant(np.int64(axis)))


@records(np.argmax)
def argmax(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Record the position of the first largest element."""
    refuse_options("argmax", {"out": out})
    return _record_arg("ArgMax", a, axis, keepdims)


@records(np.argmin)
def argmin(a: Any, axis: int | None = None, out: None = None, *, keepdims: Any = False) -> Any:
    """Record the position of the first smallest element."""
    refuse_options("argmin", {"out": out})
    return _record_arg("ArgMin", a, axis, keepdims)


def _record_arg(op_type: str, a: Any, axis: int | None, keepdims: Any) -> TracedArray:
    """Record the positions of extreme elements; of the flat array where the axis is None."""
    if axis is None:
        a, axis = a.reshape(-1), 0
    keeps_axes = int(bool(keepdims) and keepdims is not np._NoValue)
    result: TracedArray = a.recorder.add(op_type, a, axis=axis, keepdims=keeps_axes)
    return result


@records(np.sort)
def sort(a: Any, axis: int | None = -1, **options: Any) -> Any:
    """Record the sorted elements, from the lowest."""
    return _record_sort("sort", a, axis, options)[0]


@records(np.argsort)
def argsort(a: Any, axis: int | None = -1, **options: Any) -> Any:
    """Record the positions of the elements in sorted order."""
    return _record_sort("argsort", a, axis, options)[1]


@records(np.partition)
def partition(a: Any, kth: Any, axis: int | None = -1, **options: Any) -> Any:
    """Record the sorted elements, which are a partition at every position."""
    return _record_sort("partition", a, axis, options)[0]


@records(np.argpartition)
def argpartition(a: Any, kth: Any, axis: int | None = -1, **options: Any) -> Any:
    """Record the positions of the elements in sorted order, which is a partition at every position."""
    return _record_sort("argpartition", a, axis, options)[1]


def _record_sort(name: str, a: TracedArray, axis: int | None, options: dict[str, Any]) -> list[TracedArray]:
    """Record a sort, of the flat array where the axis is None; return elements and positions.

    Raises NotTraceable for an axis of unknown extent.
    """
    # TopK is stable: every kind of sort that NumPy knows may give its result.
    refuse_options(
        name, {option: value for option, value in options.items() if option not in ("kind", "stable")}
    )
    if axis is None:
        a, axis = a.reshape(-1), 0
    length = a.shape[axis]
    if length is None:
        raise NotTraceable(f"it sorts along an axis of {a.shape} whose extent is known as it runs")
    # ONNX has no sort, but TopK with all elements is one.
    count = integers(a.recorder, [length])
    return a.recorder.add_all("TopK", [a, count], 2, axis=axis, largest=0, sorted=1)
