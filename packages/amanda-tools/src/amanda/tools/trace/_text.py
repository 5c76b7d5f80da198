"""Graphs as text: a listing in the manner of ONNX's, and DOT."""

from __future__ import annotations

import json
from collections.abc import Iterator

from amanda.tools.trace._graph import Graph, Op, Position, Tensor


def listing(graph: Graph) -> str:
    """Return a line for each tensor from outside and for each op, in the order of execution."""
    outside = (tensor for tensor in graph.tensors if tensor.producer is None)
    lines = [
        f"graph ({', '.join(graph.frameworks)}) {{",
        *(f"  {tensor.kind} {_name(tensor)}: {tensor}" for tensor in outside),
        *(f"  {_line(graph, op)}" for op in graph.ops),
        "}",
    ]
    return "\n".join(lines + [f"# {graph.dropped} more ops were not recorded"] * (graph.dropped > 0))


def _name(tensor: Tensor) -> str:
    if tensor.name is None:
        return f"%{tensor.index}"
    return f"%{tensor.name}" if tensor.producer is None else f"%{tensor.name}.{tensor.index}"


def _line(graph: Graph, op: Op) -> str:
    made = ", ".join(f"{_name(tensor)}: {tensor}" for tensor in graph.outputs(op))
    last = max((i for i, one in enumerate(op.inputs) if one is not None), default=-1)
    given = ", ".join(_names(graph, one) for one in op.inputs[: last + 1])
    arguments = ", ".join(f"{name}={_short(value)}" for name, value in (op.attributes or {}).items())
    called = f"{op.type}{'_' if op.in_place else ''}{f'[{arguments}]' if arguments else ''}"
    of = "" if op.forward is None else f"of {op.forward}"
    notes = ", ".join(text for text in (f"{op.phase} {op.index}", of, op.module, op.source) if text)
    return f"{f'{made} = ' if made else ''}{called}({given})  # {notes}"


def _names(graph: Graph, position: Position) -> str:
    if isinstance(position, tuple):
        return f"[{', '.join(_names(graph, one) for one in position)}]"
    return "_" if position is None else _name(graph.tensors[position])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def dot(graph: Graph) -> str:
    """Return Graphviz: ops in boxes, a cluster for each module of the forward pass, tensors as edges."""
    lines = ["digraph trace {", "  node [shape=box];"]
    by_module: dict[str, list[Op]] = {}
    for op in graph.ops:
        by_module.setdefault(op.module if op.phase != "backward" else "", []).append(op)
    for number, (module, ops) in enumerate(by_module.items()):
        nodes = [f"    {_node(op)}" for op in ops]
        box = [f"  subgraph cluster_{number} {{", f"    label={_quoted(module)};", *nodes, "  }"]
        lines += box if module else nodes
    return "\n".join([*lines, *_edges(graph), "}"])


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
    """Return a string of DOT, in which only quotes, backslashes and line ends have a meaning."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
