"""The functions of NumPy on whole arrays that are recorded, and what those that record them need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import TracedArray
from ._recorder import Recorder

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""By the function of NumPy, what records it."""

Axis = int | Sequence[int] | None


def of(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a function record these of NumPy."""

    def register(record: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, record))
        return record

    return register


def recorder_of(*values: Any) -> Recorder:
    """Return that of the first value which is traced."""
    return next(one.recorder for one in values if isinstance(one, TracedArray))


def traced(recorder: Recorder, value: Any) -> TracedArray:
    """A value, as a constant where it is none that is traced."""
    return value if isinstance(value, TracedArray) else recorder.constant(np.asarray(value))


def integers(recorder: Recorder, values: Any) -> TracedArray:
    """Extents, axes or positions as a constant."""
    return recorder.constant(np.array(values, np.int64).reshape(-1))


def refuse(name: str, options: dict[str, Any]) -> None:
    """Raise NotTraceable for options that have no counterpart."""
    given = [key for key, value in options.items() if value is not None and value is not np._NoValue]
    if given:
        raise NotTraceable(f"numpy.{name} with {', '.join(given)}")
