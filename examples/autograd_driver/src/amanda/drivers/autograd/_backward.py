"""Backward ops: autograd's nodes, with the routines of tools around the gradient that each computes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from amanda import interceptor
from amanda.backend import BackwardPass, EagerDriver, Operation, Trace
from amanda.drivers.autograd._boxes import dense, elements, nodes
from autograd.core import VJPNode
from autograd.tracer import Node


def mark(trace: Trace, ends: Sequence[Sequence[Node]], values: Sequence[Any]) -> None:
    """Leave a trace with the nodes between the inputs of an op and its results, if they have none already.

    ends: nodes of each input.  values: the results.
    """
    visited = {node for nodes_of_input in ends for node in nodes_of_input}
    # One trace after another: in a derivative of a derivative the nodes of each have a pass of their own.
    for traced in zip_longest(*map(nodes, values)):
        waiting = [node for node in traced if node is not None]
        # The loop follows the list as it grows.
        for place, node in enumerate(waiting):
            if node in visited or not isinstance(node, VJPNode) or isinstance(node.vjp, BackwardOp):
                continue
            visited.add(node)
            waiting += node.parents
            node.vjp = BackwardOp(trace, place, node, ends)


_running = threading.local()
"""The backward pass on a thread, as `backward_pass`."""


class BackwardOp:
    """The gradient of an op, which its node has in the place of autograd's."""

    def __init__(self, trace: Trace, place: int, node: VJPNode, ends: Sequence[Sequence[Node]]) -> None:
        """Take the place of a node's gradient; ends: nodes of each input of the op."""
        self.trace, self.place, self.vjp = trace, place, node.vjp
        positions = [i for i, nodes in enumerate(ends) if any(end in node.parents for end in nodes)]
        # The node of a list of tensors, or one within a replacement, has gradients of other values.
        is_aligned = len(positions) == len(node.parents)
        self.positions = positions if is_aligned else range(len(node.parents))

    def __call__(self, gradient: Any) -> Any:
        """Return the gradients that leave the op; interception is suspended for the whole pass."""
        backward_pass, facts = getattr(_running, "backward_pass", None), self.trace.facts
        if backward_pass is None or facts is None:
            return self.vjp(gradient)
        step = backward_pass.step(self.trace, Operation(f"{facts.op.__name__}_vjp"), self.place)
        if not step.has_work:
            return self.vjp(gradient)
        grad_outputs, rebuild = elements(dense(gradient))
        grad_outputs = step.run_before(grad_outputs)
        grads = dict(zip(self.positions, map(dense, self.vjp(rebuild(grad_outputs))), strict=True))
        # None for an input without a gradient, so that the others have the positions of their inputs.
        count = max(len(facts.names), len(self.positions))
        grad_inputs = step.run_after([grads.get(position) for position in range(count)], grad_outputs)
        return [grad_inputs[position] for position in self.positions]


def followed(driver: EagerDriver, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `backward_pass` with the routines of tools around each node."""

    @functools.wraps(original)
    def backward_pass(gradient: Any, end_node: Any) -> Any:
        activation = interceptor.active()
        if activation is None:  # no scope is open, or this is part of a pass, as that of a checkpoint
            return original(gradient, end_node)
        try:
            # Primitives that compute gradients are no ops of the program.
            with BackwardPass(driver, activation.state) as _running.backward_pass, interceptor.Suspension():
                return original(gradient, end_node)
        finally:
            _running.backward_pass = None

    return backward_pass
