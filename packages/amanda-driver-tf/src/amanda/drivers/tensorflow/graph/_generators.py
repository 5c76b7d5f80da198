"""Random operations whose kernels hold their generators: in a copy these begin anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensorflow.python.framework import op_def_registry


def draws(functions: Iterable[Any]) -> list[str]:
    """Names of the nodes of functions whose kernels hold generators that start from a seed."""
    return [f"{node.name} ({node.op})" for one in functions for node in one.node_def if _draws(node)]


def callees(functions: Iterable[Any], find: Any) -> list[Any]:
    """The functions and all that they call, each once; `find` gives a definition by name, or None."""
    found = {one.signature.name: one for one in functions}
    ahead = list(found.values())
    while ahead:
        for name in _called(ahead.pop()):
            definition = None if name in found else find(name)
            if definition is not None:
                found[name] = definition
                ahead.append(definition)
    return list(found.values())


def _draws(node: Any) -> bool:
    definition = op_def_registry.get(node.op)
    if definition is None or not definition.is_stateful or "seed2" not in node.attr:
        return False
    return bool(node.attr["seed"].i or node.attr["seed2"].i)  # without both, no run repeats another


def _called(function: Any) -> Iterator[str]:
    for node in function.node_def:
        for value in node.attr.values():
            if value.func.name:
                yield value.func.name
            yield from (one.name for one in value.list.func)
