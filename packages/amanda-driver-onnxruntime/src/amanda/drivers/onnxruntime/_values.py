"""Values of an ONNX graph: symbols at analysis, arrays at execution, and names by which nodes read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TypeProto

from amanda.backend import when_imported
from amanda.errors import AmandaError
from onnxruntime import OrtValue

Array = NDArray[Any]
Shape = tuple[int | None, ...] | None


class OnnxSymbol:
    """A value of a graph as tools see it before a run: type, shape, and its constant value, if any.

    type: its TypeProto; None if unknown.  dtype: dtype of a tensor; None for other values.
    shape: extents, with None for an unknown one; None for an unknown rank.
    constant: the value of a constant; None for other values.  default: the value of an input that is not fed.
    root: name of the initializer that the value is, or is a cast or rearrangement of.
    compute: computes a value from initializers alone; None for other values.
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
        # Parsed once: every signature and every routine's result asks for both.
        self.dtype, self.shape = _dtype_and_shape(type)

    @classmethod
    def of_array(cls, name: str, array: Array, root: str | None = None) -> OnnxSymbol:
        """Return the symbol of a constant."""
        return cls(name, tensor_type(array.dtype, array.shape), constant=array, root=root)

    def like(self, name: str, shape_is_kept: bool = True) -> OnnxSymbol:
        """Return a symbol of the same type, without a shape unless that is kept, for a replaced value."""
        if self.dtype is None or self.type is None or shape_is_kept:
            return OnnxSymbol(name, self.type)
        return OnnxSymbol(name, tensor_type(self.dtype, None))

    def admits(self, value: Any) -> bool:
        """Return True if a fed value agrees with the known dtype and shape."""
        if self.dtype is None:
            return True
        if not isinstance(value, np.ndarray):
            return False
        # ONNX Runtime takes strings as NumPy objects, text or bytes.
        takes_text = self.dtype.kind in "OUS" and value.dtype.kind in "OUSV"
        if value.dtype != self.dtype and not takes_text:
            return False
        if self.shape is None:
            return True
        return len(self.shape) == value.ndim and all(
            expected_extent in (None, extent)
            for expected_extent, extent in zip(self.shape, value.shape, strict=True)
        )

    @property
    def static_value(self) -> Array | None:
        """The value of a constant, or of a value computed from initializers alone; None for others."""
        if self.constant is None and self.compute is not None:
            return self.compute()
        return self.constant

    @property
    def is_tensor(self) -> bool:
        """True for a value that is known to be a tensor."""
        return self.dtype is not None

    @property
    def holds_tensors(self) -> bool:
        """True for a value that is known to be a tensor, a sequence of tensors or an optional tensor."""
        return _holds_tensors(self.type)

    @property
    def ndim(self) -> int | None:
        """The number of axes of a tensor; None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def nbytes(self) -> int:
        """The memory of a tensor, with 1 for each unknown extent."""
        width = 0 if self.dtype is None else self.dtype.itemsize
        return width * prod(1 if extent is None else extent for extent in self.shape or ())

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype} {self.shape}>"


def read_value(value: Any) -> Any:
    """Return the present value of a symbol; other values as they are.

    Raises AmandaError for a value that is computed, or fed without a default.
    """
    if not isinstance(value, OnnxSymbol):
        return value
    static_value = value.static_value
    static_value = value.default if static_value is None else static_value
    if static_value is None:
        raise AmandaError(
            f"{value.name} has no value before the graph runs; read it in a routine: insert_before_op"
        )
    return static_value


def tensor_type(dtype: Any, shape: Shape) -> TypeProto:
    """Return the type of a tensor; without a shape if that is None."""
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return onnx.helper.make_tensor_type_proto(element, shape)


def _dtype_and_shape(type: TypeProto | None) -> tuple[np.dtype[Any] | None, Shape]:
    """Return dtype and shape of a tensor type; None for other types."""
    if type is None or type.WhichOneof("value") != "tensor_type" or not type.tensor_type.elem_type:
        return None, None
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(type.tensor_type.elem_type))
    if not type.tensor_type.HasField("shape"):
        return dtype, None
    extents = type.tensor_type.shape.dim
    return dtype, tuple(extent.dim_value if extent.HasField("dim_value") else None for extent in extents)


def _holds_tensors(type: TypeProto | None) -> bool:
    """Return True for the type of a tensor, and of a sequence or an optional value of tensors."""
    kind = None if type is None else type.WhichOneof("value")
    if type is None or kind not in ("tensor_type", "sequence_type", "optional_type"):
        return False
    return bool(type.tensor_type.elem_type) or _holds_tensors(getattr(type, kind).elem_type)


def _register_with_autoray() -> None:
    """Make autoray treat a symbol as a NumPy array, which routines get in its place."""
    import autoray

    autoray.register_backend(OnnxSymbol, "numpy")


when_imported("autoray", _register_with_autoray)


def names_read(node: NodeProto) -> Iterator[str]:
    """Yield the values of its graph that a node reads, also in its bodies."""
    yield from (name for name in node.input if name)
    for body in bodies_of(node):
        yield from names_captured(body)


def names_captured(graph: GraphProto) -> Iterator[str]:
    """Yield the values of graphs around that a graph reads."""
    inner_names = {entry.name for entry in (*graph.input, *graph.initializer)}
    inner_names |= {entry.values.name for entry in graph.sparse_initializer}
    for node in graph.node:
        yield from (name for name in names_read(node) if name not in inner_names)
        # Until a node of the graph has computed a name, it is that of a value of the graph around.
        inner_names.update(node.output)
    yield from (entry.name for entry in graph.output if entry.name not in inner_names)


def rename_values(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> list[NodeProto]:
    """Return copies of nodes with renamed values.  names: the new names by the old ones."""
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        _rename(copy, names)
        copies.append(copy)
    return copies


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values of a node, and in its bodies those of graphs around."""
    if not names:
        return
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for body in bodies_of(node):
        inner_names = {value.name for value in (*body.input, *body.initializer)}
        inner_names |= {name for inner_node in body.node for name in inner_node.output}
        # A name of the body hides the value of that name outside.
        outer_names = {name: new_name for name, new_name in names.items() if name not in inner_names}
        for inner_node in body.node:
            _rename(inner_node, outer_names)
        for output in body.output:
            output.name = outer_names.get(output.name, output.name)


def bodies_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the bodies of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def as_array(value: Any) -> Any:
    """Return a tensor as an array; other values, and elements smaller than a byte, unchanged."""
    # NumPy's functions return scalars for arrays without axes.
    if isinstance(value, np.generic):
        return np.asarray(value)
    if not isinstance(value, OrtValue) or not value.is_tensor():
        return value
    try:
        # Raises RuntimeError for a dtype that NumPy lacks.
        return value.numpy()
    except RuntimeError:
        return _array_of_memory(value)


def _array_of_memory(value: Any) -> Any:
    """Return a copy of the memory of an OrtValue whose dtype `OrtValue.numpy` does not support.

    The value itself, if its elements are packed or on another device.
    """
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.element_type()))
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    # Elements smaller than a byte are packed, and memory of other devices cannot be read.
    if value.device_name() != "cpu" or value.tensor_size_in_bytes() != size:
        return value
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)


def as_ort_value(value: Any) -> Any:
    """Return an array in the form that `run_with_ort_values` returns, and other values as they are."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.type.__module__ == "numpy":
        return OrtValue.ortvalue_from_numpy(value)
    element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    # NumPy has no name for the dtype, so the bits are passed as unsigned integers.
    bits = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, element)
