"""Backward passes of the fake framework: which operator made a node, and the routines around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, State, Trace
from amanda.interceptor import Suspension
from amanda.testing.fake import Node, Tensor, _autograd

_KEY = "amanda"
_LEAF_PLACE = 1 << 32


class NodeRange:
    """Context that knows which nodes were made within it."""

    def __enter__(self) -> NodeRange:
        self.start = _autograd.next_number()
        return self

    def __exit__(self, *_: object) -> None:
        self.end = _autograd.next_number()


class _Origin(NamedTuple):
    """The execution that a node comes from."""

    trace: Trace
    start: int


def mark(trace: Trace, node_range: NodeRange, values: list[Any]) -> None:
    """Leave a trace with the nodes that an operator made."""
    waiting = [value.node for value in values if isinstance(value, Tensor) and value.node]
    for node in _reached(waiting, lambda node: node_range.start < node.number < node_range.end):
        node.metadata.setdefault(_KEY, _Origin(trace, node_range.start))


def followed(driver: EagerDriver, original: Callable[..., None]) -> Callable[..., None]:
    """The function that runs backward passes, with the routines of tools around each node."""

    @functools.wraps(original)
    def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        activation = interceptor.active()
        if activation is None:
            return original(outputs, grads)
        nodes = list(_reached([edge[0] for output in outputs if (edge := _autograd._edge(output))]))
        origins = _origins(nodes)
        hooked = [_hook(driver, node, origin, activation.state) for node, origin in origins.items()]
        try:
            original(outputs, grads)
        finally:
            for remove in hooked:
                remove()
            interceptor.reset_root()
        for trace in {id(origin.trace): origin.trace for origin in origins.values()}.values():
            if not trace.pending:
                driver.finish(trace)

    return run_backward


def _hook(driver: EagerDriver, node: Node, origin: _Origin, state: State) -> Callable[[], None]:
    leaf = isinstance(node, _autograd.AccumulateGrad)
    place = node.number - origin.start
    if isinstance(node, _autograd.AccumulateGrad):
        place = _LEAF_PLACE + interceptor.ordinal(node.leaf)
    step = BackwardStep(driver, origin.trace, type(node), place, state, replaceable=not leaf)
    if not step.has_work:
        return lambda: None

    def before(grad_outputs: Any) -> list[Any]:
        with Suspension():
            return step.before(grad_outputs)

    def after(grad_inputs: Any, grad_outputs: Any) -> list[Any]:
        with Suspension():
            return step.after(grad_inputs, grad_outputs)

    def remove() -> None:
        node.pre_hooks.remove(before)
        node.hooks.remove(after)

    node.pre_hooks.append(before)
    node.hooks.append(after)
    return remove


def _reached(nodes: list[Node], admits: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    reached: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in reached or not admits(node):
            continue
        reached.add(node)
        yield node
        waiting += [edge[0] for edge in node.edges if edge]


def _origins(nodes: list[Node]) -> dict[Node, _Origin]:
    """Return where nodes come from; a leaf belongs to the operator that used it first."""
    origins: dict[Node, _Origin] = {}
    for node in sorted(nodes, key=lambda node: node.number):
        origin = node.metadata.get(_KEY)
        if origin is None:
            continue
        origins[node] = origin
        for edge in node.edges:
            if edge and isinstance(edge[0], _autograd.AccumulateGrad):
                origins.setdefault(edge[0], origin)
    return origins
