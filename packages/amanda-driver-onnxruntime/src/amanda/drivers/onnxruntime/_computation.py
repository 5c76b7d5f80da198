"""Nodes computed by themselves: as `original` of a replacement, and on constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto, ValueInfoProto

import onnxruntime

from ._model import session_options
from ._values import Array, OnnxSymbol, tensor_type

if TYPE_CHECKING:
    from amanda.backend import Side

    from ._model import Model


def computation_of(node: NodeProto, inputs: Side, model: Model) -> Callable[[], Computation] | None:
    """Return a function that creates the computation of a node of a model; None for a node with bodies."""
    if any(attribute.type in (attribute.GRAPH, attribute.GRAPHS) for attribute in node.attribute):
        return None
    sizes = tuple(inputs.sizes)
    opset_imports, ir_version = list(model.proto.opset_import), model.proto.ir_version
    return lambda: Computation(node, sizes, opset_imports, ir_version)


class Computation:
    """Runs a node on inputs in the order of its schema, in a session on the CPU for each set of dtypes."""

    def __init__(
        self, node: NodeProto, sizes: Sequence[int | None], imports: Sequence[Any], ir_version: int
    ) -> None:
        self._node, self._sizes = node, sizes
        self._imports, self._version = imports, ir_version
        # A session is slow to create, and its input types are fixed.
        self._sessions: dict[Any, Any] = {}

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Return the node's output as an array, or several outputs as a list.

        inputs: a list for a variadic input, None for an optional one that is left out.
        """
        flat: list[Any] = []
        for value in inputs:
            flat += value if isinstance(value, (list, tuple)) else [value]
        arrays = [None if element is None else np.asarray(element) for element in flat]
        key = tuple(None if element is None else element.dtype.name for element in arrays)
        if key not in self._sessions:
            self._sessions[key] = self._create_session(arrays)
        feed = {f"i{i}": element for i, element in enumerate(arrays) if element is not None}
        results = self._sessions[key].run(None, feed)
        return results[0] if len(results) == 1 else results

    def _create_session(self, arrays: Sequence[Any]) -> Any:
        """Return a session of a model with the node alone, for inputs of these dtypes."""
        node = NodeProto()
        node.CopyFrom(self._node)
        # An empty name stands for an optional input that is left out.
        node.input[:] = ["" if array is None else f"i{i}" for i, array in enumerate(arrays)]
        inputs = [
            ValueInfoProto(name=f"i{i}", type=tensor_type(array.dtype, None))
            for i, array in enumerate(arrays)
            if array is not None
        ]
        outputs = [ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "op", inputs, outputs)
        model = onnx.helper.make_model(graph, opset_imports=self._imports, ir_version=self._version)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
        )


def rearrange_constant(node: NodeProto, inputs: Sequence[OnnxSymbol | None]) -> Array | None:
    """Return the read-only result of a node that only rearranges a constant; None for other nodes.

    None also for a dtype that NumPy lacks.  The result may be a view of the constant.
    """
    rearrange = REARRANGEMENTS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    arrays = [None if symbol is None else symbol.constant for symbol in inputs]
    if rearrange is None or not arrays or any(array is None for array in arrays):
        return None
    operand = arrays[0]
    if operand is None or operand.dtype.type.__module__ != "numpy":  # a dtype that NumPy lacks
        return None
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    array = np.asarray(rearrange(*arrays, **attributes))
    array.flags.writeable = False
    return array


def _transpose(array: Any, perm: Any = None) -> Any:
    return array.transpose(perm)


def _reshape(array: Any, shape: Any, allowzero: int = 0) -> Any:
    """Reshape as ONNX does: 0 keeps the input's extent there, unless `allowzero` is set."""
    extents = [
        array.shape[i] if extent == 0 and not allowzero else int(extent) for i, extent in enumerate(shape)
    ]
    return array.reshape(extents)


def _flatten(array: Any, axis: int = 1) -> Any:
    split_axis = axis if axis >= 0 else array.ndim + axis
    return array.reshape(prod(array.shape[:split_axis]), prod(array.shape[split_axis:]))


def _squeeze(array: Any, axes: Any = None) -> Any:
    return array.squeeze(None if axes is None else tuple(int(axis) for axis in axes))


def _unsqueeze(array: Any, axes: Any = ()) -> Any:
    return np.expand_dims(array, tuple(int(axis) for axis in axes))


REARRANGEMENTS: dict[str, Any] = {
    "Identity": lambda array: array.view(),
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}
"""For each op type that only rearranges elements, a function of its inputs and attributes."""

_CASTS = frozenset({"Cast", "CastLike", "DequantizeLinear"})


def keeps_elements(node: NodeProto) -> bool:
    """Return True for a node that rearranges or casts its first input."""
    return node.domain in ("", "ai.onnx") and (node.op_type in REARRANGEMENTS or node.op_type in _CASTS)
