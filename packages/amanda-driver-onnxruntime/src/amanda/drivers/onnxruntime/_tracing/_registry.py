"""The registry of NumPy functions that are recorded, and helpers for the recording functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import TracedArray
from ._recorder import NodeRecorder

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


def refuse(name: str, options: dict[str, Any]) -> None:
    """Raise NotTraceable for options without a counterpart in ONNX."""
    names = [key for key, value in options.items() if value is not None and value is not np._NoValue]
    if names:
        raise NotTraceable(f"numpy.{name} with {', '.join(names)}")
