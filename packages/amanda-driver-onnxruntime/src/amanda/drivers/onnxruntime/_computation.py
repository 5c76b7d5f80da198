"""One node as a function of its own."""

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


def computation(node: NodeProto, inputs: Side, model: Model) -> Callable[[], Computation] | None:
    """Return what makes a function that computes the node; None of one that holds graphs."""
    if any(one.type in (one.GRAPH, one.GRAPHS) for one in node.attribute):
        return None
    sizes, imports, version = tuple(inputs.sizes), list(model.proto.opset_import), model.proto.ir_version
    return lambda: Computation(node, sizes, imports, version)


class Computation:
    """Runs a node on other inputs, in the order of its schema; one session for each signature of types."""

    def __init__(
        self, node: NodeProto, sizes: Sequence[int | None], imports: Sequence[Any], ir_version: int
    ) -> None:
        self._node, self._sizes = node, sizes
        self._imports, self._version = imports, ir_version
        self._sessions: dict[Any, Any] = {}

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Return what the node gives: one array, or a list where it gives several."""
        flat = [one for value in inputs for one in (value if isinstance(value, (list, tuple)) else (value,))]
        arrays = [None if one is None else np.asarray(one) for one in flat]
        key = tuple(None if one is None else one.dtype.name for one in arrays)
        if key not in self._sessions:
            self._sessions[key] = self._session(arrays)
        feed = {f"i{i}": one for i, one in enumerate(arrays) if one is not None}
        results = self._sessions[key].run(None, feed)
        return results[0] if len(results) == 1 else results

    def _session(self, arrays: Sequence[Any]) -> Any:
        node = NodeProto()
        node.CopyFrom(self._node)
        node.input[:] = ["" if one is None else f"i{i}" for i, one in enumerate(arrays)]
        given = [
            ValueInfoProto(name=f"i{i}", type=tensor_type(one.dtype, None))
            for i, one in enumerate(arrays)
            if one is not None
        ]
        gives = [ValueInfoProto(name=name) for name in node.output if name]
        held: list[TensorProto] = []
        graph = onnx.helper.make_graph([node], "op", given, gives, held)
        made = onnx.helper.make_model(graph, opset_imports=self._imports, ir_version=self._version)
        return onnxruntime.InferenceSession(
            made.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
        )
