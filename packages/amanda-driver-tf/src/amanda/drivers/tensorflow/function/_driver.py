"""The driver of function mode: its boundary is where TensorFlow calls a function eagerly."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import ClassVar

import tensorflow as tf
from amanda.backend import DRIVER_API, FRAMEWORK, SKIPPED, Attributes, Driver, Namespace, codes

from .._recording import let_routines_differentiate
from .._requirements import check
from ..graph import DEFAULT_BUDGET
from ._boundary import Boundary
from ._recording import forget_gradient_function, record_gradients


class FunctionDriver(Driver):
    """TensorFlow's functions: each is run as a copy with the routines in it.

    observer_bytes: how much memory the values may take that observers are given in one call.
    """

    api = DRIVER_API
    framework = "tensorflow"
    modes = ("function",)
    observer_bytes: ClassVar[int] = DEFAULT_BUDGET

    def __init__(self) -> None:
        self._attributes = Attributes()
        self._boundary = Boundary(self.namespace, lambda: self.observer_bytes)

    @cached_property
    def namespace(self) -> Namespace:
        """`tensorflow/<version>/function`."""
        return Namespace(f"tensorflow/{tf.__version__}/function")

    def attach(self) -> None:
        """Stand at the boundary, and note gradients that are made."""
        check("function")
        codes.add_root(f"{Path(tf.__file__).parent}/", FRAMEWORK)
        codes.add_root(f"{Path(__file__).parent.parent}/", SKIPPED)
        self._boundary.enter(self._attributes)
        record_gradients(self._attributes)
        let_routines_differentiate(self._attributes)

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        self._attributes.restore()
        forget_gradient_function()
