"""Graphs as text: a listing in the manner of ONNX's, and DOT."""

from __future__ import annotations

import json
from collections.abc import Iterator

from amanda.tools.trace._graph import Graph, Op, Position, Tensor


def listing(graph: Graph) -> str:
    """One line for each tensor from outside and for each op, in the order of execution."""
    lines = [f"graph ({', '.join(graph.frameworks)}) {{"]
    for tensor in graph.tensors:
        if tensor.producer is None:
            lines.append(f"  {tensor.kind} {value_name(tensor)}: {tensor}")
    for op in graph.ops:
        lines.append(f"  {_line(graph, op)}")
    lines.append("}")
    if graph.dropped:
        lines.append(f"# {graph.dropped} more ops were not recorded")
    return "\n".join(lines)


def value_name(tensor: Tensor) -> str:
    """Return the word for a tensor in a listing: its name if no other tensor has that name."""
    if tensor.name is None:
        return f"%{tensor.index}"
    return f"%{tensor.name}" if tensor.producer is None else f"%{tensor.name}.{tensor.index}"


def _line(graph: Graph, op: Op) -> str:
    made = ", ".join(f"{value_name(tensor)}: {tensor}" for tensor in graph.outputs(op))
    last = max((i for i, one in enumerate(op.inputs) if one is not None), default=-1)
    given = ", ".join(_written(graph, one) for one in op.inputs[: last + 1])
    arguments = ", ".join(f"{name}={_short(value)}" for name, value in (op.attributes or {}).items())
    notes = [f"{op.phase} {op.index}"]
    notes += [f"of {op.forward}"] if op.forward is not None else []
    notes += [text for text in (op.module, op.source) if text]
    left = f"{made} = " if made else ""
    called = f"{op.type}{'_' if op.in_place else ''}{f'[{arguments}]' if arguments else ''}"
    return f"{left}{called}({given})  # {', '.join(notes)}"


def _written(graph: Graph, position: Position) -> str:
    if isinstance(position, tuple):
        return f"[{', '.join(_written(graph, one) for one in position)}]"
    return "_" if position is None else value_name(graph.tensors[position])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def dot(graph: Graph) -> str:
    """For Graphviz: ops in boxes, a cluster for each module of the forward pass, tensors as edges."""
    lines = ["digraph trace {", "  node [shape=box];"]
    by_module: dict[str, list[Op]] = {}
    for op in graph.ops:
        by_module.setdefault(op.module if op.phase != "backward" else "", []).append(op)
    for number, (module, ops) in enumerate(by_module.items()):
        if module:
            lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(module)};"]
        lines += [f"    {_node(op)}" for op in ops]
        lines += ["  }"] if module else []
    lines += _edges(graph)
    lines.append("}")
    return "\n".join(lines)


def _node(op: Op) -> str:
    style = "" if op.phase != "backward" else ", style=dashed"
    tip = f"{op.name}\n{op.source}"
    return f"op{op.index} [label={_quoted(op.type)}, tooltip={_quoted(tip)}{style}];"


def _edges(graph: Graph) -> Iterator[str]:
    for tensor in graph.tensors:
        source = f"op{tensor.producer}"
        if tensor.producer is None and tensor.consumers:
            source = f"tensor{tensor.index}"
            shape = "ellipse" if tensor.kind == "input" else "note"
            yield f"  {source} [label={_quoted(tensor.name or tensor.kind)}, shape={shape}];"
        for consumer in tensor.consumers:
            if consumer != tensor.producer:
                yield f"  {source} -> op{consumer} [label={_quoted(str(tensor))}];"


def _quoted(text: str) -> str:
    """A string of DOT, in which nothing but quotes, backslashes and line ends has a meaning."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
