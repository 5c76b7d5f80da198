"""A node as a function, for the `original` of a replacement and for static values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto

import onnxruntime

from ._options import session_options
from ._symbols import tensor_type

if TYPE_CHECKING:
    from amanda.backend import Side

    from ._model import Model


def computation_of(node: NodeProto, inputs: Side, model: Model) -> Callable[[], Computation] | None:
    """Return a function that creates the computation of a node; None for a node with bodies."""
    if any(attribute.type in (attribute.GRAPH, attribute.GRAPHS) for attribute in node.attribute):
        return None
    sizes, imports, version = tuple(inputs.sizes), list(model.proto.opset_import), model.proto.ir_version
    return lambda: Computation(node, sizes, imports, version)


class Computation:
    """Runs a node on inputs in the order of its schema, in a session for each combination of dtypes."""

    def __init__(
        self, node: NodeProto, sizes: Sequence[int | None], imports: Sequence[Any], ir_version: int
    ) -> None:
        self._node, self._sizes = node, sizes
        self._imports, self._version = imports, ir_version
        # A session is slow to create, and its input types are fixed.
        self._sessions: dict[Any, Any] = {}

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Return the node's output as an array, or several outputs as a list."""
        flat = [
            element
            for value in inputs
            for element in (value if isinstance(value, (list, tuple)) else (value,))
        ]
        arrays = [None if element is None else np.asarray(element) for element in flat]
        key = tuple(None if element is None else element.dtype.name for element in arrays)
        if key not in self._sessions:
            self._sessions[key] = self._session(arrays)
        feed = {f"i{i}": element for i, element in enumerate(arrays) if element is not None}
        results = self._sessions[key].run(None, feed)
        return results[0] if len(results) == 1 else results

    def _session(self, arrays: Sequence[Any]) -> Any:
        """Return a session of a model with the node alone, for inputs of these dtypes."""
        node = NodeProto()
        node.CopyFrom(self._node)
        node.input[:] = ["" if array is None else f"i{i}" for i, array in enumerate(arrays)]
        inputs = [
            ValueInfoProto(name=f"i{i}", type=tensor_type(array.dtype, None))
            for i, array in enumerate(arrays)
            if array is not None
        ]
        outputs = [ValueInfoProto(name=name) for name in node.output if name]
        initializers: list[TensorProto] = []
        graph = onnx.helper.make_graph([node], "op", inputs, outputs, initializers)
        model = onnx.helper.make_model(graph, opset_imports=self._imports, ir_version=self._version)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
        )
