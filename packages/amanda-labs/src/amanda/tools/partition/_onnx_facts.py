"""Ops of an ONNX file as work to be cut: what each costs by its shapes, and what flows between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx

import amanda
from amanda.errors import ArtefactError
from amanda.tools.flops import FlopsTool
from amanda.tools.kit import leaves
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.onnx_graph import first_output_of
from amanda.tools.partition._onnx_graph import FileGraph
from amanda.tools.partition._work import Work
from amanda.tools.select import Selection
from amanda.tools.trace import Graph, Op, Tensor


@dataclass
class OpFacts:
    """One op, or a constant node.  selected: whether the selection has it, or an op in its bodies."""

    id: int
    type: str
    module: str
    source: str
    flops: float = 0.0
    selected: bool = False


class FileTool(amanda.Tool):
    """Notes type, module and FLOPs of each op of a file, and the types of values.

    ops: by the name of the first value that the op makes; ops in bodies of control flow count for the op
    around them.  types: of values, as the driver knows them.  unknown: types of ops without FLOPs.
    """

    def __init__(self, graph: FileGraph, selection: Selection | None = None) -> None:
        super().__init__()
        self.graph, self._selection = graph, selection
        self.shapes, self.opened = graph.shapes()
        self.ops: dict[str, OpFacts] = {}
        self.types: dict[str, onnx.TypeProto] = {}
        self.unknown: Counter[str] = Counter()
        self._around: OpFacts | None = None
        self.depends_on(StandardMapping(), MappingTool([["*", self._give_shapes]]), FlopsTool())
        self.add_inst_for_op(self._note, require_outputs=True)

    def _give_shapes(self, context: amanda.OpContext) -> None:
        """Put a `shape` into the context that has a number for each extent, for formulas to read."""
        told = context["shape"]

        def shape(value: Any) -> Any:
            known = self.shapes.get(getattr(value, "name", ""))
            return told(value) if known is None else known

        context["shape"] = shape

    def _note(self, context: amanda.OpContext) -> None:
        made = first_output_of(context.get_op().node)
        if made in self.graph.made_by or made in self.graph.constants:
            self._around = self.ops[made] = OpFacts(
                context.get_op_id(), context["type"], context.get_scope(), context.get_source()
            )
        assert self._around is not None
        for value in leaves([*context.get_inputs(), *(context.get_outputs() or ())]):
            if getattr(value, "type", None) is not None:
                self.types[value.name] = value.type
        flops = getattr(context.get("cost"), "flops", None)
        if flops is None:
            self.unknown[context["type"]] += 1
        self._around.flops += flops or 0
        if self._selection is not None and self._selection(context):
            self._around.selected = True

    def facts(self, position: int) -> OpFacts:
        """Return the facts of an op of the graph."""
        return self.ops[self.graph.ops[position].makes[0]]

    def tensor(self, name: str) -> tuple[tuple[int | None, ...] | None, str | None, int | None]:
        """Return shape, element type and bytes of a value."""
        held, kind = self.graph.tensor(name), self.types.get(name)
        element = held.data_type if held is not None else 0 if kind is None else kind.tensor_type.elem_type
        if not element:
            return None, None, None
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element))
        shape = self.shapes.get(name) if held is None else tuple(held.dims)
        known = shape is not None and None not in shape
        return shape, dtype.name, prod(shape) * dtype.itemsize if known else None  # type: ignore[arg-type]

    def type_of(self, name: str) -> onnx.TypeProto:
        """Return the type of a value.  Raises ArtefactError where nothing tells it."""
        if name not in self.types:
            raise ArtefactError(
                f"neither ONNX nor ONNX Runtime tells the type of {name}, which crosses between two parts; "
                "add it to the value_info of the model"
            )
        return self.types[name]

    def work(self, measured: Work | None) -> Work:
        """Return the work, whose costs are FLOPs by shapes, or those of sessions that ran the model.

        Raises ArtefactError where the sessions ran another model.
        """
        remarks = []
        if measured is not None:
            costs, unit = self._costs_of(measured), measured.unit
            remarks = list(measured.remarks)
        else:
            costs, unit = {i: self.facts(i).flops for i in range(len(self.graph.ops))}, "FLOPs"
            if self.opened:
                remarks.append(
                    f"Extents that the file leaves open count as 1, in {', '.join(self.opened)}; sessions "
                    "that run in a scope of the tool before tell others."
                )
            if self.unknown:
                listed = ", ".join(f"{name} ({count})" for name, count in self.unknown.most_common(8))
                remarks.append(f"No formula, or no shapes, for ops that count as 0: {listed}.")
        return Work(self._traced(), costs, unit, remarks)

    def _costs_of(self, measured: Work) -> dict[int, float]:
        costs: dict[int, float] = {}
        for op, cost in zip(measured.ops, measured.total, strict=True):
            names = (one.name for one in measured.graph.outputs(op))
            made = next((self.graph.made_by[name] for name in names if name in self.graph.made_by), None)
            if made is not None:
                costs[made] = costs.get(made, 0.0) + float(cost)
        absent = [op for i, op in enumerate(self.graph.ops) if i not in costs]
        if absent:
            raise ArtefactError(
                f"{absent[0]} and {len(absent) - 1} more of the file's {len(self.graph.ops)} ops are not "
                f"among the {len(measured.ops)} that ran in scopes of the tool; run a session of this model, "
                "or `clear()` the tool"
            )
        return costs

    def _traced(self) -> Graph:
        """Return the ops, and the values that they read and make."""
        graph = self.graph
        held = {*graph.initializers, *graph.sparse, *(one for one in graph.constants if graph.tensor(one))}
        given = [name for name in graph.read_by if name in graph.inputs or name in held]
        index = {name: i for i, name in enumerate((*given, *graph.made_by))}
        ops = []
        for i, op in enumerate(graph.ops):
            facts, reads = self.facts(i), graph.with_constants(op.reads)
            ops.append(
                Op(i, facts.id, "forward", facts.type, op.node.name or op.node.op_type, 0, facts.module,
                   facts.source, tuple(index[name] for name in reads if name in index),
                   tuple(index[name] for name in op.makes), calls=1)
            )  # fmt: skip
        tensors = [
            Tensor(i, *self._placed(name), _kind(name, graph.inputs, held), name, graph.made_by.get(name),
                   tuple(graph.read_by.get(name, ())))
            for name, i in index.items()
        ]  # fmt: skip
        return Graph(tuple(ops), tuple(tensors), ("onnx",))

    def _placed(self, name: str) -> tuple[Any, str | None, None, int | None]:
        shape, dtype, size = self.tensor(name)
        return shape, dtype, None, size


def _kind(name: str, inputs: Mapping[str, Any], held: set[str]) -> str:
    return "parameter" if name in held else "input" if name in inputs else "activation"
