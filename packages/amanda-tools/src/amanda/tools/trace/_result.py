"""The graph as a table, a listing, DOT and JSON for Model Explorer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.options import checked
from amanda.tools.results import NOTHING, Column, Result, count_of, read_json
from amanda.tools.trace._graph import VERSION, Graph, Op, Position, Tensor

if TYPE_CHECKING:
    import networkx


def _short_dtypes(tensors: str) -> str:
    """Return types and shapes as jaxprs have them: "f32[2,8] i64[2]"."""
    return _DTYPE.sub(lambda match: f"{_LETTERS[match[1]]}{match[2]}", tensors)


_LETTERS = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}
_DTYPE = re.compile(rf"\b({'|'.join(_LETTERS)})(\d+)")


class TraceResult(Result):
    """The ops of a graph in the order of their first executions.

    `save` writes, by the suffix: the schema `amanda.trace` (.json), a listing (.txt), Graphviz (.dot), a
    graph for Model Explorer (.model-explorer.json), or the table (.csv, .html).
    """

    name: ClassVar[str] = "trace"
    version: ClassVar[int] = VERSION
    title = "Graph"
    _leading = 1
    columns: ClassVar[Sequence[Column]] = (
        *map(Column, ("phase", "type", "module", "source")),
        Column("inputs", show=_short_dtypes, priority=2), Column("outputs", show=_short_dtypes, priority=3),
        Column("calls", show="{:,}".format, number=True, folded="sum"),
    )  # fmt: skip

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, with written tensors among the outputs."""
        return [
            (op.phase, op.type, op.module, op.source, self._tensor_texts(op.inputs),
             self._tensor_texts((*op.outputs, *op.writes)), op.calls)
            for op in self.graph.ops
        ]  # fmt: skip

    def _tensor_texts(self, positions: Sequence[Position]) -> str:
        """Return the types and shapes of tensors, those of a list in brackets."""
        tensors, present = self.graph.tensors, [position for position in positions if position is not None]
        return " ".join(
            f"({self._tensor_texts(position)})" if isinstance(position, tuple) else str(tensors[position])
            for position in present
        )

    def _facts(self) -> Mapping[str, Any]:
        return self.graph.to_dict()

    def notes(self) -> Sequence[str]:
        """Return the numbers of ops and tensors, and of ops beyond `limit`."""
        if not self.graph.ops:
            return [NOTHING]
        counts = {"forward": 0, "backward": 0, **Counter(op.phase for op in self.graph.ops)}
        # Forward and backward are always told, other phases where there are some.
        *leading, last = (f"{count:,} {phase}" for phase, count in counts.items())
        notes = [f"{', '.join(leading)} and {last} ops, {count_of(len(self.graph.tensors), 'tensor')}."]
        if self.graph.dropped:
            notes.append(f"Not recorded: {count_of(self.graph.dropped, 'more op')}; raise `limit` for more.")
        return notes

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """Return the graph as `Graph.to_networkx` does."""
        return self.graph.to_networkx()

    def to_dot(self) -> str:
        """Return Graphviz: ops in boxes, a cluster for each module of the forward pass, tensors as edges."""
        ops_by_module: dict[str, list[Op]] = {}
        for op in self.graph.ops:
            # Backward ops lie in no cluster: their edges would cross all of them.
            ops_by_module.setdefault(op.module if op.phase != "backward" else "", []).append(op)
        lines = ["digraph trace {", "  node [shape=box];"]
        for number, (module, ops) in enumerate(ops_by_module.items()):
            nodes = [f"    {_dot_node(op)}" for op in ops]
            box = [f"  subgraph cluster_{number} {{", f"    label={_quoted(module)};", *nodes, "  }"]
            lines += box if module else nodes
        return "\n".join([*lines, *_dot_edges(self.graph), "}"])

    def to_text(self) -> str:
        """Return a listing as ONNX prints graphs: a line for each tensor from outside, then for each op."""
        graph = self.graph
        outside_tensors = (tensor for tensor in graph.tensors if tensor.producer is None)
        lines = [
            f"graph ({', '.join(graph.frameworks)}) {{",
            *(f"  {tensor.kind} {_tensor_name(tensor)}: {tensor}" for tensor in outside_tensors),
            *(f"  {_op_line(graph, op)}" for op in graph.ops), "}",
        ]  # fmt: skip
        return "\n".join(lines + [f"# {graph.dropped} more ops were not recorded"] * (graph.dropped > 0))

    def to_model_explorer(self) -> str:
        """Return JSON for Model Explorer, with modules as boxes, and a box for all backward ops.

        Source: github.com/google-ai-edge/model-explorer, `GraphCollection`.
        """
        graph = self.graph
        # Reversed, so that the first reader is the one that stays.
        readers = {index: op for op in reversed(graph.ops) for index in op.reads}
        outside_tensors = (t for t in graph.tensors if t.producer is None and t.index in readers)
        nodes = [_tensor_node(tensor, readers[tensor.index]) for tensor in outside_tensors]
        nodes += [_explorer_node(graph, op) for op in graph.ops]
        content = {"label": "amanda", "graphs": [{"id": "amanda", "nodes": nodes}]}
        return json.dumps(content, indent=1)

    def _forms(self) -> dict[str, Callable[[], str]]:
        forms = {".txt": self.to_text, ".dot": self.to_dot, ".model-explorer.json": self.to_model_explorer}
        return {**super()._forms(), **forms}


@checked
def load(path: str | Path) -> Graph:
    """Return the graph that `save` wrote as JSON; raise AmandaError for other files, newer versions."""
    return read_json(path, "file of a graph", Graph.from_dict)


def _tensor_name(tensor: Tensor) -> str:
    """Return a name that is unique in a listing: "%weight" from outside, "%weight.3" after a write, "%3"."""
    if tensor.name is None:
        return f"%{tensor.index}"
    return f"%{tensor.name}" if tensor.producer is None else f"%{tensor.name}.{tensor.index}"


def _op_line(graph: Graph, op: Op) -> str:
    """Return the line of an op: outputs, type with arguments, inputs, and a comment."""
    outputs = ", ".join(f"{_tensor_name(tensor)}: {tensor}" for tensor in graph.outputs(op))
    # Inputs that were left out at the end are not listed; those between are `_`.
    last_input = max((i for i, position in enumerate(op.inputs) if position is not None), default=-1)
    inputs = ", ".join(_position_text(graph, position) for position in op.inputs[: last_input + 1])
    arguments = ", ".join(f"{name}={_argument_text(value)}" for name, value in (op.attributes or {}).items())
    call_text = f"{op.type}{'_' if op.in_place else ''}{f'[{arguments}]' if arguments else ''}"
    forward_text = "" if op.forward is None else f"of {op.forward}"
    notes = ", ".join(text for text in (f"{op.phase} {op.index}", forward_text, op.module, op.source) if text)
    return f"{f'{outputs} = ' if outputs else ''}{call_text}({inputs})  # {notes}"


def _position_text(graph: Graph, position: Position) -> str:
    """Return the name of a tensor, "_" for no tensor, names of a list in brackets."""
    if isinstance(position, tuple):
        return f"[{', '.join(_position_text(graph, item) for item in position)}]"
    return "_" if position is None else _tensor_name(graph.tensors[position])


def _argument_text(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _dot_node(op: Op) -> str:
    style = "" if op.phase != "backward" else ", style=dashed"
    tip = f"{op.name}\n{op.source}"
    return f"op{op.index} [label={_quoted(op.type)}, tooltip={_quoted(tip)}{style}];"


def _dot_edges(graph: Graph) -> Iterator[str]:
    """Yield nodes of tensors from outside, and edges from producers to consumers."""
    for tensor in graph.tensors:
        source = f"op{tensor.producer}"
        if tensor.producer is None and tensor.consumers:
            source = f"tensor{tensor.index}"
            shape = "ellipse" if tensor.kind == "input" else "note"
            yield f"  {source} [label={_quoted(tensor.name or tensor.kind)}, shape={shape}];"
        for consumer in tensor.consumers:
            # An op that writes a part of its input would point to itself.
            if consumer != tensor.producer:
                yield f"  {source} -> op{consumer} [label={_quoted(str(tensor))}];"


def _quoted(text: str) -> str:
    """Return a string of DOT, in which only quotes, backslashes and line ends have a meaning."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _tensor_node(tensor: Tensor, reader: Op) -> dict[str, Any]:
    """Return the node of a tensor that no op made, beside the op that reads it first."""
    return {
        "id": f"tensor{tensor.index}", "label": tensor.name or tensor.kind,
        "namespace": _explorer_box(reader) if tensor.kind in ("parameter", "buffer", "constant") else "",
        "attrs": _key_values({"kind": tensor.kind}), "outputsMetadata": _explorer_outputs([tensor]),
    }  # fmt: skip


def _explorer_node(graph: Graph, op: Op) -> dict[str, Any]:
    """Return the node of an op."""
    attributes = {
        "name": op.name, "phase": op.phase, "source": op.source, "id": f"{op.id:016x}",
        **({} if op.calls is None else {"calls": op.calls}), **(op.attributes or {}),
    }  # fmt: skip
    edges = enumerate(graph.inputs(op))
    return {
        "id": f"op{op.index}", "label": op.type, "namespace": _explorer_box(op),
        "attrs": _key_values(attributes),
        "incomingEdges": [_explorer_edge(graph, tensor, i) for i, tensor in edges
                          if tensor.producer != op.index],
        "outputsMetadata": _explorer_outputs(graph.outputs(op)),
    }  # fmt: skip


def _explorer_edge(graph: Graph, tensor: Tensor, position: int) -> dict[str, str]:
    """Return the edge by which a tensor enters a node."""
    source, output = f"tensor{tensor.index}", 0
    if tensor.producer is not None:
        source = f"op{tensor.producer}"
        # Model Explorer numbers the outputs of a node, written tensors after its results.
        output = graph.ops[tensor.producer].makes.index(tensor.index)
    return {
        "sourceNodeId": source, "sourceNodeOutputId": str(output), "targetNodeInputId": str(position)
    }  # fmt: skip


def _explorer_box(op: Op) -> str:
    """Return the box of an op: its module, inside a box for its phase unless that is forward."""
    # Boxes nest at slashes; TensorFlow's scopes have them already.
    path = op.module if "/" in op.module else op.module.replace(".", "/")
    return path if op.phase == "forward" else f"{op.phase}/{path}".rstrip("/")


def _explorer_outputs(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return the outputs of a node as Model Explorer reads them, numbered from 0."""
    attributes = ({"tensor_shape": str(tensor), "tensor": tensor.index} for tensor in tensors)
    return [{"id": str(position), "attrs": _key_values(values)} for position, values in enumerate(attributes)]


def _key_values(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return attributes of a node as Model Explorer reads them."""
    return [
        {"key": key, "value": value if isinstance(value, str) else json.dumps(value)}
        for key, value in values.items()
    ]
