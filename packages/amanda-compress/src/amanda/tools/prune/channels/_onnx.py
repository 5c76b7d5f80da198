"""ONNX models, whose channels are removed in a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

import amanda
from amanda.tools import onnx_graph
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._onnx_removal import smaller_proto
from amanda.tools.prune.channels._onnx_tracing import OnnxTracing
from amanda.tools.prune.channels._plan import Plan
from amanda.tools.prune.channels._prunable_model import (
    Axes,
    Masks,
    PrunableModel,
    array_over_kept,
    selected_of_array,
)
from amanda.tools.prune.channels._tracing import Tracing


class OnnxModel(PrunableModel):
    """A ModelProto or the file of one.

    proto: a copy as it is now, without functions, whose constants are all initializers, and vectors of one
    node each: exporters store equal ones once, such as biases of 0.
    """

    has_gradients = False
    selected, over_kept = staticmethod(selected_of_array), staticmethod(array_over_kept)

    def __init__(self, model: ModelProto | str | PathLike[str]) -> None:
        super().__init__(model)
        proto = model if isinstance(model, ModelProto) else onnx_graph.read_onnx(model, PruneError)
        self.proto = _plain(proto)
        graph = self.proto.graph
        initializers = {value.name for value in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in initializers]
        self.outputs = [value.name for value in graph.output]
        self.opset = onnx_graph.opset_of(self.proto)
        if not self.opset:
            named = "a ModelProto" if model is proto else model
            raise PruneError(
                f"ChannelPruneTool.prepare was given {named}, which is no ONNX model: it names no version of "
                "ONNX's operators"
            )
        self.nodes = {onnx_graph.first_output_of(node): node for node in graph.node}
        self.read_in_bodies = dict(_read_in_bodies(graph))
        self._session: tuple[int, bool, Any] | None = None

    def __call__(self, *example: Any, **named: Any) -> Any:
        """Run a session that fuses nothing, so that what is compared is rounded alike; return its outputs."""
        return self._run(False, example, named)

    def time(self, *example: Any, **named: Any) -> None:
        """Run a session with the optimizations of ONNX Runtime."""
        self._run(True, example, named)

    def _run(self, optimized: bool, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        feed = dict(zip(self.inputs, example, strict=False)) | dict(named)
        if len(example) > len(self.inputs) or feed.keys() != set(self.inputs):
            raise PruneError(
                f"ChannelPruneTool.prepare was given {len(example)} arrays and the names "
                f"{', '.join(named) or 'of none'}; the model's inputs are {', '.join(self.inputs)}"
            )
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if self._session is None or self._session[:2] != (id(self.proto), optimized):
            session = onnxruntime.InferenceSession(
                self.proto.SerializeToString(), options, ["CPUExecutionProvider"]
            )
            self._session = id(self.proto), optimized, session
        return self._session[2].run(None, {name: np.asarray(array) for name, array in feed.items()})

    @contextmanager
    def as_far_as_it_runs(self, *example: Any, **named: Any) -> Iterator[None]:
        """Context in which the model ends before the first node that fails: observers see no others then."""
        whole, runs, fails = self.proto, 0, len(self.proto.graph.node)
        try:
            while fails - runs > 1:
                middle = (runs + fails) // 2
                self.proto = _first_nodes(whole, middle)
                try:
                    with amanda.disabled():
                        self(*example, **named)
                    runs = middle
                except Exception:  # of ONNX Runtime's own kinds, when it loads and when it runs
                    fails = middle
            self.proto = _first_nodes(whole, runs)
            yield
        finally:
            self.proto = whole

    def tracing(self) -> Tracing:
        """Return a tool that follows a run."""
        return OnnxTracing(self)

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.proto.graph.initializer}
        return {name: tensor for name, tensor in arrays.items() if tensor.dtype.kind == "f"}

    def tensors(self) -> Mapping[str, Any]:
        """Return the floating-point initializers of the model as it was given."""
        return self._tensors

    def parameters(self) -> Mapping[str, Any]:
        """Return the floating-point initializers."""
        return self._tensors

    def masks(self, axes: Axes) -> Masks:
        """Return masks of initializers, found by name and shape."""
        masks: dict[tuple[str, tuple[int, ...]], Any] = {}
        for name, axis, keep_mask in axes:
            shape = self._tensors[name].shape
            axis_mask = keep_mask.reshape([-1 if i == axis else 1 for i in range(len(shape))])
            masks[name, shape] = masks.get((name, shape), np.True_) & axis_mask
        return lambda value: None if value is None else masks.get((value.name, value.shape))

    def removal(self, plan: Plan) -> OnnxRemoval:
        """Return what puts a smaller model in the place of this one."""
        return OnnxRemoval(self, plan)

    def smaller(self, plan: Plan, optimizer: Any) -> ModelProto:
        """Return a smaller model."""
        return smaller_proto(self.proto, plan)

    def with_zeros(self, masks: Masks) -> ModelProto:
        """Return a model whose initializers have zeros."""
        masked = ModelProto()
        masked.CopyFrom(self.proto)
        for initializer in masked.graph.initializer:
            mask = masks(_Named(initializer.name, tuple(initializer.dims)))
            if mask is not None:
                initializer.CopyFrom(
                    numpy_helper.from_array(numpy_helper.to_array(initializer) * mask, initializer.name)
                )
        return masked

    def floats(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point arrays."""
        for array in result:
            if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                yield array.astype(np.float64), float(np.finfo(array.dtype).eps)

    def is_of(self, model: Any) -> bool:
        """Return True for the same ModelProto, or the same path."""
        if isinstance(model, (str, PathLike)) and isinstance(self.model, (str, PathLike)):
            return fspath(model) == fspath(self.model)
        return model is self.model

    def key(self, context: amanda.OpContext) -> Any:
        """Return the first value that a node makes, which no other node makes."""
        return onnx_graph.first_output_of(context.get_op().node)

    def reads(self, context: amanda.OpContext) -> Sequence[Any]:
        """Return inputs by the names that they have in `proto`, also in a session that was made elsewhere."""
        node = self.nodes.get(self.key(context))
        names = iter(() if node is None else node.input)

        def named(value: Any) -> Any:
            if isinstance(value, list):
                return [named(item) for item in value]
            name = next(names, "")
            return None if value is None else _Named(name, value.shape)

        return [named(value) for value in context.get_inputs()]


class OnnxRemoval:
    """Puts a smaller model in the place of an OnnxModel's, and puts that back."""

    def __init__(self, model: OnnxModel, plan: Plan) -> None:
        self._model, self._plan, self._before = model, plan, model.proto

    def apply(self) -> None:
        """Make the model smaller."""
        self._model.proto = smaller_proto(self._before, self._plan)

    def undo(self) -> None:
        """Put the whole model back."""
        self._model.proto = self._before


@dataclass(frozen=True)
class _Named:
    name: str
    shape: tuple[int | None, ...] | None


def _plain(original: ModelProto) -> ModelProto:
    """Return a copy of a model without functions, in which Constant nodes are initializers."""
    plain = ModelProto()
    plain.CopyFrom(onnx_graph.inlined(original))
    nodes = list(plain.graph.node)
    del plain.graph.node[:]
    for node in nodes:
        constant = onnx_graph.constant_of(node)
        if constant is None:
            plain.graph.node.append(node)
        else:
            plain.graph.initializer.append(constant)
    _part_vectors(plain.graph)
    return plain


def _part_vectors(graph: GraphProto) -> None:
    """Give each node that reads a vector of floating-point numbers an initializer of its own."""
    vectors = {
        initializer.name: initializer for initializer in graph.initializer if len(initializer.dims) == 1
    }
    read_names = {name for name, _ in _read_in_bodies(graph)}
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in read_names and name in vectors and vectors[name].data_type in _FLOATS:
                graph.initializer.append(vectors[name])
                node.input[i] = graph.initializer[-1].name = f"{name}/{onnx_graph.first_output_of(node)}"
            read_names.add(name)


_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


_FATAL = 4
"""Severity below which ONNX Runtime logs nothing: trials fail on purpose."""


def _first_nodes(whole: ModelProto, count: int) -> ModelProto:
    """Return a model of the first nodes, which returns what none of these reads."""
    nodes = whole.graph.node[:count]
    read = {name for node in nodes for name in node.input}
    ends = [name for node in nodes for name in node.output if name and name not in read]
    partial = ModelProto()
    partial.CopyFrom(whole)
    for field in ("node", "output"):
        partial.graph.ClearField(field)
    partial.graph.node.extend(nodes)
    partial.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ends)
    return partial


def _read_in_bodies(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the values that bodies of control flow read, and the node around them."""
    for node in graph.node:
        yield from ((name, f"{node.op_type} {node.name}") for name in onnx_graph.captures_of(node))
