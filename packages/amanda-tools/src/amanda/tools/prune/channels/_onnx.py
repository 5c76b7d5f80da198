"""ONNX models, whose channels are removed in a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any

from amanda.tools._libraries import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, inliner, numpy_helper

import amanda
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._onnx_removal import made_by, smaller_proto
from amanda.tools.prune.channels._onnx_tracing import OnnxTracing
from amanda.tools.prune.channels._plan import Plan
from amanda.tools.prune.channels._simulation import array_over_kept, selected_of_array
from amanda.tools.prune.channels._subject import Axes, Masks, Subject
from amanda.tools.prune.channels._tracing import Tracing


class OnnxModel(Subject):
    """A ModelProto or the file of one.

    proto: a copy as it is now, without functions, whose constants are all initializers.
    """

    has_gradients = False
    selected, over_kept = staticmethod(selected_of_array), staticmethod(array_over_kept)

    def __init__(self, model: ModelProto | str | PathLike[str]) -> None:
        super().__init__(model)
        try:
            given = model if isinstance(model, ModelProto) else onnx.load(fspath(model))
        except Exception as error:
            raise PruneError(
                f"ChannelPruneTool.prepare was given {fspath(model)}, which is no ONNX model that can be "  # type: ignore[arg-type]
                f"read: {error}"
            ) from error
        self.proto = _plain(given)
        graph = self.proto.graph
        held = {one.name for one in graph.initializer}
        self.inputs = [one.name for one in graph.input if one.name not in held]
        self.outputs = [one.name for one in graph.output]
        self.opset = next(one.version for one in self.proto.opset_import if one.domain in ("", "ai.onnx"))
        self.nodes = {made_by(node): node for node in graph.node}
        self.read_in_bodies = dict(_read_in_bodies(self.proto))
        self._session: tuple[ModelProto, Any] | None = None

    def __call__(self, *example: Any, **named: Any) -> Any:
        """Run a session; return its outputs."""
        feed = dict(zip(self.inputs, example, strict=False)) | named
        if len(example) > len(self.inputs) or feed.keys() != set(self.inputs):
            raise PruneError(
                f"ChannelPruneTool.prepare was given {len(example)} arrays and the names "
                f"{', '.join(named) or 'of none'}; the model's inputs are {', '.join(self.inputs)}"
            )
        import onnxruntime

        if self._session is None or self._session[0] is not self.proto:
            providers = ["CPUExecutionProvider"]
            session = onnxruntime.InferenceSession(self.proto.SerializeToString(), providers=providers)
            self._session = self.proto, session
        return self._session[1].run(None, {name: np.asarray(one) for name, one in feed.items()})

    def tracing(self) -> Tracing:
        """Return a tool that follows a run."""
        return OnnxTracing(self)

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        held = {one.name: numpy_helper.to_array(one) for one in self.proto.graph.initializer}
        return {name: one for name, one in held.items() if one.dtype.kind == "f"}

    def tensors(self) -> Mapping[str, Any]:
        """Return the floating-point initializers of the model as it was given."""
        return self._tensors

    def parameters(self) -> Mapping[str, Any]:
        """Return the floating-point initializers."""
        return self._tensors

    def masks(self, axes: Axes) -> Masks:
        """Return masks of initializers, found by name and shape."""
        found: dict[tuple[str, tuple[int, ...]], Any] = {}
        for name, axis, kept in axes:
            shape = self._tensors[name].shape
            own = kept.reshape([-1 if i == axis else 1 for i in range(len(shape))])
            found[name, shape] = found.get((name, shape), np.True_) & own
        return lambda value: None if value is None or value.shape is None else found.get(
            (value.name, value.shape)
        )  # fmt: skip

    def removal(self, plan: Plan) -> OnnxRemoval:
        """Return what puts a smaller model in the place of this one."""
        return OnnxRemoval(self, plan)

    def smaller(self, plan: Plan, optimizer: Any) -> ModelProto:
        """Return a smaller model."""
        return smaller_proto(self.proto, plan)

    def with_zeros(self, masks: Masks) -> ModelProto:
        """Return a model whose initializers have zeros."""
        made = ModelProto()
        made.CopyFrom(self.proto)
        for one in made.graph.initializer:
            mask = masks(_Named(one.name, tuple(one.dims)))
            if mask is not None:
                one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one) * mask, one.name))
        return made

    def floats(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point arrays."""
        for one in result:
            if isinstance(one, np.ndarray) and one.dtype.kind == "f":
                yield one.astype(np.float64), float(np.finfo(one.dtype).eps)

    def is_of(self, model: Any) -> bool:
        """Return True for the same ModelProto, or the same path."""
        if isinstance(model, (str, PathLike)) and isinstance(self.model, (str, PathLike)):
            return fspath(model) == fspath(self.model)
        return model is self.model

    def key(self, context: amanda.OpContext) -> Any:
        """Return the first value that a node makes, which no other node makes."""
        return made_by(context.get_op().node)


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
    shape: tuple[int, ...]


def _plain(given: ModelProto) -> ModelProto:
    """Return a copy of a model without functions, in which Constant nodes are initializers."""
    made = ModelProto()
    made.CopyFrom(inliner.inline_local_functions(given) if given.functions else given)
    nodes = list(made.graph.node)
    del made.graph.node[:]
    for node in nodes:
        told = node.attribute[0] if node.op_type == "Constant" and len(node.attribute) == 1 else None
        if told is not None and told.name == "value":
            made.graph.initializer.append(told.t)
            made.graph.initializer[-1].name = node.output[0]
        elif told is not None and told.name in _NUMBERS:
            array = np.array(onnx.helper.get_attribute_value(told), _NUMBERS[told.name])
            made.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
        else:
            made.graph.node.append(node)
    return made


_NUMBERS = {"value_float": "f4", "value_floats": "f4", "value_int": "i8", "value_ints": "i8"}


def _read_in_bodies(proto: ModelProto) -> Iterator[tuple[str, str]]:
    """Yield the values that bodies of control flow read, and the node around them."""
    for node in proto.graph.node:
        waiting = [node]
        while waiting:
            for body in _bodies(waiting.pop()):
                waiting += body.node
                yield from ((name, f"{node.op_type} {node.name}") for one in body.node for name in one.input)
                yield from ((one.name, f"{node.op_type} {node.name}") for one in body.output)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for told in node.attribute:
        if told.HasField("g"):
            yield told.g
        yield from told.graphs
