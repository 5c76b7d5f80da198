"""Tensor primitives of symbols, NumPy arrays and traced arrays, and the values that routines read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from amanda.backend import ImmutableTensorOps, Reads, complex_error, dtype_error, shape_error
from amanda.errors import MutationError

from ._tracing import TracedArray
from ._values import OnnxSymbol

_TENSORS = (np.ndarray, np.generic, TracedArray, OnnxSymbol)


class OnnxTensorOps(ImmutableTensorOps):
    """Tensor primitives of ONNX Runtime, which has no backward pass."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for an array, a traced array or a symbol."""
        return isinstance(value, _TENSORS)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of each tensor, also in lists."""
        return tuple([_describe(value, rank_alone=True) for value in inputs])

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the known shape of each tensor, also in lists."""
        return tuple([_describe(value, rank_alone=False) for value in inputs])

    def call_without_autodiff(self, func: Any, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine.  Raises MutationError if it writes into an argument."""
        try:
            return func(*values, **kwargs)
        except ValueError as error:
            # NumPy has no exception of its own for a write into a read-only array.
            if "read-only" not in str(error):
                raise
            raise MutationError(
                "a routine wrote into a value that it was given; return a new value instead, as NumPy's "
                "operators give"
            ) from error

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the type of `original`.  Raises RoutineError for another shape or kind."""
        if not _shapes_agree(original.shape, value.shape):
            raise shape_error(value.shape, original.shape)
        if isinstance(value, np.generic):  # NumPy's functions return scalars for arrays without axes
            value = np.asarray(value)
        original_dtype, value_dtype = original.dtype, value.dtype
        if original_dtype == value_dtype:
            return value
        if (original_dtype.kind == "c") != (value_dtype.kind == "c"):
            raise complex_error(value_dtype.name, original_dtype.name)
        if not (is_floating(original_dtype) and is_floating(value_dtype)):
            remedy = f"return {'a floating type' if is_floating(original_dtype) else 'that type'}"
            raise dtype_error(value_dtype.name, original_dtype.name, remedy)
        return value.astype(original_dtype)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return True for a floating or complex dtype, also of ml_dtypes."""
    # The dtypes of ml_dtypes, such as bfloat16, have NumPy's kind "V", so their names decide.
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))


def _describe(value: Any, rank_alone: bool) -> Hashable:
    if isinstance(value, OnnxSymbol):
        return (value.dtype and value.dtype.name, value.ndim) if rank_alone else value.shape
    return tuple([_describe(element, rank_alone) for element in value]) if isinstance(value, list) else None


def _shapes_agree(shape: Any, other_shape: Any) -> bool:
    """Return True if two shapes may be equal; None stands for anything."""
    if shape is None or other_shape is None:
        return True
    return len(shape) == len(other_shape) and all(
        extent is None or other_extent is None or extent == other_extent
        for extent, other_extent in zip(shape, other_shape, strict=True)
    )


class NumpyReads(Reads):
    """Reads with the plain values of NumPy."""

    # Scalars of NumPy are compared by value, arrays by identity.
    plain_types: ClassVar[Any] = (*Reads.plain_types, np.dtype, np.generic)
    opaque_packages: ClassVar[frozenset[str]] = Reads.opaque_packages | {"ml_dtypes", "onnx", "onnxruntime"}
