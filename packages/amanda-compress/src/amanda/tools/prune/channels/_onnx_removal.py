"""Removes channels of an ONNX model: smaller initializers, and the attributes and numbers that say sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from amanda.tools import onnx_graph
from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._onnx_tracing import OnnxTracing
from amanda.tools.prune.channels._plan import Plan
from amanda.tools.prune.channels._tracing import TracedOp


def smaller_proto(whole: ModelProto, plan: Plan) -> ModelProto:
    """Return a copy of a model without the channels that a plan does not keep."""
    smaller = ModelProto()
    smaller.CopyFrom(whole)
    graph = smaller.graph
    initializers = {item.name: item for item in graph.initializer}
    for name, axis, keep_mask in plan.axes():
        array = np.ascontiguousarray(numpy_helper.to_array(initializers[name]).compress(keep_mask, axis))
        initializers[name].CopyFrom(numpy_helper.from_array(array, name))
    for graph_input in graph.input:
        if graph_input.name in initializers:
            graph_input.type.CopyFrom(
                onnx.helper.make_tensor_type_proto(
                    initializers[graph_input.name].data_type, initializers[graph_input.name].dims
                )
            )
    unread = {item.name for item in graph.initializer} - onnx_graph.read_in(graph)
    sizes = _SizeCorrection(smaller, plan)
    nodes = [item for node in graph.node for item in (*sizes.correct(node), node)]
    if len(nodes) > len(graph.node):
        copied = onnx.GraphProto(node=nodes)
        del graph.node[:]
        graph.node.extend(copied.node)
    has_types = bool(graph.value_info)
    onnx_graph.remove_unread(graph, kept=unread)
    return onnx.shape_inference.infer_shapes(smaller) if has_types else smaller


class _SizeCorrection:
    """Corrects what nodes say of the sizes of their tensors."""

    def __init__(self, model: ModelProto, plan: Plan) -> None:
        self._graph, self._alive = model.graph, plan.alive
        self._opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
        self._tracing = cast(OnnxTracing, plan.tracing)
        self._steps: dict[str, TracedOp] = {item.key: item for item in plan.tracing.steps}
        self._whole_groups = plan.tracing.notes.whole_groups
        self._fixed = {item.name for item in model.graph.initializer}
        for node in model.graph.node:
            if self._fixed.issuperset(node.input) and node.op_type in _PURE:
                self._fixed.update(node.output)
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._readers = Counter(name for node in model.graph.node for name in node.input)

    def correct(self, node: NodeProto) -> Sequence[NodeProto]:
        """Give a node the new sizes; return the nodes that it now reads besides."""
        step = self._steps.get(onnx_graph.first_output_of(node))
        if step is None or not step.inputs or node.domain not in ("", "ai.onnx"):
            pass
        elif node.op_type == "Conv" and onnx_graph.attribute_of(node, "group", 1) != 1:
            (_, channels, *_), (_, depth, *_) = (self._extents(part) for part in step.inputs[:2])
            onnx_graph.set_attribute(node, "group", channels // depth)
        elif node.op_type == "GroupNormalization" and node.input[1] in self._whole_groups:
            groups = onnx_graph.attribute_of(node, "num_groups", 1) * self._extents(step.inputs[0])[1]
            onnx_graph.set_attribute(node, "num_groups", groups // step.inputs[0][1][1])
        elif node.op_type in _NUMBERS_AT:
            return self._update_shape(node, _NUMBERS_AT[node.op_type], step)
        elif node.op_type == "Slice":
            self._update_slice(node, step)
        elif node.op_type == "Split":
            self._update_split(node, step)
        return ()

    def _extents(self, part: Any) -> tuple[int, ...]:
        return self._tracing.extents(part, self._alive)

    def _update_shape(self, node: NodeProto, index: int, step: TracedOp) -> Sequence[NodeProto]:
        """Write new extents into the numbers of a shape; return a copy of a Concat that others read."""
        numbers = self._tracing.numbers.get((step.key, index))
        before, after = step.outputs[0][1], self._extents(step.outputs[0])
        if numbers is None or before == after:
            return ()
        last = len(before) - len(numbers)
        new = {
            i: after[i + last] for i, number in enumerate(numbers.tolist())
            if before[i + last] != after[i + last] and number == before[i + last]
        }  # fmt: skip
        maker = self._makers.get(node.input[index])
        if not new:
            return ()
        if node.input[index] in self._fixed:
            self._set_initializer(node, index, _replaced(numbers, 0, new))
            return ()
        if maker is None or maker.op_type != "Concat":
            return ()
        concat, first = maker, 0
        if self._readers[maker.output[0]] > 1:
            concat = NodeProto()
            concat.CopyFrom(maker)
            concat.name = concat.output[0] = node.input[index] = f"{step.key}/{index}"
        for i, name in enumerate(maker.input):
            piece = self._tracing.numbers[onnx_graph.first_output_of(maker), i]
            if name in self._fixed and _replaced(piece, first, new).tolist() != piece.tolist():
                self._set_initializer(concat, i, _replaced(piece, first, new))
            first += len(piece)
        return () if concat is maker else (concat,)

    def _update_slice(self, node: NodeProto, step: TracedOp) -> None:
        """Count the bounds in channels that are kept."""
        bounds = [self._numbers(node, step, name, i + 1) for i, name in enumerate(("starts", "ends", "axes"))]
        starts, ends, axes = bounds
        if starts is None or ends is None:
            return
        axes = np.arange(len(starts)) if axes is None else axes
        steps = self._numbers(node, step, "steps", 4)
        starts, ends = starts.copy(), ends.copy()
        families, shape = step.inputs[0]
        is_changed = False
        for i, axis in enumerate(axes.tolist()):
            axis %= len(shape)
            places = self._tracing.places(families, axis, self._alive)
            if places is not None and not places.all() and (steps is None or steps[i] == 1):
                first, last, _ = slice(int(starts[i]), int(ends[i])).indices(len(places))
                starts[i], ends[i] = places[:first].sum(), places[:last].sum()
                is_changed = True
        if is_changed:
            for i, (name, value) in enumerate((("starts", starts), ("ends", ends))):
                if self._opset < 10:
                    onnx_graph.set_attribute(node, name, value.tolist())
                else:
                    self._set_initializer(node, i + 1, value)

    def _update_split(self, node: NodeProto, step: TracedOp) -> None:
        """Say how many channels of each part are kept."""
        axis = onnx_graph.attribute_of(node, "axis", 0) % len(step.outputs[0][1])
        sizes = [self._extents(part)[axis] for part in step.outputs]
        if sizes == [shape[axis] for _, shape in step.outputs]:
            return
        if self._opset < 13:
            onnx_graph.set_attribute(node, "split", sizes)
            return
        onnx_graph.remove_attribute(node, "num_outputs")
        if len(node.input) == 1:
            node.input.append("")
        self._set_initializer(node, 1, np.array(sizes, np.int64))

    def _numbers(self, node: NodeProto, step: TracedOp, name: str, index: int) -> Any:
        """Return numbers that are the same for all inputs of the model; None of others."""
        if self._opset < 10:
            attribute = onnx_graph.attribute_of(node, name, None)
            return None if attribute is None else np.array(attribute)
        if len(node.input) <= index or node.input[index] not in self._fixed:
            return None
        return self._tracing.numbers.get((step.key, index))

    def _set_initializer(self, node: NodeProto, index: int, array: Any) -> None:
        """Give a node an initializer of its own: others may read the one that it had."""
        name = f"{node.output[0]}/{index}/kept"
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        node.input[index] = name


_PURE = ("Cast", "Concat", "Identity", "Squeeze", "Unsqueeze")
"""Ops through which constant numbers are followed."""

_NUMBERS_AT = {"Reshape": 1, "Expand": 1, "Resize": 3}
"""Input of ops that says extents of their result."""


def _replaced(numbers: Any, first: int, new: dict[int, int]) -> Any:
    """Return a piece of the numbers of a shape, the first of which has this place, with new ones."""
    replaced = numbers.copy()
    for place, number in new.items():
        if first <= place < first + len(replaced):
            replaced[place - first] = number
    return replaced
