"""The driver of session graphs."""

from __future__ import annotations

import tensorflow as tf
from amanda.backend import DRIVER_API, Driver, Namespace

from .._requirements import check
from ._boundary import Boundary
from ._copies import Copies


class GraphDriver(Driver):
    """TensorFlow's sessions: what they run is analysed, and a copy beside the user's graph runs instead."""

    api = DRIVER_API
    framework = "tensorflow"
    modes = ("graph",)

    def __init__(self) -> None:
        self._boundary: Boundary | None = None

    @property
    def namespace(self) -> Namespace:
        """`tensorflow/<version>/graph`."""
        return Namespace(f"tensorflow/{tf.__version__}/graph")

    def attach(self) -> None:
        """Stand where runs of sessions begin."""
        check("graph")
        if self._boundary is None:
            self._boundary = Boundary(Copies(self.namespace).prepare)
        self._boundary.attach()

    def detach(self) -> None:
        """Leave the sessions as they were found."""
        if self._boundary is not None:
            self._boundary.detach()
