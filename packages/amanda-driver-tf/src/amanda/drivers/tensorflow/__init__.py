"""Amanda's driver for TensorFlow: registered, and serving no mode yet."""

from amanda.drivers.tensorflow._driver import TensorFlowDriver

__all__ = ["TensorFlowDriver"]
