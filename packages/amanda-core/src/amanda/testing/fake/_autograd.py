"""The tape: nodes that operators leave, and the engine that walks them backwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

from amanda.testing.fake._tensor import Tensor, mapped

Gradients = Sequence[Tensor | None]
Formula = Callable[[Gradients], Gradients]

_numbers = count(1)


class _Mode(threading.local):
    enabled = True


_mode = _Mode()


def next_number() -> int:
    """A number between those of the nodes made before and after."""
    return next(_numbers)


class Node:
    """One step of the tape: from the gradients of its outputs to those of its inputs.

    edges: for each input the node that its gradient goes to, and which output of that node it is.
    number: grows in the order of making.  metadata: for whoever watches.
    pre_hooks, hooks: called with (grad_outputs), (grad_inputs, grad_outputs); may give others.
    """

    def __init__(
        self, edges: Sequence[tuple[Node, int] | None], formula: Formula, outputs: int, number: int
    ) -> None:
        self.edges = edges
        self.formula = formula
        self.outputs = outputs
        self.number = number
        self.metadata: dict[str, Any] = {}
        self.pre_hooks: list[Callable[[Gradients], Gradients | None]] = []
        self.hooks: list[Callable[[Gradients, Gradients], Gradients | None]] = []


class AccumulateGrad(Node):
    """The end of the tape at a leaf."""

    def __init__(self, leaf: Tensor) -> None:
        super().__init__([], self._accumulate, 1, 0)  # made when first needed, which is no order
        self.leaf = leaf

    def _accumulate(self, grads: Gradients) -> Gradients:
        (grad,) = grads
        if grad is not None:
            self.leaf.grad = _added(self.leaf.grad, grad)
        return []


@cache
def _node_type(name: str) -> type[Node]:
    return type(name, (Node,), {})


def is_grad_enabled() -> bool:
    """Return True if operators leave nodes on this thread."""
    return _mode.enabled


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    before, _mode.enabled = _mode.enabled, enabled
    try:
        yield
    finally:
        _mode.enabled = before


def no_grad() -> Any:
    """Context in which operators leave no nodes."""
    return _grad_mode(False)


def enable_grad() -> Any:
    """Context in which operators leave nodes."""
    return _grad_mode(True)


def record(name: str, inputs: Sequence[Any], outputs: Sequence[Tensor], formula: Formula) -> None:
    """Leave a node for outputs made from inputs, if any of these requires a gradient."""
    edges = [_edge(value) for value in inputs]
    if not _mode.enabled or not any(edges):
        return
    node = _node_type(name)(edges, formula, len(outputs), next_number())
    for slot, output in enumerate(outputs):
        output.node, output.slot, output.requires_grad = node, slot, True


def _edge(value: Any) -> tuple[Node, int] | None:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    if value.node is not None:
        return value.node, value.slot
    if value.accumulator is None:
        value.accumulator = AccumulateGrad(value)
    return value.accumulator, 0


def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Walk the tape backwards from outputs with these gradients."""
    waiting: dict[Node, list[Tensor | None]] = {}
    for output, grad in zip(outputs, grads, strict=True):
        edge = _edge(output)
        if edge is None:
            raise RuntimeError("the tensor does not require a gradient")
        _give(waiting, edge, grad)
    missing = _consumers(list(waiting))
    ready = [node for node in waiting if not missing[node]]
    with no_grad():
        while ready:
            node = ready.pop()
            for edge, gradient in zip(node.edges, _run(node, waiting.pop(node)), strict=True):
                if edge is None:
                    continue
                if gradient is not None:
                    _give(waiting, edge, gradient)
                missing[edge[0]] -= 1
                if not missing[edge[0]]:
                    waiting.setdefault(edge[0], [None] * edge[0].outputs)
                    ready.append(edge[0])


def _run(node: Node, grad_outputs: Gradients) -> Gradients:
    for pre_hook in list(node.pre_hooks):
        grad_outputs = pre_hook(grad_outputs) or grad_outputs
    grad_inputs = node.formula(grad_outputs)
    for hook in list(node.hooks):
        grad_inputs = hook(grad_inputs, grad_outputs) or grad_inputs
    return grad_inputs


def _consumers(roots: list[Node]) -> dict[Node, int]:
    counts = dict.fromkeys(roots, 0)
    waiting = list(roots)
    while waiting:
        for edge in waiting.pop().edges:
            if edge is None:
                continue
            if edge[0] not in counts:
                counts[edge[0]] = 0
                waiting.append(edge[0])
            counts[edge[0]] += 1
    return counts


def _give(waiting: dict[Node, list[Tensor | None]], edge: tuple[Node, int], grad: Tensor) -> None:
    node, slot = edge
    grads = waiting.setdefault(node, [None] * node.outputs)
    grads[slot] = _added(grads[slot], grad)


def _added(total: Tensor | None, gradient: Tensor) -> Tensor:
    return gradient.detach() if total is None else mapped(lambda a, b: a + b, total, gradient)
