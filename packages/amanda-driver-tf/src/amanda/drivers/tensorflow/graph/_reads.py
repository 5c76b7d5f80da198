"""What traceable routines read of TensorFlow's values, and of Keras's."""

from typing import Any, ClassVar

import numpy as np

import tensorflow as tf
from amanda.backend import Reads


class TensorFlowReads(Reads):
    """`Reads` that knows TensorFlow's and NumPy's plain values, and the layers of Keras."""

    plain: ClassVar = (*Reads.plain, tf.DType, tf.TensorShape, np.dtype, np.generic)
    opaque: ClassVar = Reads.opaque | {"tensorflow", "keras", "tf_keras"}
    called: ClassVar = (*Reads.called, "call")

    def look_into(self, value: Any) -> bool:
        """Whether a value has attributes that routines read; what is of a framework has, if it is a layer."""
        return super().look_into(value) or hasattr(type(value), "call")
