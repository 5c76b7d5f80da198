"""NumPy's ufuncs, recorded as nodes with NumPy's rules of type promotion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import NodeRecorder, TracedArray

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


def apply_ufunc(
    recorder: NodeRecorder, ufunc: Any, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Record a ufunc, or the reduction by a ufunc.

    Raises NotTraceable if ONNX has no counterpart.
    """
    name = {"absolute": "abs", "true_divide": "divide"}.get(ufunc.__name__, ufunc.__name__)
    if method == "reduce" and name in _REDUCTIONS:
        return _REDUCTIONS[name](inputs[0], **{"axis": 0, **kwargs})
    dtype = kwargs.pop("dtype", None)
    where = kwargs.pop("where", True)
    if method != "__call__" or kwargs or where is not True:
        options = ", ".join(kwargs) or "where"
        raise NotTraceable(f"numpy.{name}{'' if method == '__call__' else f'.{method}'} with {options}")
    arrays, result = _promote_inputs(recorder, ufunc, name, inputs)
    recorded = _record_ufunc(recorder, name, arrays)
    return recorded.astype(result if dtype is None else dtype)


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
    extents = (1,) * (name == "matmul")
    # NumPy itself finds the result's dtype, on empty arrays; Python numbers are weak, as in its rules.
    samples = [
        value if isinstance(value, (bool, int, float)) else np.empty(extents, _dtype(value))
        for value in inputs
    ]
    with np.errstate(all="ignore"):
        result = np.asarray(ufunc(*samples)).dtype
        computed = np.result_type(*samples)
    # NumPy computes true division and functions such as `sqrt` of integers in a floating type.
    if name == "divide" or (result.kind == "f" and computed.kind != "f"):
        computed = result
    if name in _ON_BOOLS:
        computed = np.dtype(bool)
    arrays = [
        value.astype(computed)
        if isinstance(value, TracedArray)
        else recorder.constant(np.asarray(value).astype(computed))
        for value in inputs
    ]
    return arrays, result


def _dtype(value: Any) -> np.dtype[Any]:
    return value.dtype if isinstance(value, TracedArray) else np.asarray(value).dtype


def _floor_divide(x: TracedArray, y: TracedArray) -> Any:
    """Record a floor division."""
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
