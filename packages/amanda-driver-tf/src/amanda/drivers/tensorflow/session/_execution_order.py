"""The ops that the fetches and targets of a run need, in topological order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Endpoint = tuple[str, int]
"""A tensor of a graph: its op's name and its index among that op's outputs."""


class RunRequest(NamedTuple):
    """The fetches, targets and feeds of a run; each request has an instrumented copy of its own.

    fetches: tensors whose values are returned.  targets: names of ops that run without a result.
    feeds: tensors whose values the caller passes.
    """

    fetches: tuple[Endpoint, ...]
    targets: tuple[str, ...]
    feeds: frozenset[Endpoint]


def executed_ops(graph: Any, request: RunRequest) -> list[Any]:
    """Return the operations of a graph that a request executes, each after those that it reads.

    A loop is a cycle, which is cut at its NextIteration ops: they come after the ops that read them.
    """
    fetched = [name for name, index in request.fetches if (name, index) not in request.feeds]
    roots = [graph.get_operation_by_name(name) for name in (*fetched, *request.targets)]
    return _sort_topologically(roots, request.feeds)


def after_forward(ops: Sequence[Any], request: RunRequest, forward: Mapping[str, Any]) -> list[Any]:
    """Return the operations with those that are differentiated, and what these read, first.

    The others keep the order in which the graph made them, as far as what they read allows. So the gradient
    operations of an operation come before the ops that are computed from its gradients.
    """
    names = {op.name for op in ops}
    forward_in_run = {name: op for name, op in forward.items() if op.name in names}
    differentiated = {op.name for op in forward.values()}
    first = [op for op in ops if op.name in differentiated]
    positions = {op.name: i for i, op in enumerate(ops[0].graph.get_operations())} if ops else {}
    return _sort_topologically(
        [*first, *sorted(ops, key=lambda op: positions[op.name])], request.feeds, forward_in_run
    )


def _sort_topologically(
    roots: Iterable[Any], feeds: Collection[Endpoint], forward: Mapping[str, Any] = MappingProxyType({})
) -> list[Any]:
    """Return the roots and all that they read in topological order, without recursion.

    forward: by the name of a gradient operation, its forward operation, which comes before it.
    """
    order: list[Any] = []
    visited: set[str] = set()
    pending = list(dict.fromkeys(roots))
    while pending:
        root = pending.pop(0)
        if root.name in visited:
            continue
        visited.add(root.name)
        # Graphs may be deeper than Python's limit of recursion.
        path = [(root, _predecessors(root, feeds, pending, forward))]
        while path:
            op, reads = path[-1]
            for read in reads:
                if read.name not in visited:
                    visited.add(read.name)
                    path.append((read, _predecessors(read, feeds, pending, forward)))
                    break
            else:
                order.append(op)
                path.pop()
    return order


def _predecessors(
    op: Any, feeds: Collection[Endpoint], later: list[Any], forward: Mapping[str, Any]
) -> Iterator[Any]:
    """Return the operations that come before an operation; add the ends of a loop to `later`."""
    reads: list[Any] = [forward[op.name]] if op.name in forward else []
    reads += op.control_inputs
    for tensor in op.inputs:
        source = tensor.op
        if (source.name, tensor.value_index) not in feeds:
            reads.append(source)
    if op.type in ("Merge", "RefMerge"):
        later.extend(read for read in reads if read.type.endswith("NextIteration"))
        reads = [read for read in reads if not read.type.endswith("NextIteration")]
    return iter(reads)
