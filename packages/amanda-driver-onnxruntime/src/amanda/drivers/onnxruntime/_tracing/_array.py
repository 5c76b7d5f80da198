"""An array that records the operations on it, its indices and NumPy's ufuncs, as nodes of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import onnx
from onnx import NodeProto, TypeProto, numpy_helper

from amanda.backend import NotTraceable, when_imported

_SAME_MEANING = {
    "abs": "Abs", "arccos": "Acos", "arccosh": "Acosh", "arcsin": "Asin", "arcsinh": "Asinh", "arctan":
    "Atan", "arctanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "exp": "Exp", "floor": "Floor",
    "isnan": "IsNaN", "log": "Log", "negative": "Neg", "reciprocal": "Reciprocal", "rint": "Round",
    "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
    "add": "Add", "divide": "Div", "equal": "Equal", "greater": "Greater", "greater_equal": "GreaterOrEqual",
    "less": "Less", "less_equal": "LessOrEqual", "logical_and": "And", "logical_not": "Not",
    "logical_or": "Or", "logical_xor": "Xor", "matmul": "MatMul", "maximum": "Max", "minimum": "Min",
    "multiply": "Mul", "power": "Pow", "subtract": "Sub",
}  # fmt: skip
"""Op types of ONNX by the names of ufuncs that compute the same."""

_OF_BOOLS = {"add": "Or", "maximum": "Or", "multiply": "And", "minimum": "And", "not_equal": "Xor",
             "bitwise_and": "And", "bitwise_or": "Or", "bitwise_xor": "Xor", "invert": "Not"}  # fmt: skip
# Opsets before 18 have none of these, which the look-up of the schema reports.
_OF_INTEGERS = {"bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor",
                "invert": "BitwiseNot"}  # fmt: skip
_ON_BOOLS = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})
_REDUCTIONS: dict[str, Any] = {
    "add": np.sum, "multiply": np.prod, "maximum": np.max, "minimum": np.min, "logical_and": np.all,
    "logical_or": np.any,
}  # fmt: skip


class TracedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A traced array of NumPy, whose operators, functions and methods record nodes of ONNX.

    dtype: of its elements.  shape: extents, with None for one that is known at execution only.
    """

    # NumPy's scalars defer to this class in mixed operations.
    __array_priority__ = 1000

    def __init__(self, recorder: NodeRecorder, name: str, type: TypeProto) -> None:
        self.recorder = recorder
        self.name = name
        self.type = type
        self.dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(type.tensor_type.elem_type))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Extents, with None for an unknown one.  Raises NotTraceable if the rank is unknown."""
        if not self.type.tensor_type.HasField("shape"):
            raise NotTraceable("it asks for the shape of a value whose rank is not known before it runs")
        extents = self.type.tensor_type.shape.dim
        return tuple(extent.dim_value if extent.HasField("dim_value") else None for extent in extents)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements.  Raises NotTraceable if an extent is unknown."""
        if None in self.shape:
            raise NotTraceable(f"it asks for the size of a value of shape {self.shape}, known as it runs")
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_is_small(self) -> bool:
        """True for a known size of at most 64 elements."""
        return self.type.tensor_type.HasField("shape") and None not in self.shape and self.size <= 64

    @property
    def T(self) -> TracedArray:
        """The array with its axes in reverse order."""
        return self.transpose()

    def __len__(self) -> int:
        if not self.ndim or self.shape[0] is None:
            raise NotTraceable(f"it asks for the length of a value of shape {self.shape}")
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"<traced {self.dtype} {self.name}>"

    # The mixin defines `__eq__`, which would remove the hash.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise NotTraceable("it decides by a value that is known as it runs; numpy.where chooses in a graph")

    def _raise_not_traceable(self, *_: Any, **__: Any) -> Any:
        raise NotTraceable("it makes a Python number, or an array, of a value that is known as it runs")

    # Each of these needs the value, which a graph has at execution only.
    __float__ = __int__ = __index__ = __complex__ = _raise_not_traceable
    __array__ = item = tolist = __setitem__ = _raise_not_traceable

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Record a call of an elementwise function of NumPy; NumPy calls this in its place."""
        return apply_ufunc(self.recorder, ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Record a call of another function of NumPy; raise NotTraceable for one without a recorder."""
        # It imports this module.
        from ._functions import FUNCTIONS

        record = FUNCTIONS.get(function)
        if record is None:
            raise NotTraceable(f"numpy.{function.__name__} has no counterpart in ONNX")
        return record(*args, **kwargs)

    def astype(self, dtype: Any, **_: Any) -> TracedArray:
        """Record a cast to another dtype; return the array itself for its own."""
        target_dtype = np.dtype(dtype)
        if target_dtype == self.dtype:
            return self
        return self.recorder.add("Cast", self, to=onnx.helper.np_dtype_to_tensor_dtype(target_dtype))

    def transpose(self, *axes: Any) -> TracedArray:
        """Record the array with its axes in another order."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        transposed: Any = np.transpose(self, order or None)
        return cast(TracedArray, transposed)

    def reshape(self, *shape: Any, **kwargs: Any) -> TracedArray:
        """Record the array in another shape."""
        extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        reshaped: Any = np.reshape(self, extents, **kwargs)
        return cast(TracedArray, reshaped)

    def __getitem__(self, key: Any) -> TracedArray:
        return record_getitem(self, key)

    def copy(self, *_: Any) -> TracedArray:
        """Return the array itself, which nothing writes into."""
        return self

    def flatten(self, order: str = "C") -> TracedArray:
        """Record the array with a single axis."""
        flat: Any = np.ravel(self, order)  # type: ignore[call-overload]
        return cast(TracedArray, flat)

    ravel = flatten

    def __getattr__(self, name: str) -> Any:
        """Return NumPy's function of this name as a method; raise AttributeError for other names."""
        if name not in _METHODS:
            raise AttributeError(f"{name!r} of a traced array")
        function = getattr(np, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return method


_METHODS = frozenset(
    {"all", "any", "argmax", "argmin", "argsort", "clip", "cumsum", "dot", "max", "mean", "min", "prod",
     "repeat", "round", "squeeze", "std", "sum", "swapaxes", "take", "var"}
)  # fmt: skip
"""Methods that are NumPy's functions of the same name."""


def _register_with_autoray() -> None:
    """Make autoray call NumPy's functions for traced arrays."""
    import autoray

    autoray.register_backend(TracedArray, "numpy")


when_imported("autoray", _register_with_autoray)


LEAST_OPSET = 13
"""The lowest opset in which recorded nodes are valid."""


class NodeRecorder:
    """Records nodes of an opset, with the constants that they read and traced arrays for their outputs.

    nodes: the recorded nodes, in order.  constants: arrays that they read, by name.
    values: all traced arrays.  prefix: prefix of all names.
    Raises NotTraceable for an opset below `LEAST_OPSET`.
    """

    def __init__(self, prefix: str, opset: int) -> None:
        if opset < LEAST_OPSET:
            raise NotTraceable(
                f"the model has opset {opset}, recorded nodes need {LEAST_OPSET}: convert it with "
                f"onnx.version_converter.convert_version(model, {LEAST_OPSET})"
            )
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.values: list[TracedArray] = []

    def value(self, name: str, type: TypeProto) -> TracedArray:
        """Add an existing value of the graph; return its traced array."""
        array = TracedArray(self, name, type)
        self.values.append(array)
        return array

    def constant(self, value: Any) -> TracedArray:
        """Add a constant; return its traced array."""
        array = np.asarray(value)
        name = f"{self.prefix}/constant{len(self.constants)}"
        self.constants[name] = array
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return self.value(name, onnx.helper.make_tensor_type_proto(element, array.shape))

    def add(self, op_type: str, *inputs: TracedArray | None, **attributes: Any) -> TracedArray:
        """Record a node; return its first output."""
        return self.add_all(op_type, inputs, 1, **attributes)[0]

    def add_all(
        self, op_type: str, inputs: Sequence[TracedArray | None], outputs: int, **attributes: Any
    ) -> list[TracedArray]:
        """Record a node; return all its outputs.

        Raises NotTraceable where ONNX has no such node for these types.
        """
        stem = f"{self.prefix}/{op_type}{len(self.nodes)}"
        names = [stem if outputs == 1 else f"{stem}:{i}" for i in range(outputs)]
        input_names = [array.name if array is not None else "" for array in inputs]
        node = onnx.helper.make_node(op_type, input_names, names, stem, **attributes)
        try:
            # Small constants are passed along: shapes and axes decide the types of outputs.
            types = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(op_type, self.opset, ""),
                node,
                {array.name: array.type for array in inputs if array is not None},
                {
                    array.name: numpy_helper.from_array(self.constants[array.name], array.name)
                    for array in inputs
                    if array is not None and array.name in self.constants and array.size_is_small
                },
                opset_imports=[onnx.helper.make_opsetid("", self.opset)],
            )
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise NotTraceable(f"{op_type} of ONNX does not take it: {reason}") from error
        self.nodes.append(node)
        return [self.value(name, types[name]) for name in names]


_LAST = np.iinfo(np.int64).max


def record_getitem(array: TracedArray, key: Any) -> TracedArray:
    """Record `array[key]` for integers, slices, None, an ellipsis, and one array of integers.

    Raises NotTraceable for other keys.
    """
    keys = _expand_ellipsis(key if isinstance(key, tuple) else (key,), array.ndim)
    slice_by_axis: dict[int, slice] = {}
    indices_by_axis: dict[int, TracedArray] = {}
    dropped_axes = []
    axis = 0
    for entry in keys:
        if entry is None:
            continue
        if isinstance(entry, slice):
            slice_by_axis[axis] = entry
        elif isinstance(entry, (int, np.integer)):
            # An integer is a slice of extent 1, whose axis is dropped at last. That of -1 ends with the axis.
            end = None if entry == -1 else int(entry) + 1
            slice_by_axis[axis] = slice(int(entry), end)
            dropped_axes.append(axis)
        else:
            indices_by_axis[axis] = _as_indices(array, entry)
        axis += 1
    # All axes stay in place until here, so the order of keys does not matter.
    result = _record_slices(array, slice_by_axis)
    for axis, indices in indices_by_axis.items():
        result = array.recorder.add("Gather", result, indices, axis=axis)
    result = _record_squeeze(result, dropped_axes)
    return _record_new_axes(result, keys)


def _expand_ellipsis(keys: tuple[Any, ...], ndim: int) -> list[Any]:
    """Return keys with full slices instead of an ellipsis, and for axes without a key."""
    index_count = sum(entry is not None and entry is not Ellipsis for entry in keys)
    if index_count > ndim:
        raise NotTraceable(f"{index_count} indices for a value of {ndim} axes")
    full_slices = [slice(None)] * (ndim - index_count)
    for i, entry in enumerate(keys):
        if entry is Ellipsis:
            return [*keys[:i], *full_slices, *keys[i + 1 :]]
    return [*keys, *full_slices]


def _as_indices(array: TracedArray, key: Any) -> TracedArray:
    """Return an index as a traced array of int64; raise NotTraceable for masks and for several axes."""
    indices = key if isinstance(key, TracedArray) else array.recorder.constant(np.asarray(key))
    if indices.dtype.kind not in "iu" or indices.ndim > 1:
        raise NotTraceable(f"an index of {indices.dtype} and {indices.ndim} axes")
    return indices.astype(np.int64)


def _record_slices(array: TracedArray, slice_by_axis: dict[int, slice]) -> TracedArray:
    """Record slices along axes; full slices need no node."""
    starts, ends, axes, steps = [], [], [], []
    for axis, entry in slice_by_axis.items():
        if entry == slice(None):
            continue
        step = 1 if entry.step is None else int(entry.step)
        # Slice of ONNX clamps positions, so the largest number stands for an end that is left out.
        default_start, default_end = (0, _LAST) if step > 0 else (_LAST, -_LAST)
        starts.append(default_start if entry.start is None else int(entry.start))
        ends.append(default_end if entry.stop is None else int(entry.stop))
        axes.append(axis)
        steps.append(step)
    if not axes:
        return array
    constants = [
        array.recorder.constant(np.array(numbers, np.int64)) for numbers in (starts, ends, axes, steps)
    ]
    return array.recorder.add("Slice", array, *constants)


def _record_squeeze(array: TracedArray, axes: list[int]) -> TracedArray:
    if not axes:
        return array
    return array.recorder.add("Squeeze", array, array.recorder.constant(np.array(axes, np.int64)))


def _record_new_axes(array: TracedArray, keys: list[Any]) -> TracedArray:
    """Record new axes at the positions of None among the keys."""
    # An integer leaves no axis, so it does not count.
    axis_keys = [entry for entry in keys if not isinstance(entry, (int, np.integer))]
    new_axes = [i for i, entry in enumerate(axis_keys) if entry is None]
    if not new_axes:
        return array
    return array.recorder.add("Unsqueeze", array, array.recorder.constant(np.array(new_axes, np.int64)))


def apply_ufunc(
    recorder: NodeRecorder, ufunc: Any, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Record a ufunc, or the reduction by a ufunc.

    Raises NotTraceable if ONNX has no counterpart.
    """
    name = {"absolute": "abs", "true_divide": "divide"}.get(ufunc.__name__, ufunc.__name__)
    if method == "reduce" and name in _REDUCTIONS:
        options_with_axis = {"axis": 0, **kwargs}  # the default of ufuncs
        return _REDUCTIONS[name](inputs[0], **options_with_axis)
    dtype = kwargs.pop("dtype", None)
    where = kwargs.pop("where", True)
    if method != "__call__" or kwargs or where is not True:
        options = ", ".join(kwargs) or "where"
        raise NotTraceable(f"numpy.{name}{'' if method == '__call__' else f'.{method}'} with {options}")
    arrays, result_dtype = _promote_inputs(recorder, ufunc, name, inputs)
    result = _record_ufunc(recorder, name, arrays)
    return result.astype(result_dtype if dtype is None else dtype)


def _record_ufunc(recorder: NodeRecorder, name: str, arrays: list[TracedArray]) -> TracedArray:
    """Record a ufunc by the node for its dtypes, or as a composition of other ufuncs."""
    kind = arrays[0].dtype.kind
    if kind == "b" and name in _OF_BOOLS:
        return recorder.add(_OF_BOOLS[name], *arrays)
    if kind in "iu" and name in _OF_INTEGERS:
        return recorder.add(_OF_INTEGERS[name], *arrays)
    if name in _SAME_MEANING:
        return recorder.add(_SAME_MEANING[name], *arrays)
    if name in _COMPOSED:
        composed: TracedArray = _COMPOSED[name](*arrays)
        return composed
    raise NotTraceable(f"numpy.{name} has no counterpart in ONNX")


def _promote_inputs(
    recorder: NodeRecorder, ufunc: Any, name: str, inputs: Sequence[Any]
) -> tuple[list[TracedArray], np.dtype[Any]]:
    """Return the inputs in the dtype in which NumPy computes, and the dtype of the result."""
    extents = (1,) if name == "matmul" else ()  # it takes no scalars
    # NumPy itself finds the result's dtype, on empty arrays; Python numbers are weak, as in its rules.
    samples = [
        value if isinstance(value, (bool, int, float)) else np.empty(extents, _dtype(value))
        for value in inputs
    ]
    with np.errstate(all="ignore"):
        result_dtype = np.asarray(ufunc(*samples)).dtype
        input_dtype = np.result_type(*samples)
    # NumPy computes true division and functions such as `sqrt` of integers in a floating type.
    if name == "divide" or (result_dtype.kind == "f" and input_dtype.kind != "f"):
        input_dtype = result_dtype
    if name in _ON_BOOLS:
        input_dtype = np.dtype(bool)
    arrays = [
        value.astype(input_dtype)
        if isinstance(value, TracedArray)
        else recorder.constant(np.asarray(value).astype(input_dtype))
        for value in inputs
    ]
    return arrays, result_dtype


def _dtype(value: Any) -> np.dtype[Any]:
    return value.dtype if isinstance(value, TracedArray) else np.asarray(value).dtype


def _floor_divide(x: TracedArray, y: TracedArray) -> Any:
    """Record a floor division of arrays of one dtype."""
    if x.dtype.kind == "f":
        return np.floor(x / y)
    quotient = x.recorder.add("Div", x, y)  # ONNX truncates integers towards zero, NumPy floors
    inexact = (quotient * y != x) & ((x < 0) ^ (y < 0))
    return quotient - inexact.astype(x.dtype)


def _remainder(x: TracedArray, y: TracedArray) -> Any:
    # Mod of ONNX gives floating results the sign of the dividend; NumPy takes the sign of the divisor.
    return x.recorder.add("Mod", x, y) if x.dtype.kind != "f" else x - np.floor(x / y) * y


def _isinf(x: TracedArray) -> Any:
    return x.recorder.add("IsInf", x)


# ONNX has no op for these, or none for all dtypes.
_COMPOSED: dict[str, Callable[..., Any]] = {
    "exp2": lambda x: np.power(2.0, x),
    "floor_divide": _floor_divide,
    "isfinite": lambda x: ~(np.isnan(x) | _isinf(x)),
    "isinf": _isinf,
    "not_equal": lambda x, y: ~np.equal(x, y),
    "positive": lambda x: x,
    "remainder": _remainder,
    "square": lambda x: x * x,
    "trunc": lambda x: np.sign(x) * np.floor(np.abs(x)),
}
