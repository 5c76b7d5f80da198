"""Values of NumPy, and of ONNX Runtime, that traceable routines read."""

from typing import Any, ClassVar

import numpy as np

from amanda.backend import Reads


class NumpyReads(Reads):
    """Reads with the plain values of NumPy."""

    plain: ClassVar[Any] = (*Reads.plain, np.dtype, np.generic)
    opaque: ClassVar[frozenset[str]] = Reads.opaque | {"ml_dtypes", "onnx", "onnxruntime"}
