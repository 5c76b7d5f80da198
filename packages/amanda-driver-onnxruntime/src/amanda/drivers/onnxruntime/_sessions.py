"""Sessions that run parts of a rewritten model, with the options of the user's session and shared weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

import onnxruntime

from ._model import Model, add_outputs, array_of, initializer_of, output_types
from ._values import OnnxSymbol, as_array, bodies_of, tensor_type

if TYPE_CHECKING:
    from ._graph_runner import ScheduledStep

_BUILT_IN = frozenset(
    {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft",
     "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc", "org.pytorch.aten"}
)  # fmt: skip
"""Domains of ops that need no custom library."""


class PassedValue(NamedTuple):
    """A value that passes into a session, or out of it.

    name: its name in the session's model.  dtype: its dtype if NumPy lacks that; else None.
    """

    name: str
    dtype: Any


PassedValues = dict[str, PassedValue]
"""Values by their name in the whole model."""


class PartSession:
    """A session of the nodes of a step, which reads and computes values of the whole model.

    inputs, outputs: the values that pass into the session and out of it.
    weights: values of its weights, which the session does not own, and which have to stay alive.
    """

    def __init__(
        self, session: Any, inputs: PassedValues, outputs: PassedValues, weights: Sequence[Any]
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self._fetched = [output.name for output in outputs.values()]
        self._weights = tuple(weights)

    def run(self, values: Mapping[str, Any], options: Any) -> dict[str, Any]:
        """Run the session on values by name; return its outputs by name.

        Values of dtypes that NumPy lacks pass in wider ones.
        """
        feed = {}
        for name, (session_name, dtype) in self._inputs.items():
            value = as_array(values[name])
            # The Python interface of ONNX Runtime takes dtypes of NumPy alone. Values of others pass in a
            # wider dtype, the carrier, and a Cast in the session restores the dtype.
            feed[session_name] = value if dtype is None else value.astype(carrier_dtype(dtype))
        # The native session is called, since the stand-ins would take this run for one of the user's.
        results = self._session._sess.run(self._fetched, feed, options)
        return {
            name: value if dtype is None else value.astype(dtype)
            for (name, (_, dtype)), value in zip(self._outputs.items(), results, strict=True)
        }


class SessionFactory:
    """Creates sessions for parts of a model, with the options of the user's session."""

    def __init__(self, session: Any, model: Model) -> None:
        self._model = model
        self._providers = session.get_providers()
        options = session.get_provider_options()
        self._provider_options = [options.get(name, {}) for name in self._providers]
        self._native = session._sess
        # ONNX Runtime keeps the options of the user only in this private attribute.
        self._user_options = session._sess_options_initial
        self._ort_values: dict[str, tuple[Any, Any]] = {}  # by a weight's name, its array and OrtValue
        self._has_custom_ops = any(_is_custom(node) for node in model.proto.graph.node)

    def options(self) -> Any:
        """Return a copy of the options of the user's session, without those that write files."""
        options = self._native.session_options
        options.optimized_model_filepath = ""
        # Each session would write a profile of its own.
        options.enable_profiling = False
        return options

    def part_session(
        self,
        step: ScheduledStep,
        symbol: Callable[[str], OnnxSymbol],
        constants: Mapping[str, Any],
        extents_vary: bool,
    ) -> PartSession:
        """Return the session of a step: its nodes between casts of values whose dtype NumPy lacks.

        symbol: returns the symbol of a value.  constants: by name, those that sessions may hold.
        extents_vary: True if extents may differ from the model's, because a routine or a loop changes them.
        """
        graph = onnx.GraphProto(name="amanda")
        model_inputs = set(self._model.inputs) | self._model.overridable
        inputs, outputs = passed_values(step.inputs, symbol), passed_values(step.outputs, symbol)
        for name, (session_name, dtype) in inputs.items():
            # Inputs of the model keep the extents that it declares: `ModelCopy.fits` has checked them.
            passed_symbol = symbol(name).like(name, shape_is_kept=not extents_vary or name in model_inputs)
            type = passed_symbol.type
            if dtype is not None:
                type = tensor_type(carrier_dtype(dtype), passed_symbol.shape)
                graph.node.append(_cast_node(session_name, name, dtype))
            graph.input.append(ValueInfoProto(name=session_name, type=type))
        graph.node.extend(step.nodes)
        for name, (session_name, dtype) in outputs.items():
            if dtype is not None:
                graph.node.append(_cast_node(name, session_name, carrier_dtype(dtype)))
            graph.output.append(ValueInfoProto(name=session_name))
        step_constants = {name: constants.get(name) for name in step.constants}
        session, large_weights = self._create_session(graph, step_constants)
        return PartSession(session, inputs, outputs, large_weights)

    def infer_types(
        self, proto: ModelProto, names: Sequence[str], constants: Mapping[str, Any]
    ) -> dict[str, TypeProto]:
        """Return the types of values of the outermost graph, from a session like the user's, or {}."""
        graph = onnx.GraphProto()
        graph.CopyFrom(proto.graph)
        weights = {
            tensor.name: constants[tensor.name] if tensor.name in constants else array_of(tensor)
            for tensor in graph.initializer
        }
        # `_create_session` takes sparse ones from the model.
        weights |= {tensor.values.name: None for tensor in graph.sparse_initializer}
        for field in ("initializer", "sparse_initializer", "value_info"):
            graph.ClearField(field)
        add_outputs(graph, names)
        try:
            session, _ = self._create_session(graph, weights)
            return output_types(session, names)
        except Exception:  # the error comes up again when the copy is created, and is reported then
            return {}

    def _create_session(self, graph: onnx.GraphProto, constants: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Create a session of a graph; return it with its large weights, which have to outlive it.

        constants: by name; a sparse one is taken from the model, whatever its value here.
        """
        source = self._model.proto
        proto = ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, graph=graph)
        sparse_by_name = {entry.values.name: entry for entry in source.graph.sparse_initializer}
        large_weights: dict[str, Any] = {}
        for name, array in constants.items():
            if name in sparse_by_name:
                proto.graph.sparse_initializer.append(sparse_by_name[name])
                continue
            # Custom ops need the user's own options, to which no weights of the copy may be added.
            if self._has_custom_ops:
                proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
                continue
            tensor = initializer_of(name, array)
            proto.graph.initializer.append(tensor)
            if tensor.data_location == TensorProto.EXTERNAL:
                large_weights[name] = self._ort_value(name, array)
        with self._session_options() as options:
            if large_weights:
                options.add_external_initializers(list(large_weights), list(large_weights.values()))
            # No fallback: the copy runs on the providers of the user's session, or is refused.
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, self._providers, self._provider_options, enable_fallback=0
            )
        return session, list(large_weights.values())

    def _ort_value(self, name: str, array: Any) -> Any:
        """Return the OrtValue of a weight, which all sessions share."""
        cached_array, value = self._ort_values.get(name, (None, None))
        if cached_array is not array:
            # The OrtValue shares the memory of the array, which is kept beside it.
            value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
            self._ort_values[name] = array, value
        return value

    @contextmanager
    def _session_options(self) -> Iterator[Any]:
        """Return a context with options for a session: a copy of the user's, or those, writing no file."""
        # Custom ops need the user's own options object: copies do not know the registered library.
        user_options = self._user_options
        if not self._has_custom_ops or user_options is None:
            yield self.options()
            return
        options_before = user_options.optimized_model_filepath, user_options.enable_profiling
        user_options.optimized_model_filepath, user_options.enable_profiling = "", False
        try:
            yield user_options
        finally:
            user_options.optimized_model_filepath, user_options.enable_profiling = options_before


def _is_custom(node: NodeProto) -> bool:
    """Return True if a node, or a node in its bodies, is a custom op."""
    if node.domain not in _BUILT_IN:
        return True
    return any(_is_custom(inner) for body in bodies_of(node) for inner in body.node)


def passed_values(names: Sequence[str], symbol: Callable[[str], OnnxSymbol]) -> PassedValues:
    """Return how values pass into a session, or out of it, by their names in the whole model.

    A value of a dtype that NumPy lacks passes under another name.
    """
    value_by_name = {}
    for name in names:
        dtype = symbol(name).dtype
        is_known_to_numpy = dtype is None or dtype.type.__module__ == "numpy"
        value_by_name[name] = (
            PassedValue(name, None) if is_known_to_numpy else PassedValue(f"{name}/passed", dtype)
        )
    return value_by_name


def carrier_dtype(dtype: Any) -> Any:
    """Return a dtype of NumPy that represents all values of a dtype that NumPy lacks."""
    # NumPy lacks integers of 2 and 4 bits, and floating types of at most 16.
    if dtype.name.startswith("uint"):
        return np.dtype("uint8")
    return np.dtype("int8" if dtype.name.startswith("int") else "float32")


def _cast_node(input_name: str, output_name: str, dtype: Any) -> NodeProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return onnx.helper.make_node("Cast", [input_name], [output_name], to=element)
