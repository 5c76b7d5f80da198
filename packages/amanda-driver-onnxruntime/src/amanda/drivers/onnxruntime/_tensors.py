"""Tensor primitives: symbols at analysis, NumPy's arrays while a graph runs, recorded ones while traced."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from amanda.backend import UnwrittenTensors
from amanda.errors import MutationError, RoutineError

from ._symbols import Symbol
from ._tracing import TracedArray

_TENSORS = (np.ndarray, np.generic, TracedArray, Symbol)


class GraphTensors(UnwrittenTensors):
    """ONNX Runtime has no backward pass, so nothing of autodiff has to be kept."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor, symbolic, traced or real."""
        return isinstance(value, _TENSORS)

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each tensor, also in lists."""
        return tuple([_told(value, rank_alone=True) for value in inputs])

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each tensor, as far as it is known, also in lists."""
        return tuple([_told(value, rank_alone=False) for value in inputs])

    def call_isolated(self, func: Any, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine; one that writes into what it was given has made a mistake.

        Raises MutationError.
        """
        try:
            return func(*values, **kwargs)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise MutationError(
                "a routine wrote into a value that it was given; return a new value instead, as NumPy's "
                "operators give"
            ) from error

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` in the type of `original`, whose shape it must have.

        Raises RoutineError otherwise.
        """
        if not _agree(original.shape, value.shape):
            raise RoutineError(
                f"a routine returned shape {value.shape} where shape {original.shape} was given; mark it "
                "@amanda.differentiable if it is meant to change shapes"
            )
        if isinstance(value, np.generic):  # what NumPy makes of arrays without axes
            value = np.asarray(value)
        wanted, found = original.dtype, value.dtype
        if wanted == found:
            return value
        if (wanted.kind == "c") != (found.kind == "c"):
            raise RoutineError(
                f"a routine returned {found.name} where {wanted.name} was given; it may not turn real into "
                "complex or back"
            )
        if not (is_floating(wanted) and is_floating(found)):
            raise RoutineError(
                f"a routine returned {found.name} where {wanted.name} was given; return "
                f"{'a floating type' if is_floating(wanted) else 'that type'}"
            )
        return value.astype(wanted)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return True if a type is a floating or complex one, of ml_dtypes too."""
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))


def _told(value: Any, rank_alone: bool) -> Hashable:
    if isinstance(value, Symbol):
        return (value.dtype and value.dtype.name, value.ndim) if rank_alone else value.shape
    return tuple([_told(one, rank_alone) for one in value]) if isinstance(value, list) else None


def _agree(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(
        a is None or b is None or a == b for a, b in zip(one, other, strict=True)
    )
