"""Facts of the nodes of an exported graph of PyTorch: type, module, and the memory of values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from amanda.tools.kit import leaves
from amanda.tools.mapping import torch_word
from amanda.tools.partition._cut import PartitionError

_BLOCKS = {
    "wrap_with_set_grad_enabled": "torch.no_grad() or enable_grad()",
    "wrap_with_autocast": "torch.autocast",
    "wrap_inference_mode": "torch.inference_mode()",
}
"""Context managers as users write them, by the op that the exporter keeps them as."""
_SUBSCRIPTS = {"index", "select", "slice"}
_KEEP_STATISTICS = {"batch_norm", "instance_norm"}


def type_of(node: Any) -> str:
    """Return the type of a node in the words of a trace."""
    name = torch_word(node.target.__name__.partition(".")[0].rstrip("_"))
    return "getitem" if name in _SUBSCRIPTS else name


def module_of(node: Any) -> str:
    """Return the path of the module that calls a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _aliased(node: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the nodes whose memory an op gives on or writes to, with whether it writes."""
    schema = getattr(node.target, "_schema", None)
    for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.alias_info is not None:
            for one in leaves([value]):
                yield one, argument.alias_info.is_write


def written(node: Any) -> list[Any]:
    """Return the nodes that an op writes to; the statistics of a normalisation are not in its schema."""
    if node.op != "call_function":
        return []
    statistics = node.args[3:5] if type_of(node) in _KEEP_STATISTICS else ()
    return [*(one for one, writes in _aliased(node) if writes), *(one for one in statistics if one)]


def roots(nodes: Iterable[Any]) -> dict[Any, Any]:
    """Return for each node the first one in whose memory its value lies."""
    found = dict[Any, Any]()
    for node in nodes:
        of = [one for one, _ in _aliased(node)] if node.op == "call_function" else []
        if node.target is operator.getitem:
            of = list(node.all_input_nodes)
        found[node] = found[of[0]] if of else node
    return found


def is_assignment(node: Any) -> bool:
    """Return True for the node by which an exported graph assigns a value to a buffer."""
    is_copy = node.op == "call_function" and node.name.startswith("copy__default")
    return is_copy and node.args[0].op == "get_attr" and not node.users


def remove_copies_onto_themselves(graph: Any) -> None:
    """Remove assignments of a buffer whose value an op in place has written there already (`n += 1`)."""
    for node in list(graph.nodes):
        if is_assignment(node):
            buffer, value = node.args
            while value is not buffer and value.op == "call_function" and _is_in_place(value):
                value = value.args[0]
            if value is buffer:
                graph.erase_node(node)


def name_as_in_stages(graph: Any) -> None:
    """Name the parameters, buffers and inputs of a graph as PyTorch's `split_module` does in the stages.

    PyTorch finds the parameters of a stage by these names, also where an op has one of them, such as `mean`.
    """
    from torch.fx.graph import _Namespace

    names, taken = _Namespace(), set[str]()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            node.name = names.create_name(graph._target_to_str(node.target), None)
            taken.add(node.name)
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr") and node.name in taken:
            node.name = graph._graph_namespace.create_name(f"{node.name}_op", None)


def _is_in_place(node: Any) -> bool:
    """Return True for an op that gives back its first argument, to which it writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write) and len(schema.returns) == 1


def check_blocks(module: Any) -> None:
    """Raise PartitionError for a block that the exporter keeps as one op with a graph of its own."""
    for node in module.graph.nodes:
        for block in node.all_input_nodes if node.op == "call_function" else ():
            if block.op == "get_attr" and hasattr(getattr(module, block.target, None), "graph"):
                name = getattr(node.target, "__name__", str(node.target))
                raise PartitionError(
                    f"module {module_of(node)!r} runs a block under {_BLOCKS.get(name, name)}, which "
                    "PyTorch's exporter keeps apart and its pipeline cannot split; leave it out of the "
                    "model, compute it before and pass its values as inputs, or cut by hand"
                )
