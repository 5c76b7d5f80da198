"""Nodes as they are recorded, with the types that ONNX infers for what they give."""

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
"""The version of ONNX' own ops from which recorded nodes are valid."""


class Recorder:
    """Records nodes of one opset.

    nodes: in order.  constants: arrays that they read, by name.  values: all that there are.
    prefix: of all names.
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
        """A value that is there already."""
        from ._array import TracedArray

        made = TracedArray(self, name, type)
        self.values.append(made)
        return made

    def constant(self, value: Any) -> TracedArray:
        """A constant as a value."""
        array = np.asarray(value)
        name = f"{self.prefix}/constant{len(self.constants)}"
        self.constants[name] = array
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return self.value(name, onnx.helper.make_tensor_type_proto(element, array.shape))

    def add(self, op_type: str, *inputs: TracedArray | None, **attributes: Any) -> TracedArray:
        """Record a node; what it gives first."""
        return self.add_all(op_type, inputs, 1, **attributes)[0]

    def add_all(
        self, op_type: str, inputs: Sequence[TracedArray | None], outputs: int, **attributes: Any
    ) -> list[TracedArray]:
        """Record a node; all that it gives.

        Raises NotTraceable where ONNX has no such node for these types.
        """
        stem = f"{self.prefix}/{op_type}{len(self.nodes)}"
        names = [stem if outputs == 1 else f"{stem}:{i}" for i in range(outputs)]
        given = [one.name if one is not None else "" for one in inputs]
        node = onnx.helper.make_node(op_type, given, names, stem, **attributes)
        try:
            types = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(op_type, self.opset, ""),
                node,
                {one.name: one.type for one in inputs if one is not None},
                {
                    one.name: numpy_helper.from_array(self.constants[one.name], one.name)
                    for one in inputs
                    if one is not None and one.name in self.constants and one.size_is_small
                },
                opset_imports=[onnx.helper.make_opsetid("", self.opset)],
            )
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise NotTraceable(f"{op_type} of ONNX does not take it: {reason}") from error
        self.nodes.append(node)
        return [self.value(name, types[name]) for name in names]
