"""An array that records the operations on it as nodes of ONNX."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx
from onnx import TypeProto

from amanda.backend import NotTraceable, when_imported

from ._recorder import NodeRecorder


class TracedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A traced array of NumPy, whose operators, functions and methods record nodes of ONNX.

    dtype: of its elements.  shape: extents, with None for one that is known at execution only.
    """

    # NumPy's scalars defer to this class in mixed operations.
    __array_priority__ = 1000

    def __init__(self, recorder: NodeRecorder, name: str, type: TypeProto) -> None:
        self.recorder = recorder
        self.name = name
        self.type = type
        self.dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(type.tensor_type.elem_type))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Extents, with None for an unknown one.  Raises NotTraceable if the rank is unknown."""
        if not self.type.tensor_type.HasField("shape"):
            raise NotTraceable("it asks for the shape of a value whose rank is not known before it runs")
        extents = self.type.tensor_type.shape.dim
        return tuple(extent.dim_value if extent.HasField("dim_value") else None for extent in extents)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements.  Raises NotTraceable if an extent is unknown."""
        if None in self.shape:
            raise NotTraceable(f"it asks for the size of a value of shape {self.shape}, known as it runs")
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_is_small(self) -> bool:
        """True for a known size of at most 64 elements."""
        return self.type.tensor_type.HasField("shape") and None not in self.shape and self.size <= 64

    @property
    def T(self) -> TracedArray:
        """The array with its axes in reverse order."""
        return self.transpose()

    def __len__(self) -> int:
        if not self.ndim or self.shape[0] is None:
            raise NotTraceable(f"it asks for the length of a value of shape {self.shape}")
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"<traced {self.dtype} {self.name}>"

    # The mixin defines `__eq__`, which would remove the hash.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise NotTraceable("it decides by a value that is known as it runs; numpy.where chooses in a graph")

    def _raise_not_traceable(self, *_: Any, **__: Any) -> Any:
        raise NotTraceable("it makes a Python number, or an array, of a value that is known as it runs")

    __float__ = __int__ = __index__ = __complex__ = _raise_not_traceable
    __array__ = item = tolist = __setitem__ = _raise_not_traceable

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # These modules import this one.
        from ._ufuncs import apply_ufunc

        return apply_ufunc(self.recorder, ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from ._functions import FUNCTIONS

        record = FUNCTIONS.get(function)
        if record is None:
            raise NotTraceable(f"numpy.{function.__name__} has no counterpart in ONNX")
        return record(*args, **kwargs)

    def astype(self, dtype: Any, **_: Any) -> TracedArray:
        """Record a cast to another dtype."""
        target = np.dtype(dtype)
        if target == self.dtype:
            return self
        return self.recorder.add("Cast", self, to=onnx.helper.np_dtype_to_tensor_dtype(target))

    def transpose(self, *axes: Any) -> TracedArray:
        """Record the array with its axes in another order."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        transposed: Any = np.transpose(self, order or None)
        return cast(TracedArray, transposed)

    def reshape(self, *shape: Any, **kwargs: Any) -> TracedArray:
        """Record the array in another shape."""
        extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        reshaped: Any = np.reshape(self, extents, **kwargs)
        return cast(TracedArray, reshaped)

    def __getitem__(self, key: Any) -> TracedArray:
        from ._indexing import record_getitem

        return record_getitem(self, key)

    def copy(self, *_: Any) -> TracedArray:
        """Return the array itself, which nothing writes into."""
        return self

    def flatten(self, *_: Any) -> TracedArray:
        """Record the array with a single axis."""
        return self.reshape(-1)

    ravel = flatten

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"{name!r} of a traced array")
        function = getattr(np, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return method


_METHODS = frozenset(
    {"all", "any", "argmax", "argmin", "argsort", "clip", "cumsum", "dot", "max", "mean", "min", "prod",
     "repeat", "round", "squeeze", "std", "sum", "swapaxes", "take", "var"}
)  # fmt: skip
"""Methods that are NumPy's functions of the same name."""


def _register_with_autoray() -> None:
    """Make autoray call NumPy's functions for traced arrays."""
    import autoray

    autoray.register_backend(TracedArray, "numpy")


when_imported("autoray", _register_with_autoray)
