"""The recorder of nodes, with the types that ONNX infers for their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto, TypeProto, numpy_helper

from amanda.backend import NotTraceable

if TYPE_CHECKING:
    from ._array import TracedArray

LEAST_OPSET = 13
"""The lowest opset in which recorded nodes are valid."""


class NodeRecorder:
    """Records nodes of an opset.

    nodes: the recorded nodes, in order.  constants: arrays that they read, by name.
    values: all traced arrays.  prefix: prefix of all names.
    """

    def __init__(self, prefix: str, opset: int) -> None:
        if opset < LEAST_OPSET:
            raise NotTraceable(
                f"the model has opset {opset}, recorded nodes need {LEAST_OPSET}: convert it with "
                f"onnx.version_converter.convert_version(model, {LEAST_OPSET})"
            )
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.values: list[TracedArray] = []

    def value(self, name: str, type: TypeProto) -> TracedArray:
        """Add an existing value of the graph; return its traced array."""
        from ._array import TracedArray

        array = TracedArray(self, name, type)
        self.values.append(array)
        return array

    def constant(self, value: Any) -> TracedArray:
        """Add a constant; return its traced array."""
        array = np.asarray(value)
        name = f"{self.prefix}/constant{len(self.constants)}"
        self.constants[name] = array
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return self.value(name, onnx.helper.make_tensor_type_proto(element, array.shape))

    def add(self, op_type: str, *inputs: TracedArray | None, **attributes: Any) -> TracedArray:
        """Record a node; return its first output."""
        return self.add_all(op_type, inputs, 1, **attributes)[0]

    def add_all(
        self, op_type: str, inputs: Sequence[TracedArray | None], outputs: int, **attributes: Any
    ) -> list[TracedArray]:
        """Record a node; return all its outputs.

        Raises NotTraceable where ONNX has no such node for these types.
        """
        stem = f"{self.prefix}/{op_type}{len(self.nodes)}"
        names = [stem if outputs == 1 else f"{stem}:{i}" for i in range(outputs)]
        input_names = [array.name if array is not None else "" for array in inputs]
        node = onnx.helper.make_node(op_type, input_names, names, stem, **attributes)
        try:
            # Small constants are passed along: shapes and axes decide the types of outputs.
            types = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(op_type, self.opset, ""),
                node,
                {array.name: array.type for array in inputs if array is not None},
                {
                    array.name: numpy_helper.from_array(self.constants[array.name], array.name)
                    for array in inputs
                    if array is not None and array.name in self.constants and array.size_is_small
                },
                opset_imports=[onnx.helper.make_opsetid("", self.opset)],
            )
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise NotTraceable(f"{op_type} of ONNX does not take it: {reason}") from error
        self.nodes.append(node)
        return [self.value(name, types[name]) for name in names]
