"""One part of an ONNX model as a model of its own: ops, what they read, and what others need of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import ModelProto, ValueInfoProto

from amanda.tools.partition._onnx_facts import FileTool


def part_of(tool: FileTool, chosen: Sequence[int], is_last: bool) -> ModelProto:
    """Return a model of some ops, with the constants and initializers that they read.

    It gives what other ops, or the model's outputs, need of it; the last part also gives outputs that are
    constants or inputs.
    """
    graph, own = tool.graph, set(chosen)
    wanted = [name for i in chosen for name in graph.ops[i].reads]
    made = [name for i in chosen for name in graph.ops[i].makes]
    outputs = [
        name for name in made if name in graph.outputs or not own.issuperset(graph.read_by.get(name, ()))
    ]
    if is_last:
        passed = [name for name in graph.outputs if name not in graph.made_by]
        wanted, outputs = wanted + passed, outputs + passed
    reads = dict.fromkeys(graph.with_constants(wanted))
    model = ModelProto()
    for field, value in graph.proto.ListFields():
        if field.name not in ("graph", "training_info"):
            _copy(model, field.name, value)
    part, whole = model.graph, graph.proto.graph
    part.name, part.doc_string = whole.name, whole.doc_string
    part.metadata_props.extend(whole.metadata_props)
    constants = [graph.constants[name] for name in reads if name in graph.constants]
    ops = [*(graph.ops[i] for i in chosen), *constants]
    part.node.extend(whole.node[number] for number in sorted({op.number for op in ops}))
    part.initializer.extend(one for one in whole.initializer if one.name in reads)
    part.sparse_initializer.extend(one for one in whole.sparse_initializer if one.values.name in reads)
    part.input.extend(one for one in whole.input if one.name in reads)
    crossing = [name for name in reads if name in graph.made_by and graph.made_by[name] not in own]
    part.input.extend(_declared(tool, name) for name in crossing)
    part.output.extend(graph.outputs.get(name) or _declared(tool, name) for name in outputs)
    seen = {*made, *reads}
    part.value_info.extend(one for one in whole.value_info if one.name in seen - {*outputs, *crossing})
    part.quantization_annotation.extend(
        one for one in whole.quantization_annotation if one.tensor_name in seen
    )
    return model


def _declared(tool: FileTool, name: str) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=tool.type_of(name))


def _copy(model: ModelProto, name: str, value: Any) -> None:
    if hasattr(value, "extend"):
        getattr(model, name).extend(value)
    else:
        setattr(model, name, value)
