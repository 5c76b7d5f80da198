"""Sessions that run parts of a rewritten model, with the options of the user's own and shared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

import onnxruntime

from ._model import Model, array_of, referred
from ._names import bodies_of
from ._schedule import Step
from ._symbols import Symbol, tensor_type
from ._types import add_outputs, types_told
from ._values import as_array

_BUILT_IN = frozenset(
    {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft",
     "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc", "org.pytorch.aten"}
)  # fmt: skip
"""Domains of ops that no library of the user's has to be registered for."""


Passed = dict[str, tuple[str, Any]]
"""By the name of a value, its name in a session's model, and its dtype where another stands for it there."""


class Part:
    """The session of one step.

    inputs, outputs: what it is given and gives, each with the name that it has there, and for elements that
    NumPy lacks the type that stands for it there.  held: the weights, whose memory it does not own.
    """

    def __init__(self, session: Any, inputs: Passed, outputs: Passed, held: Sequence[Any]) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self._fetched = [name for name, _ in outputs.values()]
        self._held = tuple(held)

    def run(self, values: Mapping[str, Any], options: Any) -> dict[str, Any]:
        """Return what it gives by name, of values by name."""
        feed = {}
        for name, (given, dtype) in self._inputs.items():
            value = as_array(values[name])
            feed[given] = value if dtype is None else value.astype(carrier(dtype))
        results = self._session._sess.run(self._fetched, feed, options)
        return {
            name: value if dtype is None else value.astype(dtype)
            for (name, (_, dtype)), value in zip(self._outputs.items(), results, strict=True)
        }


class Sessions:
    """Makes sessions that are like the user's, for one model."""

    def __init__(self, session: Any, model: Model) -> None:
        self._model = model
        self._providers = session.get_providers()
        options = session.get_provider_options()
        self._provider_options = [options.get(name, {}) for name in self._providers]
        self._native = session._sess
        self._initial = session._sess_options_initial
        self._values: dict[str, tuple[Any, Any]] = {}
        self._is_custom = any(_is_custom(node) for node in model.proto.graph.node)

    def options(self) -> Any:
        """A copy of the options of the user's session, for one that writes no files."""
        made = self._native.session_options
        made.optimized_model_filepath = ""
        made.enable_profiling = False
        return made

    def part(
        self, step: Step, symbol: Callable[[str], Symbol], constants: Mapping[str, Any], free: bool
    ) -> Part:
        """The session of a step; free: whether extents may be others than the model says."""
        graph = onnx.GraphProto(name="amanda")
        given = set(self._model.inputs) | self._model.overridable
        inputs, outputs = passed(step.inputs, symbol), passed(step.outputs, symbol)
        for name, (own, dtype) in inputs.items():
            known = symbol(name).like(name, shape_is_kept=not free or name in given)
            type = known.type if dtype is None else tensor_type(carrier(dtype), known.shape)
            graph.input.append(ValueInfoProto(name=own, type=type))
            if dtype is not None:
                graph.node.append(_cast(own, name, dtype))
        graph.node.extend(step.nodes)
        for name, (own, dtype) in outputs.items():
            if dtype is not None:
                graph.node.append(_cast(name, own, carrier(dtype)))
            graph.output.append(ValueInfoProto(name=own))
        session, held = self._made(graph, {name: constants.get(name) for name in step.constants})
        return Part(session, inputs, outputs, held)

    def types(
        self, proto: ModelProto, names: Sequence[str], constants: Mapping[str, Any]
    ) -> dict[str, TypeProto]:
        """Types of values of the outermost graph, as a session like the user's tells them."""
        graph = onnx.GraphProto()
        graph.CopyFrom(proto.graph)
        held = {
            one.name: constants[one.name] if one.name in constants else array_of(one)
            for one in graph.initializer
        }
        held |= {one.values.name: None for one in graph.sparse_initializer}
        for field in ("initializer", "sparse_initializer", "value_info"):
            graph.ClearField(field)
        add_outputs(graph, names)
        try:
            return types_told(self._made(graph, held)[0], names)
        except Exception:  # what it refuses, it says when a copy is made
            return {}

    def _made(self, graph: onnx.GraphProto, constants: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        source = self._model.proto
        proto = ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, graph=graph)
        sparse = {one.values.name: one for one in source.graph.sparse_initializer}
        apart: dict[str, Any] = {}
        for name, array in constants.items():
            if name in sparse:
                proto.graph.sparse_initializer.append(sparse[name])
                continue
            if self._is_custom:
                proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
                continue
            tensor = referred(name, array)
            proto.graph.initializer.append(tensor)
            if tensor.data_location == TensorProto.EXTERNAL:
                apart[name] = self._value(name, array)
        with self._settings() as options:
            if apart:
                options.add_external_initializers(list(apart), list(apart.values()))
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, self._providers, self._provider_options, enable_fallback=0
            )
        return session, list(apart.values())

    def _value(self, name: str, array: Any) -> Any:
        """The value of a weight, one for all sessions."""
        known = self._values.get(name)
        if known is None or known[0] is not array:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
            known = self._values[name] = array, value
        return known[1]

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
    return any(_is_custom(inner) for body in bodies_of(node) for inner in body.node)


def passed(names: Sequence[str], symbol: Callable[[str], Symbol]) -> Passed:
    """The way in which values pass into a session, or out of it."""
    dtypes = {name: symbol(name).dtype for name in names}
    return {
        name: (name, None) if dtype is None or dtype.type.__module__ == "numpy" else (f"{name}/passed", dtype)
        for name, dtype in dtypes.items()
    }


def carrier(dtype: Any) -> Any:
    """The type of NumPy that holds every value of one that NumPy lacks."""
    whole = next((kind for kind in ("uint", "int") if dtype.name.startswith(kind)), None)
    return np.dtype("float32" if whole is None else f"{whole}8")


def _cast(given: str, made: str, dtype: Any) -> NodeProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return onnx.helper.make_node("Cast", [given], [made], to=element)
