"""What traceable routines read of NumPy's values, and of ONNX Runtime's."""

from typing import Any, ClassVar

import numpy as np

from amanda.backend import Reads


class NumpyReads(Reads):
    """`Reads` that knows NumPy's plain values."""

    plain: ClassVar[Any] = (*Reads.plain, np.dtype, np.generic)
    opaque: ClassVar[frozenset[str]] = Reads.opaque | {"ml_dtypes", "onnx", "onnxruntime"}
