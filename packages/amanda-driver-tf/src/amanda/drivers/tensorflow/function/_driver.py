"""The driver of function mode: its boundary is where TensorFlow calls a function eagerly."""

from __future__ import annotations

from typing import ClassVar

from amanda.backend import Driver

from .._recording import let_routines_differentiate
from .._requirements import check
from ..graph import DEFAULT_BUDGET
from ._boundary import Boundary
from ._recording import forget_gradient_function, record_gradients


class FunctionDriver(Driver):
    """TensorFlow's functions: each is run as a copy with the routines in it.

    observer_bytes: how much memory the values may take that observers are given in one call.
    """

    api = 1
    framework = "tensorflow"
    modes = ("function",)
    observer_bytes: ClassVar[int] = DEFAULT_BUDGET

    def __init__(self) -> None:
        self._boundary = Boundary(self.namespace, lambda: self.observer_bytes)

    def attach(self) -> None:
        """Stand at the boundary, and note gradients that are made."""
        check("function")
        self._boundary.enter(self.attributes)
        record_gradients(self.attributes)
        let_routines_differentiate(self.attributes)

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        super().detach()
        forget_gradient_function()
