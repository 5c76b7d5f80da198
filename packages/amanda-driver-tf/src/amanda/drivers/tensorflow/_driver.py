"""The TensorFlow driver."""

from importlib.metadata import version

from amanda.backend import Driver, Namespace
from amanda.errors import DriverError


class TensorFlowDriver(Driver):
    """Registers for TensorFlow and says of every scope that no mode is served yet."""

    api = 1
    framework = "tensorflow"
    modes = ()

    @property
    def namespace(self) -> Namespace:
        """The tags of TensorFlow, without a mode."""
        return Namespace(f"tensorflow/{version('tensorflow')}")

    def attach(self) -> None:
        """Raises DriverError, which the core puts into the scope's report; other drivers go on."""
        own = version("amanda-driver-tf")
        raise DriverError(
            f"amanda-driver-tf {own} serves no mode of TensorFlow yet, so its ops are not seen: "
            "pip install --upgrade amanda-driver-tf"
        )

    def detach(self) -> None:
        """Nothing was attached."""
