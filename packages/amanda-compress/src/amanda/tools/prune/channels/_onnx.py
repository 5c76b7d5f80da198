"""ONNX models, whose channels are removed in a copy: smaller initializers, and attributes that say sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any, NamedTuple, cast

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

import amanda
from amanda.tools import onnx_graph
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._onnx_tracing import OnnxTracing
from amanda.tools.prune.channels._plan import RemovalPlan
from amanda.tools.prune.channels._prunable_model import (
    Axes,
    Masks,
    PrunableModel,
    TracedOp,
    Tracing,
    compute_array_over_kept,
    selected_of_array,
)


class _CachedSession(NamedTuple):
    """A session of a model as it was, with or without ONNX Runtime's optimisations."""

    proto: ModelProto
    is_optimized: bool
    session: Any


class OnnxModel(PrunableModel):
    """A ModelProto or the file of one.

    proto: a copy as it is now, without functions, whose constants are all initializers, and vectors of one
    node each: exporters store equal ones once, such as biases of 0.
    """

    has_gradients = False
    selected, compute_over_kept = staticmethod(selected_of_array), staticmethod(compute_array_over_kept)

    def __init__(self, model: ModelProto | str | PathLike[str]) -> None:
        super().__init__(model)
        proto = model if isinstance(model, ModelProto) else onnx_graph.read_onnx(model, PruneError)
        self.proto = _inline_constants(proto)
        graph = self.proto.graph
        initializers = {value.name for value in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in initializers]
        self.outputs = [value.name for value in graph.output]
        self.opset = onnx_graph.opset_of(self.proto)
        if not self.opset:
            description = "a ModelProto" if model is proto else model
            raise PruneError(
                f"ChannelPruneTool.prepare was given {description}, which is no ONNX model: it names no "
                "version of ONNX's operators"
            )
        self.nodes = {onnx_graph.first_output_of(node): node for node in graph.node}
        self.read_in_bodies = dict(_read_in_bodies(graph))  # by value, the node whose body reads it
        self._session: _CachedSession | None = None

    def __call__(self, *example: Any, **kwargs: Any) -> Any:
        """Run a session that fuses nothing, so that compared outputs are rounded alike; return these."""
        return self._run(example, kwargs, is_optimized=False)

    def run_to_completion(self, *example: Any, **kwargs: Any) -> None:
        """Run a session with the optimizations of ONNX Runtime."""
        self._run(example, kwargs, is_optimized=True)

    def _run(self, example: Sequence[Any], kwargs: Mapping[str, Any], is_optimized: bool) -> Any:
        """Return the outputs of the model as it is now; raise PruneError for inputs of other names or number.

        The session, on the host, is cached until the model or `is_optimized` is another.
        """
        feed = dict(zip(self.inputs, example, strict=False)) | dict(kwargs)
        if len(example) > len(self.inputs) or feed.keys() != set(self.inputs):
            raise PruneError(
                f"ChannelPruneTool.prepare was given {len(example)} arrays and the names "
                f"{', '.join(kwargs) or 'of none'}; the model's inputs are {', '.join(self.inputs)}"
            )
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # Trials of a removal fail on purpose, and ONNX Runtime would print each failure.
        options.log_severity_level = _FATAL
        if not is_optimized:
            # Fused nodes have no rules, and round otherwise than the nodes that they replace.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # A session takes seconds to build, and a latency budget calls one many times.
        cached = self._session
        if cached is None or cached.proto is not self.proto or cached.is_optimized != is_optimized:
            session = onnxruntime.InferenceSession(
                self.proto.SerializeToString(), options, ["CPUExecutionProvider"]
            )
            cached = self._session = _CachedSession(self.proto, is_optimized, session)
        return cached.session.run(None, {name: np.asarray(array) for name, array in feed.items()})

    @contextmanager
    def without_failing_nodes(self, *example: Any, **kwargs: Any) -> Iterator[None]:
        """Return a context in which the model ends before the first node that fails, as trial runs show."""
        whole_proto = self.proto
        # Numbers of first nodes that run and that fail: halved until they are neighbours.
        running_count, failing_count = 0, len(whole_proto.graph.node)
        try:
            while failing_count - running_count > 1:
                middle = (running_count + failing_count) // 2
                self.proto = _first_nodes(whole_proto, middle)
                try:
                    with amanda.disabled():
                        self(*example, **kwargs)
                    running_count = middle
                except Exception:  # of ONNX Runtime's own kinds, when it loads and when it runs
                    failing_count = middle
            self.proto = _first_nodes(whole_proto, running_count)
            yield
        finally:
            self.proto = whole_proto

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
        mask_by_initializer: dict[tuple[str, tuple[int, ...]], Any] = {}
        for name, axis, keep_mask in axes:
            shape = self._tensors[name].shape
            axis_mask = keep_mask.reshape([-1 if i == axis else 1 for i in range(len(shape))])
            mask = mask_by_initializer.get((name, shape), np.True_)
            mask_by_initializer[name, shape] = mask & axis_mask
        return lambda value: None if value is None else mask_by_initializer.get((value.name, value.shape))

    def removal(self, plan: RemovalPlan) -> OnnxRemoval:
        """Return a removal that puts a smaller model in the place of this one."""
        return OnnxRemoval(self, plan)

    def make_smaller(self, plan: RemovalPlan, optimizer: Any) -> ModelProto:
        """Return a smaller copy of the model."""
        return smaller_proto(self.proto, plan)

    def write_masks(self, masks: Masks) -> ModelProto:
        """Return a copy of the model whose initializers have zeros in place of removed channels."""
        masked = ModelProto()
        masked.CopyFrom(self.proto)
        for initializer in masked.graph.initializer:
            mask = masks(_NamedShape(initializer.name, tuple(initializer.dims)))
            if mask is not None:
                initializer.CopyFrom(
                    numpy_helper.from_array(numpy_helper.to_array(initializer) * mask, initializer.name)
                )
        return masked

    def float_arrays(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point arrays."""
        for array in result:
            if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                yield array.astype(np.float64), float(np.finfo(array.dtype).eps)

    def is_same_model(self, model: Any) -> bool:
        """Return True for the same ModelProto, or the same path."""
        if isinstance(model, (str, PathLike)) and isinstance(self.model, (str, PathLike)):
            return fspath(model) == fspath(self.model)
        return model is self.model

    def op_key(self, context: amanda.OpContext) -> Any:
        """Return the first value that a node makes, which no other node makes."""
        return onnx_graph.first_output_of(context.get_op().node)

    def inputs_for_masks(self, context: amanda.OpContext) -> Sequence[Any]:
        """Return shapes of inputs and their names in `proto`, also in a session that was made elsewhere."""
        node = self.nodes.get(self.op_key(context))
        # One name for each value, in order, also within lists: a node's inputs are one flat list.
        names = iter(() if node is None else node.input)

        def with_name(value: Any) -> Any:
            """Return name and shape of a value, a list of these for a list; None without a value."""
            if isinstance(value, list):
                return [with_name(item) for item in value]
            name = next(names, "")
            return None if value is None else _NamedShape(name, value.shape)

        return [with_name(value) for value in context.get_inputs()]


class OnnxRemoval:
    """Puts a smaller model in the place of an OnnxModel's, and puts that back."""

    def __init__(self, model: OnnxModel, plan: RemovalPlan) -> None:
        self._model, self._plan, self._before = model, plan, model.proto

    def apply(self) -> None:
        """Make the model smaller."""
        self._model.proto = smaller_proto(self._before, self._plan)

    def undo(self) -> None:
        """Put the whole model back."""
        self._model.proto = self._before


@dataclass(frozen=True)
class _NamedShape:
    """An initializer as a node reads it, by which its mask is found."""

    name: str
    shape: tuple[int | None, ...] | None


def _inline_constants(original: ModelProto) -> ModelProto:
    """Return a copy without functions, Constant nodes as initializers, and each node with its own vectors."""
    # Users keep the model that they have passed.
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
    _separate_vectors(plain.graph)
    return plain


def _separate_vectors(graph: GraphProto) -> None:
    """Give each further node that reads a vector of floating-point numbers an initializer of its own."""
    vectors = {
        initializer.name: initializer for initializer in graph.initializer if len(initializer.dims) == 1
    }
    read_names = {name for name, _ in _read_in_bodies(graph)}
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in read_names and name in vectors and vectors[name].data_type in _FLOATS:
                # A shared bias would tie the channels of layers that have nothing else in common.
                graph.initializer.append(vectors[name])
                node.input[i] = graph.initializer[-1].name = f"{name}/{onnx_graph.first_output_of(node)}"
            read_names.add(name)


_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


_FATAL = 4
"""Severity below which ONNX Runtime logs nothing: trials fail on purpose."""


def _first_nodes(whole: ModelProto, count: int) -> ModelProto:
    """Return a model of the first nodes; its outputs are the values that none of these nodes reads."""
    nodes = whole.graph.node[:count]
    read_names = {name for node in nodes for name in node.input}
    output_names = [name for node in nodes for name in node.output if name and name not in read_names]
    model = ModelProto()
    model.CopyFrom(whole)
    for field in ("node", "output"):
        model.graph.ClearField(field)
    model.graph.node.extend(nodes)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in output_names)
    return model


def _read_in_bodies(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the values that bodies of control flow read, and the node around them."""
    for node in graph.node:
        yield from ((name, f"{node.op_type} {node.name}") for name in onnx_graph.captures_of(node))


def smaller_proto(whole: ModelProto, plan: RemovalPlan) -> ModelProto:
    """Return a copy without the channels that a plan does not keep, with sizes and types to match."""
    smaller = ModelProto()
    smaller.CopyFrom(whole)
    graph = smaller.graph
    _shorten_initializers(graph, plan)
    # Initializers that were unread before stay: they are the user's.
    unread_before = {initializer.name for initializer in graph.initializer} - onnx_graph.read_in(graph)
    correction = _SizeCorrection(smaller, plan)
    nodes = [node for old in graph.node for node in (*correction.correct(old), old)]
    if len(nodes) > len(graph.node):
        # Nodes of a graph are in topological order: new ones go in front of their readers.
        copied = onnx.GraphProto(node=nodes)
        del graph.node[:]
        graph.node.extend(copied.node)
    has_types = bool(graph.value_info)
    onnx_graph.remove_unread(graph, kept=unread_before)
    # Types of intermediate values are of the old extents, and a checker would compare them.
    return onnx.shape_inference.infer_shapes(smaller) if has_types else smaller


def _shorten_initializers(graph: GraphProto, plan: RemovalPlan) -> None:
    """Remove the channels that a plan does not keep from the initializers of a graph, in place."""
    initializers = {initializer.name: initializer for initializer in graph.initializer}
    for name, axis, keep_mask in plan.axes():
        array = np.ascontiguousarray(numpy_helper.to_array(initializers[name]).compress(keep_mask, axis))
        initializers[name].CopyFrom(numpy_helper.from_array(array, name))
    for graph_input in graph.input:
        shortened = initializers.get(graph_input.name)
        if shortened is not None:  # an initializer that is listed among the inputs too, with its extents
            tensor_type = onnx.helper.make_tensor_type_proto(shortened.data_type, shortened.dims)
            graph_input.type.CopyFrom(tensor_type)


class _SizeCorrection:
    """Corrects sizes in attributes and constants of nodes, such as a target shape, for the kept channels."""

    def __init__(self, model: ModelProto, plan: RemovalPlan) -> None:
        self._graph, self._kept_label_mask = model.graph, plan.kept_label_mask
        self._opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
        self._tracing = cast(OnnxTracing, plan.tracing)
        self._traced_ops: dict[str, TracedOp] = {op.key: op for op in plan.tracing.traced_ops}
        self._whole_groups = plan.tracing.notes.whole_groups
        # Values that are the same for all inputs of the model.
        self._constants = {initializer.name for initializer in model.graph.initializer}
        for node in model.graph.node:
            if self._constants.issuperset(node.input) and node.op_type in _PURE:
                self._constants.update(node.output)
        self._producers = {name: node for node in model.graph.node for name in node.output}
        self._readers = Counter(name for node in model.graph.node for name in node.input)

    def correct(self, node: NodeProto) -> Sequence[NodeProto]:
        """Write the kept sizes into a node; return new nodes that compute inputs of the node, mostly none."""
        op = self._traced_ops.get(onnx_graph.first_output_of(node))
        if op is None or not op.inputs or node.domain not in ("", "ai.onnx"):
            return ()
        if node.op_type == "Conv" and onnx_graph.attribute_of(node, "group", 1) != 1:
            # The second extent of a kernel is the number of channels of one group.
            value, weight, *_ = op.inputs
            channels, channels_of_group = self._extents(value)[1], self._extents(weight)[1]
            onnx_graph.set_attribute(node, "group", channels // channels_of_group)
        elif node.op_type == "GroupNormalization" and node.input[1] in self._whole_groups:
            old_groups = onnx_graph.attribute_of(node, "num_groups", 1)
            _, (_, old_channels, *_) = op.inputs[0]
            new_channels = self._extents(op.inputs[0])[1]
            onnx_graph.set_attribute(node, "num_groups", old_groups * new_channels // old_channels)
        elif node.op_type in _NUMBERS_AT:
            return self._update_shape(node, _NUMBERS_AT[node.op_type], op)
        elif node.op_type == "Slice":
            self._update_slice(node, op)
        elif node.op_type == "Split":
            self._update_split(node, op)
        return ()

    def _extents(self, part: Any) -> tuple[int, ...]:
        return self._tracing.kept_extents(part, self._kept_label_mask)

    def _update_shape(self, node: NodeProto, index: int, op: TracedOp) -> Sequence[NodeProto]:
        """Write new extents into the shape that a node reads: a constant, or constants that a Concat joins.

        Other shapes stay unchanged.  Returns the node's own copy of a Concat that other nodes read too.
        index: of the node's input that is the shape.
        """
        # The shape's elements in the traced call; None where they are no integers.
        numbers = self._tracing.numbers.get((op.key, index))
        _, old_extents = op.outputs[0]
        new_extents = self._extents(op.outputs[0])
        if numbers is None or old_extents == new_extents:
            return ()
        # The shape of an Expand may lack leading axes.
        first_axis = len(old_extents) - len(numbers)
        changes = zip(numbers.tolist(), old_extents[first_axis:], new_extents[first_axis:], strict=True)
        new_numbers = {  # by their positions in the shape
            position: new
            for position, (number, old, new) in enumerate(changes)
            if number == old and new != old  # a number such as -1 or 0 follows the extents by itself
        }
        if not new_numbers:
            return ()
        if node.input[index] in self._constants:
            self._set_initializer(node, index, _replace_numbers(numbers, position=0, new_numbers=new_numbers))
            return ()
        producer = self._producers.get(node.input[index])
        if producer is None or producer.op_type != "Concat":
            return ()
        if self._readers[producer.output[0]] == 1:
            self._update_concat(producer, producer, new_numbers)
            return ()
        concat = NodeProto()
        concat.CopyFrom(producer)
        concat.name = concat.output[0] = node.input[index] = f"{op.key}/{index}"
        self._update_concat(concat, producer, new_numbers)
        return (concat,)

    def _update_concat(self, concat: NodeProto, original: NodeProto, new_numbers: dict[int, int]) -> None:
        """Write new numbers of a shape into the constants that a Concat joins.

        original: the node in the traced model.  new_numbers: by their positions in the shape.
        """
        position = 0
        for i, name in enumerate(original.input):
            piece = self._tracing.numbers[onnx_graph.first_output_of(original), i]
            new_piece = _replace_numbers(piece, position, new_numbers)
            if name in self._constants and new_piece.tolist() != piece.tolist():
                self._set_initializer(concat, i, new_piece)
            position += len(piece)

    def _update_slice(self, node: NodeProto, op: TracedOp) -> None:
        """Write the bounds of a Slice, counted in kept channels.

        Bounds that are not constant, and those along axes with another step than 1, stay.
        """
        starts, ends, axes, strides = (
            self._constant_numbers(node, op, name, index)
            for index, name in enumerate(("starts", "ends", "axes", "steps"), 1)
        )
        if starts is None or ends is None:
            return
        axes = np.arange(len(starts)) if axes is None else axes
        starts, ends = starts.copy(), ends.copy()
        families, shape = op.inputs[0]
        is_changed = False
        for i, axis in enumerate(axes.tolist()):
            axis %= len(shape)
            keep_mask = self._tracing.keep_mask_along(families, axis, self._kept_label_mask)
            has_unit_stride = strides is None or strides[i] == 1
            if keep_mask is not None and not keep_mask.all() and has_unit_stride:
                # A bound becomes the number of kept channels before it.
                # Bounds from the end, or beyond, become those from the start.
                start, end, _ = slice(int(starts[i]), int(ends[i])).indices(len(keep_mask))
                starts[i], ends[i] = keep_mask[:start].sum(), keep_mask[:end].sum()
                is_changed = True
        if is_changed:
            for index, name, value in ((1, "starts", starts), (2, "ends", ends)):
                if self._opset < 10:  # bounds became inputs with opset 10
                    onnx_graph.set_attribute(node, name, value.tolist())
                else:
                    self._set_initializer(node, index, value)

    def _update_split(self, node: NodeProto, op: TracedOp) -> None:
        """Write the number of kept channels of each part of a Split, if any changes."""
        _, first_shape = op.outputs[0]
        axis = onnx_graph.attribute_of(node, "axis", 0) % len(first_shape)
        sizes = [self._extents(part)[axis] for part in op.outputs]
        if sizes == [shape[axis] for _, shape in op.outputs]:
            return
        if self._opset < 13:  # sizes became an input with opset 13
            onnx_graph.set_attribute(node, "split", sizes)
            return
        onnx_graph.remove_attribute(node, "num_outputs")
        if len(node.input) == 1:
            node.input.append("")
        self._set_initializer(node, 1, np.array(sizes, np.int64))

    def _constant_numbers(self, node: NodeProto, op: TracedOp, name: str, index: int) -> Any:
        """Return integers of a Slice, an attribute or an input, if they are constant; None otherwise."""
        if self._opset < 10:
            attribute = onnx_graph.attribute_of(node, name, None)
            return None if attribute is None else np.array(attribute)
        if len(node.input) <= index or node.input[index] not in self._constants:
            return None
        return self._tracing.numbers.get((op.key, index))

    def _set_initializer(self, node: NodeProto, index: int, array: Any) -> None:
        """Give a node an initializer of its own: others may read the one that it had."""
        name = f"{node.output[0]}/{index}/kept"
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        node.input[index] = name


_PURE = ("Cast", "Concat", "Identity", "Squeeze", "Unsqueeze")
"""Ops through which constant numbers are followed."""

_NUMBERS_AT = {"Reshape": 1, "Expand": 1, "Resize": 3}
"""Input of ops that says extents of their result."""


def _replace_numbers(numbers: Any, position: int, new_numbers: dict[int, int]) -> Any:
    """Return a piece of the numbers of a shape, which begins at a position of it, with new ones.

    new_numbers: by their positions in the shape.
    """
    new_piece = numbers.copy()
    for index, number in new_numbers.items():
        if position <= index < position + len(new_piece):
            new_piece[index - position] = number
    return new_piece
