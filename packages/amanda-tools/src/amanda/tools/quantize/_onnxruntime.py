"""Quantisation in ONNX Runtime: the arithmetic of NumPy's arrays, and the state of a tool there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.errors import AmandaError
from amanda.tools.quantize._numpy import (
    absolute,
    as_array,
    constant,
    extent,
    floor,
    has_kernel,
    like,
    maximum,
    minimum,
    reshape,
    rint,
    total,
    where,
    wide,
)

__all__ = [
    "absolute",
    "as_array",
    "assign",
    "constant",
    "describe",
    "extent",
    "floor",
    "has_kernel",
    "is_plain",
    "like",
    "made",
    "maximum",
    "minimum",
    "read",
    "reshape",
    "rint",
    "total",
    "where",
    "wide",
    "with_gradient",
]


def is_plain(x: Any) -> bool:
    """Whether there is anything to quantise in a tensor: it has elements."""
    return bool(np.asarray(x).size)


# ---- state ----


def made(value: Any, reference: Any, trained: bool) -> NDArray[np.float32]:
    """A number or array as state of the tool, in float32; nothing trains it here."""
    return np.array(value, np.float32)


def renewed(former: NDArray[np.float32], value: NDArray[np.float32]) -> NDArray[np.float32]:
    """The value: no optimizer holds the former one."""
    return value


def assign(state: NDArray[np.float32], value: Any) -> None:
    """Write new values into state."""
    state[...] = np.asarray(value, np.float32).reshape(state.shape)


def read(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """State as an array to compute with."""
    return state


def with_gradient(
    forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any], collect: Any = None
) -> Any:
    """`forward(*tensors)`: there is no backward pass."""
    return forward(*tensors)


# ---- ops ----

_ALONE = ("batch_norm", "embedding")


def describe(context: amanda.OpContext) -> None:
    """Write `arithmetic`, `operands`, positions of the inputs that may be quantised, and `recompute`."""
    if "operands" in context:
        return
    kind, count = context["type"], len(context.get_inputs())
    factors = 2 if kind == "linear" or kind.startswith("conv") else 1 if kind in _ALONE else count
    context["arithmetic"] = sys.modules[__name__]
    context["operands"] = list(range(min(factors, count)))
    try:
        context["recompute"] = context.get_computation()
    except AmandaError:
        context["recompute"] = None
