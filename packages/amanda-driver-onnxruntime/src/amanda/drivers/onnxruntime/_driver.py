"""The driver of ONNX Runtime's sessions."""

from __future__ import annotations

from amanda.backend import DRIVER_API, Driver, Namespace

from ._boundary import Boundary
from ._copies import Copies
from ._instrument import namespace
from ._requirements import check


class OnnxRuntimeDriver(Driver):
    """Sessions of ONNX Runtime: their models are analysed, and an instrumented copy runs instead."""

    api = DRIVER_API
    framework = "onnxruntime"
    modes = ("graph",)

    def __init__(self) -> None:
        self._boundary: Boundary | None = None

    @property
    def namespace(self) -> Namespace:
        """`onnxruntime/<version>/graph`."""
        return namespace()

    def attach(self) -> None:
        """Stand where runs of sessions begin."""
        check()
        if self._boundary is None:
            self._boundary = Boundary(Copies(self.namespace))
        self._boundary.attach()

    def detach(self) -> None:
        """Leave the sessions as they were found."""
        if self._boundary is not None:
            self._boundary.detach()
