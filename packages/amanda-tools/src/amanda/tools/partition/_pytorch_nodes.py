"""Facts of the nodes of an exported graph of PyTorch: type, module, and the memory of values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from amanda.tools.mapping._pytorch import word

_SUBSCRIPTS = {"index", "select", "slice"}
_KEEP_STATISTICS = {"batch_norm", "instance_norm"}


def type_of(node: Any) -> str:
    """Return the type of a node in the words of a trace."""
    name = word(node.target.__name__.partition(".")[0].rstrip("_"))
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
            for one in value if isinstance(value, (list, tuple)) else (value,):
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
