"""Random operations whose kernels hold their generators, which begin anew in a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensorflow.python.framework import op_def_registry


def ops_with_generators(functions: Iterable[Any]) -> list[str]:
    """Return the names of nodes of functions whose kernels hold a seeded generator."""
    return [
        f"{node.name} ({node.op})"
        for function in functions
        for node in function.node_def
        if _has_generator(node)
    ]


def with_callees(functions: Iterable[Any], find: Any) -> list[Any]:
    """Return the functions and all that they call, each once; `find` returns a definition by name."""
    definitions = {function.signature.name: function for function in functions}
    pending = list(definitions.values())
    while pending:
        for name in _callee_names(pending.pop()):
            definition = None if name in definitions else find(name)
            if definition is not None:
                definitions[name] = definition
                pending.append(definition)
    return list(definitions.values())


def _has_generator(node: Any) -> bool:
    definition = op_def_registry.get(node.op)
    if definition is None or not definition.is_stateful or "seed2" not in node.attr:
        return False
    return bool(node.attr["seed"].i or node.attr["seed2"].i)  # without both, no run repeats another


def _callee_names(function: Any) -> Iterator[str]:
    for node in function.node_def:
        for value in node.attr.values():
            if value.func.name:
                yield value.func.name
            yield from (callee.name for callee in value.list.func)
