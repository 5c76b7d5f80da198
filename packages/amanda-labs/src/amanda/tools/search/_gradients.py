"""Gradients of a parameter where no tape leads to it: programs hand them over as they run."""

from __future__ import annotations

from threading import Lock
from typing import Any, Protocol


class Gradients(Protocol):
    """Sum of the gradients of one parameter since it was taken."""

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""


class GradientSum:
    """Sum that Python adds to."""

    def __init__(self) -> None:
        self._sum: Any = None
        self._lock = Lock()

    def add(self, gradient: Any) -> None:
        """Add the gradient of one execution."""
        with self._lock:
            self._sum = gradient if self._sum is None else self._sum + gradient

    def take(self) -> Any:
        """Return the sum, None if nothing was added; begin anew."""
        with self._lock:
            found, self._sum = self._sum, None
        return found
