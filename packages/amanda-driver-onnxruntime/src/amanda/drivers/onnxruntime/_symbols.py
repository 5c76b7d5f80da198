"""Values of a graph as analysis meets them: a name, and what is known of the type."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TypeProto

from amanda.backend import when_imported
from amanda.errors import AmandaError

Array = NDArray[Any]
Shape = tuple[int | None, ...] | None


class Symbol:
    """One value of a graph.

    type: its TypeProto; None where that is not known.  dtype: of a tensor's elements, None where it is no
    tensor.  shape: None for an extent that is known at execution alone, and for an unknown rank.
    constant: what it always is; None where it is computed or given.  default: what a graph's input is where
    it is not given.  root: name of the initializer that it is, or is made of alone.
    compute: gives the value of what nodes make of initializers alone; None for other values.
    """

    __slots__ = ("__weakref__", "compute", "constant", "default", "dtype", "name", "root", "shape", "type")

    def __init__(
        self,
        name: str,
        type: TypeProto | None = None,
        constant: Array | None = None,
        default: Array | None = None,
        root: str | None = None,
    ) -> None:
        self.name = name
        self.type = type
        self.constant = constant
        self.default = default
        self.root = root
        self.compute: Callable[[], Array] | None = None
        self.dtype, self.shape = _of_tensor(type)

    @classmethod
    def of_array(cls, name: str, array: Array, root: str | None = None) -> Symbol:
        """The symbol of a constant."""
        return cls(name, tensor_type(array.dtype, array.shape), constant=array, root=root)

    def like(self, name: str, shape_is_kept: bool = True) -> Symbol:
        """A symbol of the same type for a value that takes the place of this one."""
        if self.dtype is None or self.type is None or shape_is_kept:
            return Symbol(name, self.type)
        return Symbol(name, tensor_type(self.dtype, None))

    def admits(self, value: Any) -> bool:
        """Return True if a value is of the type and shape that are known."""
        if self.dtype is None:
            return True
        if not isinstance(value, np.ndarray) or (value.dtype != self.dtype and self.dtype.kind not in "OUS"):
            return False
        return self.shape is None or (
            len(self.shape) == value.ndim
            and all(one in (None, extent) for one, extent in zip(self.shape, value.shape, strict=True))
        )

    @property
    def known(self) -> Array | None:
        """Return what it always is, or is made of initializers alone; None where the model has to run."""
        if self.constant is None and self.compute is not None:
            return self.compute()
        return self.constant

    @property
    def is_tensor(self) -> bool:
        """Return True if it is known to be a tensor."""
        return self.dtype is not None

    @property
    def holds_tensors(self) -> bool:
        """Return whether it is known to be a tensor, or a sequence of tensors or an optional one."""
        return _holds_tensors(self.type)

    @property
    def ndim(self) -> int | None:
        """Return how many axes a tensor has; None where that is not known."""
        return None if self.shape is None else len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return how much memory a tensor takes, where extents that are not known count as 1."""
        width = 0 if self.dtype is None else self.dtype.itemsize
        return width * prod(1 if one is None else one for one in self.shape or ())

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype} {self.shape}>"


def read_value(value: Any) -> Any:
    """The present value of a symbol.

    Raises AmandaError where it is computed, or given to the graph.
    """
    if not isinstance(value, Symbol):
        return value
    known = value.known
    known = value.default if known is None else known
    if known is None:
        raise AmandaError(
            f"{value.name} has no value before the graph runs; read it in a routine: insert_before_op"
        )
    return known


def tensor_type(dtype: Any, shape: Shape) -> TypeProto:
    """The type of a tensor; without a shape, where that is None."""
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return onnx.helper.make_tensor_type_proto(element, shape)


def _of_tensor(type: TypeProto | None) -> tuple[np.dtype[Any] | None, Shape]:
    if type is None or type.WhichOneof("value") != "tensor_type" or not type.tensor_type.elem_type:
        return None, None
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(type.tensor_type.elem_type))
    if not type.tensor_type.HasField("shape"):
        return dtype, None
    extents = type.tensor_type.shape.dim
    return dtype, tuple(one.dim_value if one.HasField("dim_value") else None for one in extents)


def _holds_tensors(type: TypeProto | None) -> bool:
    kind = None if type is None else type.WhichOneof("value")
    if type is None or kind not in ("tensor_type", "sequence_type", "optional_type"):
        return False
    return bool(type.tensor_type.elem_type) or _holds_tensors(getattr(type, kind).elem_type)


def _dispatch() -> None:
    """Make autoray, where a tool uses it, take a symbol for what routines are given in its place."""
    import autoray

    autoray.register_backend(Symbol, "numpy")


when_imported("autoray", _dispatch)
