"""Writing of a rewritten model, with equal constants stored once, and without unread constants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, inliner, numpy_helper

from ._items import ComputedNode
from ._names import bodies_of, names_read, rename_values
from ._rearrangements import keeps_elements
from ._rewrite import ModelRewriting
from ._symbols import tensor_type

_INPUTS_ARE_APART = 4
"""IR version before which initializers are inputs of the graph."""


def write_model(source: ModelProto, rewriting: ModelRewriting) -> ModelProto:
    """Return the rewritten model, in which values of `source` keep their names."""
    # The source, not the rewriting's model, since that lacks the large values.
    model = inliner.inline_local_functions(source) if source.functions else copy_model(source)
    graph = model.graph
    equal_names = _equal_constants(rewriting, graph)
    names, extra = _rename_outputs(rewriting, equal_names, graph)
    nodes = [item.node for item in rewriting.items if isinstance(item, ComputedNode)]
    del graph.node[:]
    graph.node.extend(rename_values(nodes, names))
    graph.node.extend(extra)
    new_constants = {name: array for name, array in rewriting.constants.items() if name not in equal_names}
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in new_constants.items()
    )
    if model.ir_version < _INPUTS_ARE_APART:
        graph.input.extend(_value_info(name, array) for name, array in new_constants.items())
    drop_unread(graph, rewriting.model.overridable)
    return model


def copy_model(source: ModelProto) -> ModelProto:
    """Return a copy of a model."""
    model = ModelProto()
    model.CopyFrom(source)
    return model


def drop_unread(graph: GraphProto, retained: Iterable[str] = ()) -> None:
    """Delete unread constants, and the nodes that only rearrange unread constants, also in bodies.

    Types of values between nodes are deleted, too: runtimes infer them, and routines may change them.
    retained: names of initializers that stay even if nothing reads them.
    """
    del graph.value_info[:]
    read_names = {*retained, *(output.name for output in graph.output)}
    # In reverse order, a node that only an unread node reads is found unread, too.
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if _only_moves_constants(node) and read_names.isdisjoint(node.output):
            del graph.node[i]
            continue
        for body in bodies_of(node):
            drop_unread(body)
        read_names.update(names_read(node))
    unread = {tensor.name for tensor in graph.initializer} - read_names
    for field in (graph.initializer, graph.input):
        for i in reversed(range(len(field))):
            if field[i].name in unread:
                del field[i]
    for i in reversed(range(len(graph.sparse_initializer))):
        if graph.sparse_initializer[i].values.name not in read_names:
            del graph.sparse_initializer[i]


def _only_moves_constants(node: NodeProto) -> bool:
    return keeps_elements(node) or (node.domain in ("", "ai.onnx") and node.op_type == "Constant")


def _equal_constants(rewriting: ModelRewriting, graph: GraphProto) -> dict[str, str]:
    """Return, for each constant of a routine that equals an initializer or an earlier constant, its name."""
    # Digests of all weights would take long, so only those with the layout of a new constant are compared.
    layouts = {_layout(array) for array in rewriting.constants.values()}
    # A default may be overridden at run time, and a name in a body may hide the constant.
    excluded = rewriting.model.overridable | set(_inner_names(graph))
    names = [tensor.name for tensor in graph.initializer if tensor.name not in excluded]
    initializers = {name: rewriting.model.constants[name] for name in names}
    initializers = {name: array for name, array in initializers.items() if _layout(array) in layouts}
    names_by_content: dict[Any, str] = {}
    equal_names = {}
    for name, array in (initializers | rewriting.constants).items():
        first_name = names_by_content.setdefault((_layout(array), _digest(array)), name)
        if first_name != name and name not in initializers:
            equal_names[name] = first_name
    return equal_names


def _layout(array: Any) -> tuple[str, tuple[int, ...]]:
    return np.asarray(array).dtype.name, np.shape(array)


def _digest(array: Any) -> bytes:
    values = np.ascontiguousarray(array)
    # Strings are objects, whose memory has addresses.
    if values.dtype.kind == "O":
        return repr(values.tolist()).encode()
    return hashlib.blake2b(values.view(np.uint8).data if values.size else b"").digest()


def _inner_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of values in bodies, which may hide values outside."""
    for node in graph.node:
        for body in bodies_of(node):
            yield from (entry.name for entry in (*body.input, *body.initializer))
            yield from (name for inner in body.node for name in inner.output)
            yield from _inner_names(body)


def _rename_outputs(
    rewriting: ModelRewriting, equal_names: Mapping[str, str], graph: GraphProto
) -> tuple[dict[str, str], list[NodeProto]]:
    """Return new names of values, so that the model's outputs keep theirs, and Identity nodes for the rest.

    equal_names: by a constant's name, the name of an equal constant that is stored instead.
    """
    outputs = [value.name for value in graph.output]
    changed = {name: current for name in outputs if (current := rewriting.renamed.get(name, name)) != name}
    # The node that computes the original value gives up the output's name.
    names = {name: f"{rewriting.new_name('original')}/{name}" for name in changed}
    computed = {
        name for item in rewriting.items if isinstance(item, ComputedNode) for name in item.node.output
    }
    names |= {name: names.get(first_name, first_name) for name, first_name in equal_names.items()}
    extra = []
    for output, current in changed.items():
        if current in computed and current not in names and current not in outputs:
            names[current] = output
        else:
            extra.append(onnx.helper.make_node("Identity", [names.get(current, current)], [output]))
    return names, extra


def _value_info(name: str, array: Any) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=tensor_type(np.asarray(array).dtype, np.shape(array)))
