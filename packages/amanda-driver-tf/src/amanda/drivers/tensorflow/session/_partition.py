"""The division of a rewritten graph: nodes that run as hidden copies, and the user's own.

A run's copy stands by itself: state that goes by a name (variables) is found under that name.
What a kernel holds (generators, iterators, queues, tables) cannot be copied: such nodes, and all that they
depend on, stay where they are, and the copies read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import op_def_registry


class Partition(NamedTuple):
    """copied: nodes that run as copies, in order.  torn: those whose state a copy begins anew."""

    copied: list[Any]
    torn: list[Any]


def partition(own: Mapping[str, Any], rewritten: Sequence[Any]) -> Partition:
    """Part rewritten nodes; nothing is copied where none differs from the user's.

    own: the user's nodes by name.
    """
    changed = _changed(own, rewritten)
    if not changed:
        return Partition([], [])
    held = [node for node in rewritten if holds_state(node)]
    stay = _ancestors([node.name for node in held if node.name not in changed], rewritten)
    return Partition(
        [node for node in rewritten if node.name not in stay], [node for node in held if node.name in changed]
    )


def source(read: str) -> str:
    """The node that an input of a node comes from."""
    return read.removeprefix("^").partition(":")[0]


def holds_state(node: Any) -> bool:
    """Return True if a node's kernel holds state that no other kernel finds by a name."""
    kind = _kind(node.op)
    return kind == "kernel" or (kind == "named" and not node.attr["shared_name"].s)


_BY_NODE_NAME = ("Variable", "VariableV2")


@cache
def _kind(type: str) -> str:
    """Return where an op keeps state between runs: "kernel", what "shared_name" says, or neither."""
    definition = op_def_registry.get(type)
    if definition is None or not definition.is_stateful or type in _BY_NODE_NAME:
        return ""
    attributes = {one.name for one in definition.attr}
    if type == "VarHandleOp":
        return "named"
    if {"seed", "seed2"} <= attributes:
        return "kernel"
    handle = any(one.is_ref or one.type == types_pb2.DT_RESOURCE for one in definition.output_arg)
    return "kernel" if handle and not definition.input_arg else ""


def _changed(own: Mapping[str, Any], rewritten: Sequence[Any]) -> set[str]:
    """Names of nodes that are changed, new, or depend on such a node."""
    readers: dict[str, list[str]] = defaultdict(list)
    waiting: list[str] = []
    for node in rewritten:
        for read in node.input:
            readers[source(read)].append(node.name)
        mine = own.get(node.name)
        if mine is None or (mine is not node and mine != node):
            waiting.append(node.name)
    reached = set(waiting)
    while waiting:
        for name in readers[waiting.pop()]:
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached


def _ancestors(names: Iterable[str], nodes: Sequence[Any]) -> Collection[str]:
    """The nodes of these names and all that they depend on."""
    by_name = {node.name: node for node in nodes}
    reached = set(names)
    waiting = list(reached)
    while waiting:
        for read in by_name[waiting.pop()].input:
            name = source(read)
            if name in by_name and name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached
