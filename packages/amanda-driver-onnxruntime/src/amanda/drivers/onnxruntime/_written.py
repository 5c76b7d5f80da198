"""The model that a rewriting came to, with each constant once, and none that nothing reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, inliner, numpy_helper

from ._forms import is_plain
from ._names import bodies_of, reads, renamed_nodes
from ._places import Compute
from ._rewrite import ModelRewriting
from ._symbols import tensor_type

_INPUTS_ARE_APART = 4
"""IR version before which initializers are inputs of the graph."""


def written(source: ModelProto, rewriting: ModelRewriting) -> ModelProto:
    """The model that a rewriting came to, which names what `source` names."""
    made = inliner.inline_local_functions(source) if source.functions else copied(source)
    graph = made.graph
    same = _equal_constants(rewriting, graph)
    names, extra = _swapped(rewriting, same, graph)
    nodes = [item.node for item in rewriting.items if isinstance(item, Compute)]
    del graph.node[:]
    graph.node.extend(renamed_nodes(nodes, names))
    graph.node.extend(extra)
    stored = {name: array for name, array in rewriting.constants.items() if name not in same}
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()
    )
    if made.ir_version < _INPUTS_ARE_APART:
        graph.input.extend(_declared(name, array) for name, array in stored.items())
    drop_unread(graph, rewriting.model.overridable)
    return made


def copied(source: ModelProto) -> ModelProto:
    """A copy of a model."""
    made = ModelProto()
    made.CopyFrom(source)
    return made


def drop_unread(graph: GraphProto, kept: Iterable[str] = ()) -> None:
    """Leave out constants that nothing reads any more, and what only moves them; in bodies too.

    Types of values between nodes are left out as well: runtimes infer them, and routines may change them.
    kept: names of initializers that stay, read or not.
    """
    del graph.value_info[:]
    wanted = {*kept, *(one.name for one in graph.output)}
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if _moves(node) and wanted.isdisjoint(node.output):
            del graph.node[i]
            continue
        for body in bodies_of(node):
            drop_unread(body)
        wanted.update(reads(node))
    unread = {tensor.name for tensor in graph.initializer} - wanted
    for field in (graph.initializer, graph.input):
        for i in reversed(range(len(field))):
            if field[i].name in unread:
                del field[i]
    for i in reversed(range(len(graph.sparse_initializer))):
        if graph.sparse_initializer[i].values.name not in wanted:
            del graph.sparse_initializer[i]


def _moves(node: NodeProto) -> bool:
    return is_plain(node) or (node.domain in ("", "ai.onnx") and node.op_type == "Constant")


def _equal_constants(rewriting: ModelRewriting, graph: GraphProto) -> dict[str, str]:
    """For each constant of a routine that equals one before it, or an initializer, the name of that."""
    layouts = {_layout(array) for array in rewriting.constants.values()}
    apart = rewriting.model.overridable | set(_inner_names(graph))
    known = {one.name: rewriting.model.constants[one.name] for one in graph.initializer}
    known = {name: one for name, one in known.items() if name not in apart and _layout(one) in layouts}
    first: dict[Any, str] = {}
    same = {}
    for name, array in (known | rewriting.constants).items():
        found = first.setdefault((_layout(array), _digest(array)), name)
        if found != name and name not in known:
            same[name] = found
    return same


def _layout(array: Any) -> tuple[str, tuple[int, ...]]:
    return np.asarray(array).dtype.name, np.shape(array)


def _digest(array: Any) -> bytes:
    values = np.ascontiguousarray(array)
    if values.dtype.kind == "O":
        return repr(values.tolist()).encode()
    return hashlib.blake2b(values.view(np.uint8).data if values.size else b"").digest()


def _inner_names(graph: GraphProto) -> Iterator[str]:
    """Names of the values in bodies, which may hide those outside."""
    for node in graph.node:
        for body in bodies_of(node):
            yield from (one.name for one in (*body.input, *body.initializer))
            yield from (name for inner in body.node for name in inner.output)
            yield from _inner_names(body)


def _swapped(
    rewriting: ModelRewriting, same: Mapping[str, str], graph: GraphProto
) -> tuple[dict[str, str], list[NodeProto]]:
    """New names, so that the model's outputs keep theirs; nodes for outputs that nothing else makes.

    same: constants that another stands for.
    """
    outputs = [one.name for one in graph.output]
    changed = {name: now for name in outputs if (now := rewriting.renamed.get(name, name)) != name}
    names = {name: f"{rewriting.fresh('original')}/{name}" for name in changed}
    made = {name for item in rewriting.items if isinstance(item, Compute) for name in item.node.output}
    names |= {name: names.get(other, other) for name, other in same.items()}
    extra = []
    for output, now in changed.items():
        if now in made and now not in names and now not in outputs:
            names[now] = output
        else:
            extra.append(onnx.helper.make_node("Identity", [names.get(now, now)], [output]))
    return names, extra


def _declared(name: str, array: Any) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=tensor_type(np.asarray(array).dtype, np.shape(array)))
