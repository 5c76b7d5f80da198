"""The cone of a session's run: the ops that its fetches and targets need, in topological order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Endpoint = tuple[str, int]
"""A tensor of a graph: its op's name and its index among that op's outputs."""


class Request(NamedTuple):
    """A request of a run; one request, one instrumented copy.

    fetches: tensors whose values are returned.  targets: names of ops that are run besides.
    feeds: tensors whose values are given.
    """

    fetches: tuple[Endpoint, ...]
    targets: tuple[str, ...]
    feeds: frozenset[Endpoint]


def cone(graph: Any, request: Request) -> list[Any]:
    """The operations of a graph that a request executes, each after those that it reads.

    In a loop the NextIteration ops come after what reads them.
    """
    wanted = [name for name, index in request.fetches if (name, index) not in request.feeds]
    roots = [graph.get_operation_by_name(name) for name in (*wanted, *request.targets)]
    return _topological(roots, request.feeds)


def after_forward(ops: Sequence[Any], request: Request, forward: Mapping[str, Any]) -> list[Any]:
    """The operations of a cone, with those that are differentiated, and what they read, first.

    The others are in the order in which they were made, as far as they read one another: so the gradients of
    an operation come before all that is computed from one of them.
    """
    names = {op.name for op in ops}
    before = {name: op for name, op in forward.items() if op.name in names}
    differentiated = {op.name for op in forward.values()}
    first = [op for op in ops if op.name in differentiated]
    made = {op.name: i for i, op in enumerate(ops[0].graph.get_operations())} if ops else {}
    return _topological([*first, *sorted(ops, key=lambda op: made[op.name])], request.feeds, before)


def _topological(
    roots: Iterable[Any], feeds: Collection[Endpoint], before: Mapping[str, Any] = MappingProxyType({})
) -> list[Any]:
    order: list[Any] = []
    seen: set[str] = set()
    waiting = list(dict.fromkeys(roots))
    while waiting:
        root = waiting.pop(0)
        if root.name in seen:
            continue
        seen.add(root.name)
        path = [(root, _read_by(root, feeds, waiting, before))]
        while path:
            op, reads = path[-1]
            for read in reads:
                if read.name not in seen:
                    seen.add(read.name)
                    path.append((read, _read_by(read, feeds, waiting, before)))
                    break
            else:
                order.append(op)
                path.pop()
    return order


def _read_by(
    op: Any, feeds: Collection[Endpoint], later: list[Any], before: Mapping[str, Any]
) -> Iterator[Any]:
    """The operations that come before one; the ends of a loop are left for later."""
    reads: list[Any] = [before[op.name]] if op.name in before else []
    reads += op.control_inputs
    for tensor in op.inputs:
        source = tensor.op
        if (source.name, tensor.value_index) not in feeds:
            reads.append(source)
    if op.type in ("Merge", "RefMerge"):
        later.extend(read for read in reads if read.type.endswith("NextIteration"))
        reads = [read for read in reads if not read.type.endswith("NextIteration")]
    return iter(reads)
