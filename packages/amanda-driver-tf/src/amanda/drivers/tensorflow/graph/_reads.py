"""Values of TensorFlow, and of Keras, that traceable routines read."""

from typing import Any, ClassVar

import numpy as np

import tensorflow as tf
from amanda.backend import Reads


class TensorFlowReads(Reads):
    """Reads with the plain values of TensorFlow and NumPy, and with the layers of Keras."""

    plain: ClassVar = (*Reads.plain, tf.DType, tf.TensorShape, np.dtype, np.generic)
    opaque: ClassVar = Reads.opaque | {"tensorflow", "keras", "tf_keras"}
    called: ClassVar = (*Reads.called, "call")

    def look_into(self, value: Any) -> bool:
        """Return True if routines read a value's attributes; of a framework's objects, those of layers."""
        return super().look_into(value) or hasattr(type(value), "call")
