"""The outermost graph of an ONNX model: ops to cut into parts, their constants, costs and types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

import amanda
from amanda.errors import ArtefactError
from amanda.tools.flops import FlopsTool
from amanda.tools.kit import leaves
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.onnx_graph import bodies_of, constant_of, first_output_of, inlined, read_onnx, reads_of
from amanda.tools.partition._step_work import StepWork
from amanda.tools.select import Selection
from amanda.tools.trace import Graph, Op, Tensor

_IR_WITH_SEPARATE_INPUTS = 4
"""IR version from which initializers need not be inputs of the graph."""
_RANDOM_OPS = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
}  # fmt: skip


@dataclass(frozen=True)
class FileOp:
    """A node of the outermost graph.

    number: its position in the file.  reads: values of the graph that the node and its bodies read.
    """

    number: int
    node: NodeProto
    reads: tuple[str, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that are not omitted."""
        return tuple(name for name in self.node.output if name)

    def __str__(self) -> str:
        """Return type and name."""
        return f"{self.node.op_type} {self.node.name or self.outputs[0]}"


class FileGraph:
    """The outermost graph of a model in a file: ops, constant nodes and values by name.

    Functions of the model are inlined; external data stay in their files.
    ops: nodes that depend on inputs of the model, or are random, in the order of the file.
    constants: the other nodes, by their outputs; each part that reads such an output has a copy of the node.
    inputs, declared: inputs of the model, and initializers that old files declare as inputs too.
    """

    def __init__(self, path: Path) -> None:
        # A cut may go through functions.
        self.proto: ModelProto = inlined(read_onnx(path, ArtefactError, data=False))
        graph = self.proto.graph
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
        initializer_names = {*self.initializers, *self.sparse}
        # Old files list all initializers among the inputs, where newer ones list those that may be fed.
        lists_initializers = self.proto.ir_version < _IR_WITH_SEPARATE_INPUTS
        self.inputs: dict[str, ValueInfoProto] = {}
        self.declared: dict[str, ValueInfoProto] = {}
        for value in graph.input:
            if lists_initializers and value.name in initializer_names:
                self.declared[value.name] = value
            else:
                self.inputs[value.name] = value
        self.outputs: dict[str, ValueInfoProto] = {value.name: value for value in graph.output}
        self.constants: dict[str, FileOp] = {}
        self.ops: list[FileOp] = []
        # An initializer that is an input too is a default, which a caller may replace.
        self._sort_nodes(initializer_names - self.inputs.keys())

    def _sort_nodes(self, constant_names: set[str]) -> None:
        """Add each node to the ops or to the constants.

        constant_names: initializers that nobody feeds; outputs of constants are added to them.
        """
        for number, node in enumerate(self.proto.graph.node):
            # Bodies of control flow read values of this graph too.
            op = FileOp(number, node, tuple(dict.fromkeys(reads_of(node))))
            # A random op gives other numbers at each run, and a body may hold one: neither is a constant.
            has_body = next(bodies_of(node), None) is not None
            may_be_constant = node.op_type not in _RANDOM_OPS and not has_body
            if may_be_constant and constant_names.issuperset(op.reads):
                self.constants |= dict.fromkeys(op.outputs, op)
                constant_names.update(op.outputs)
            else:
                self.ops.append(op)

    @cached_property
    def producer_of(self) -> dict[str, int]:
        """Return the position of the op that makes each value."""
        return {name: i for i, op in enumerate(self.ops) for name in op.outputs}

    @cached_property
    def readers_of(self) -> dict[str, list[int]]:
        """Return the positions of the ops that read each value, directly or through constant nodes."""
        readers: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in self.with_constants(op.reads):
                readers.setdefault(name, []).append(i)
        return readers

    def with_constants(self, names: Iterable[str]) -> list[str]:
        """Return names of values, and of those from which the constants among them are computed."""
        collected: dict[str, None] = {}
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in collected:
                collected[name] = None
                pending += self.constants[name].reads if name in self.constants else ()
        return list(collected)

    def constant_tensor(self, name: str) -> TensorProto | None:
        """Return the tensor of an initializer or a Constant node; None for other and for sparse values."""
        if name in self.initializers:
            tensor: TensorProto = self.initializers[name]
            return tensor
        return constant_of(self.constants[name].node) if name in self.constants else None

    @property
    def is_external(self) -> bool:
        """Return True if values of initializers lie in other files."""
        return any(tensor.data_location == TensorProto.EXTERNAL for tensor in self.initializers.values())

    def shapes(self) -> tuple[dict[str, tuple[int | None, ...]], list[str]]:
        """Return inferred shapes of values, with 1 for extents that inputs leave open, and these inputs.

        Values of unknown shape are absent; if the inference fails, all but those with shapes in the file are.
        """
        model = ModelProto()
        model.CopyFrom(self.proto)
        # Shapes in the file may be of other extents than those that are set below.
        del model.graph.value_info[:]
        inputs = [value for value in model.graph.input if value.name in self.inputs]
        open_inputs = [value.name for value in inputs if _set_open_dims(value, 1)]
        # Names of open extents are cleared: inference would keep them instead of computing numbers.
        for output in model.graph.output:
            _set_open_dims(output, None)
        with suppress(Exception):  # what a model says of itself may contradict what is inferred
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        return dict(_known_shapes(model.graph)), open_inputs


def _set_open_dims(value: ValueInfoProto, extent: int | None) -> bool:
    """Set a value's open extents to a number, or for None to unnamed ones; return True if there were some."""
    tensor = value.type.tensor_type
    open_dims = (
        [dim for dim in tensor.shape.dim if not dim.HasField("dim_value")] if tensor.HasField("shape") else []
    )
    for dim in open_dims:
        dim.Clear()
        if extent is not None:
            dim.dim_value = extent
    return bool(open_dims)


def _known_shapes(graph: GraphProto) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Yield name and shape of each value of a graph and its bodies with a shape; None for open extents."""
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            yield value.name, tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    for tensor in graph.initializer:
        # Initializers have no value_info.
        yield tensor.name, tuple(tensor.dims)
    for node in graph.node:
        for body in bodies_of(node):
            yield from _known_shapes(body)


@dataclass
class FileOpFacts:
    """Facts of an op or a constant node.  selected: True if the selection has it, or an op in its bodies."""

    id: int
    type: str
    module: str
    source: str
    flops: float = 0.0
    selected: bool = False


class FileFactsTool(amanda.Tool):
    """Records type, module and FLOPs of each op of a file, and the types of values.

    ops: by the name of the op's first output; ops in bodies of control flow count for the op around them.
    types: of values, from the driver.  unknown: counts of ops without FLOPs, by type.
    """

    def __init__(self, graph: FileGraph, selection: Selection | None = None) -> None:
        super().__init__()
        self.graph, self._selection = graph, selection
        self.shapes, self.open_inputs = graph.shapes()
        self.ops: dict[str, FileOpFacts] = {}
        self.types: dict[str, onnx.TypeProto] = {}
        self.unknown: Counter[str] = Counter()
        self._outermost_op: FileOpFacts | None = None  # the last op outside of bodies, None before the first
        self.depends_on(StandardMapping(), MappingTool([["*", self._use_inferred_shapes]]), FlopsTool())
        self.add_inst_for_op(self._record_op, require_outputs=True)

    def _use_inferred_shapes(self, context: amanda.OpContext) -> None:
        """Replace `shape` in the context by a function that returns a number for each extent."""
        driver_shape = context["shape"]

        def shape(value: Any) -> Any:
            inferred_shape = self.shapes.get(getattr(value, "name", ""))
            return driver_shape(value) if inferred_shape is None else inferred_shape

        context["shape"] = shape

    def _record_op(self, context: amanda.OpContext) -> None:
        """Record the facts of an op and the types of its values, and count an op without FLOPs.

        Ops of a body count for the op around it.
        """
        first_output = first_output_of(context.get_op().node)
        is_outermost = first_output in self.graph.producer_of or first_output in self.graph.constants
        if is_outermost:  # ops in bodies come after the op around them, and add to its facts
            self._outermost_op = self.ops[first_output] = FileOpFacts(
                context.get_op_id(), context["type"], context.get_scope(), context.get_source()
            )
        assert self._outermost_op is not None
        for value in leaves([*context.get_inputs(), *(context.get_outputs() or ())]):
            if getattr(value, "type", None) is not None:
                self.types[value.name] = value.type
        flops = getattr(context.get("cost"), "flops", None)
        if flops is None:
            self.unknown[context["type"]] += 1
        self._outermost_op.flops += flops or 0
        if self._selection is not None and self._selection(context):
            self._outermost_op.selected = True

    def facts(self, position: int) -> FileOpFacts:
        """Return the facts of an op of the graph."""
        return self.ops[self.graph.ops[position].outputs[0]]

    def describe_value(self, name: str) -> tuple[tuple[int | None, ...] | None, str | None, int | None]:
        """Return shape, element type and bytes of a value; all None without an element type.

        The shape, or an extent of it, may be None too; the value then has no number of bytes.
        """
        constant, value_type = self.graph.constant_tensor(name), self.types.get(name)
        element_type = 0 if value_type is None else value_type.tensor_type.elem_type
        if constant is not None:
            element_type = constant.data_type
        if element_type == onnx.TensorProto.UNDEFINED:  # which is 0
            return None, None, None
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type))
        shape = self.shapes.get(name) if constant is None else tuple(constant.dims)
        is_static = shape is not None and None not in shape
        return shape, dtype.name, prod(shape) * dtype.itemsize if is_static else None  # type: ignore[arg-type]

    def type_of(self, name: str) -> onnx.TypeProto:
        """Return the type of a value.  Raises ArtefactError for a value of unknown type."""
        if name not in self.types:
            raise ArtefactError(
                f"neither ONNX nor ONNX Runtime tells the type of {name}, which crosses between two parts; "
                "add it to the value_info of the model"
            )
        return self.types[name]

    def work(self, measured: StepWork | None) -> StepWork:
        """Return the work of the file's ops, with measured costs, or with FLOPs from shapes for None.

        Raises ArtefactError if another model was measured.
        """
        if measured is not None:
            costs = self._measured_costs(measured)
            return StepWork(self._as_trace_graph(), costs, measured.unit, list(measured.remarks))
        costs, remarks = {i: self.facts(i).flops for i in range(len(self.graph.ops))}, []
        if self.open_inputs:
            remarks.append(
                f"Extents that the file leaves open count as 1, in {', '.join(self.open_inputs)}; "
                "sessions that run in a scope of the tool before tell others."
            )
        if self.unknown:
            listed = ", ".join(f"{name} ({count})" for name, count in self.unknown.most_common(8))
            remarks.append(f"No formula, or no shapes, for ops that count as 0: {listed}.")
        return StepWork(self._as_trace_graph(), costs, "FLOPs", remarks)

    def _measured_costs(self, measured: StepWork) -> dict[int, float]:
        """Return the measured cost of each op of the file, by position; names of outputs match the ops.

        Raises ArtefactError for an op of the file that was not measured.
        """
        costs: dict[int, float] = {}
        producer_of = self.graph.producer_of
        for op, cost in zip(measured.ops, measured.total, strict=True):
            # A session renames and fuses ops, and keeps the names of most values.
            output_names = (output.name for output in measured.graph.outputs(op))
            position = next((producer_of[name] for name in output_names if name in producer_of), None)
            if position is not None:
                # A fused op has the output of the last of its ops, which gets the cost of all.
                costs[position] = costs.get(position, 0.0) + float(cost)
        unmeasured = [op for i, op in enumerate(self.graph.ops) if i not in costs]
        if unmeasured:
            raise ArtefactError(
                f"{unmeasured[0]} and {len(unmeasured) - 1} more of the file's {len(self.graph.ops)} ops are "
                f"not among the {len(measured.ops)} that ran in scopes of the tool; run a session of this "
                "model, or `clear()` the tool"
            )
        return costs

    def _as_trace_graph(self) -> Graph:
        """Return the file's ops and values as the graph of a trace."""
        graph = self.graph
        constant_nodes = (name for name in graph.constants if graph.constant_tensor(name))
        constants = {*graph.initializers, *graph.sparse, *constant_nodes}
        # Values from outside come first, as they are there before any op runs.
        outside_names = [name for name in graph.readers_of if name in graph.inputs or name in constants]
        tensor_index = {name: i for i, name in enumerate((*outside_names, *graph.producer_of))}
        ops = []
        for i, op in enumerate(graph.ops):
            facts = self.facts(i)
            reads = graph.with_constants(op.reads)
            inputs = tuple(tensor_index[name] for name in reads if name in tensor_index)
            outputs = tuple(tensor_index[name] for name in op.outputs)
            ops.append(
                Op(index=i, id=facts.id, phase="forward", type=facts.type,
                   name=op.node.name or op.node.op_type, framework=0, module=facts.module,
                   source=facts.source, inputs=inputs, outputs=outputs, calls=1)
            )  # fmt: skip
        tensors = []
        for name, i in tensor_index.items():
            shape, dtype, size = self.describe_value(name)
            kind = "parameter" if name in constants else "input" if name in graph.inputs else "activation"
            tensors.append(
                Tensor(index=i, shape=shape, dtype=dtype, device=None, bytes=size, kind=kind, name=name,
                       producer=graph.producer_of.get(name), consumers=tuple(graph.readers_of.get(name, ())))
            )  # fmt: skip
        return Graph(tuple(ops), tuple(tensors), ("onnx",))
