"""Sessions that run parts of a rewritten model, with the options of the user's own and shared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

import onnxruntime

from ._model import Model, referred
from ._schedule import Step
from ._symbols import Symbol

_BUILT_IN = frozenset(
    {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft",
     "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc", "org.pytorch.aten"}
)  # fmt: skip
"""Domains of ops that no library of the user's has to be registered for."""


class Part:
    """The session of one step.

    names: of what it is given.  outputs: of what it gives.  by_value: whether it has to give OrtValues, as
    of element types that NumPy lacks.
    """

    def __init__(self, session: Any, step: Step, by_value: bool) -> None:
        self.session = session
        self.names = step.inputs
        self.outputs = step.outputs
        self.by_value = by_value


class Sessions:
    """Makes sessions that are like the user's, for one model."""

    def __init__(self, session: Any, model: Model) -> None:
        self._model = model
        self._providers = session.get_providers()
        options = session.get_provider_options()
        self._provider_options = [options.get(name, {}) for name in self._providers]
        self._native = session._sess
        self._initial = session._sess_options_initial
        self._values: dict[str, Any] = {}
        self._is_custom = any(_is_custom(node) for node in model.proto.graph.node)

    def options(self) -> Any:
        """A copy of the options of the user's session, for one that writes no files."""
        made = self._native.session_options
        made.optimized_model_filepath = ""
        made.enable_profiling = False
        return made

    def part(self, step: Step, symbol: Callable[[str], Symbol], free: bool) -> Part:
        """The session of a step; free: whether extents may be others than the model says."""
        graph = onnx.GraphProto(name="amanda")
        graph.node.extend(step.nodes)
        given = set(self._model.inputs) | self._model.overridable
        for name in step.inputs:
            known = symbol(name)
            known = known.like(name, shape_is_kept=not free or name in given)
            graph.input.append(ValueInfoProto(name=name, type=known.type))
        graph.output.extend(ValueInfoProto(name=name) for name in step.outputs)
        by_value = any(_is_exotic(symbol(name)) for name in step.outputs)
        return Part(self._made(graph, step.constants, symbol), step, by_value)

    def _made(self, graph: onnx.GraphProto, constants: Sequence[str], symbol: Callable[[str], Symbol]) -> Any:
        source = self._model.proto
        proto = ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, graph=graph)
        sparse = {one.values.name: one for one in source.graph.sparse_initializer}
        apart: dict[str, Any] = {}
        for name in constants:
            if name in sparse:
                proto.graph.sparse_initializer.append(sparse[name])
                continue
            array: Any = symbol(name).constant
            if self._is_custom:
                proto.graph.initializer.append(numpy_helper.from_array(array, name))
                continue
            tensor = referred(name, array)
            proto.graph.initializer.append(tensor)
            if tensor.data_location == TensorProto.EXTERNAL:
                apart[name] = self._value(name, array)
        with self._settings() as options:
            if apart:
                options.add_external_initializers(list(apart), list(apart.values()))
            return onnxruntime.InferenceSession(
                proto.SerializeToString(), options, self._providers, self._provider_options, enable_fallback=0
            )

    def _value(self, name: str, array: Any) -> Any:
        """The one value of a weight that all sessions share."""
        if self._model.constants.get(name) is not array:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array)
        if name not in self._values:
            self._values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        return self._values[name]

    @contextmanager
    def _settings(self) -> Iterator[Any]:
        """Options for a session; with custom ops the user's own object, which alone knows their library."""
        own = self._initial
        if not self._is_custom or own is None:
            yield self.options()
            return
        before = own.optimized_model_filepath, own.enable_profiling
        own.optimized_model_filepath, own.enable_profiling = "", False
        try:
            yield own
        finally:
            own.optimized_model_filepath, own.enable_profiling = before


def _is_custom(node: NodeProto) -> bool:
    if node.domain not in _BUILT_IN:
        return True
    return any(
        _is_custom(inner)
        for attribute in node.attribute
        for body in ([attribute.g] if attribute.HasField("g") else attribute.graphs)
        for inner in body.node
    )


def _is_exotic(symbol: Symbol) -> bool:
    """Whether it is a tensor of an element type that NumPy lacks."""
    is_tensor = symbol.type is not None and symbol.type.WhichOneof("value") == "tensor_type"
    return is_tensor and (symbol.dtype is None or symbol.dtype.type.__module__ != "numpy")
