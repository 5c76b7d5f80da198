"""Backward ops: autograd's nodes, in which the routines of tools run around the gradient."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from autograd.core import VJPNode

from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, Operation, State, Trace
from amanda.drivers.autograd._boxes import ElementGradient, dense, elements, nodes
from amanda.interceptor import Suspension


class Region:
    """What `tracing` returns: the nodes between an op's inputs and its results are those of the op."""

    def begin(self, inputs: Sequence[Any]) -> None:
        """Note the inputs of the op."""
        self.inputs = [list(nodes(value)) for value in inputs]

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def mark(self, driver: EagerDriver, trace: Trace, values: Sequence[Any]) -> None:
        """Leave a trace with the op's nodes, except those that have one already."""
        visited = {node for input_nodes in self.inputs for node in input_nodes}
        waiting = [node for value in values for node in nodes(value)]
        for place, node in enumerate(waiting):
            if node in visited or not isinstance(node, VJPNode) or isinstance(node.vjp, BackwardOp):
                continue
            visited.add(node)
            # `enumerate` follows the list as it grows.
            waiting += node.parents
            if not isinstance(node.vjp, ElementGradient):
                node.vjp = BackwardOp(driver, trace, node, place, self._positions(node))

    def _positions(self, node: VJPNode) -> list[int | None]:
        """Return for each gradient that leaves a node the position of its input; None for other nodes."""
        positions: list[int | None] = []
        for parent in node.parents:
            start = next((i for i in reversed(positions) if i is not None), -1) + 1
            found = (i for i in range(start, len(self.inputs)) if parent in self.inputs[i])
            positions.append(next(found, None))
        return positions


class Pass(threading.local):
    """The backward pass that runs on a thread, with the state at its start; None outside of scopes."""

    state: State | None = None
    traces: dict[int, Trace] | None = None


_running = Pass()


def is_running() -> bool:
    """Return True while a backward pass runs on this thread."""
    return _running.traces is not None


class BackwardOp:
    """The gradient of an op's node, which the node holds in the place of its own."""

    def __init__(
        self, driver: EagerDriver, trace: Trace, node: VJPNode, place: int, positions: list[int | None]
    ) -> None:
        self._driver, self._trace, self._place, self._vjp = driver, trace, place, node.vjp
        # Gradients of a list of tensors, and of a replacement's own nodes, have no positions of their own.
        is_aligned = None not in positions and len(set(positions)) == len(positions)
        self._positions = positions if is_aligned else list(range(len(positions)))

    def __call__(self, gradient: Any) -> Any:
        state, traces = _running.state, _running.traces
        if state is None or traces is None:
            return self._vjp(gradient)
        trace = self._trace
        kind = Operation(f"{trace.facts.op.__name__}_vjp")
        step = BackwardStep(self._driver, trace, kind, self._place, state)
        if not step.has_work:
            return self._vjp(gradient)
        traces[id(trace)] = trace
        grad_outputs, rebuild = elements(dense(gradient))
        entering = step.before(grad_outputs)
        grads = [dense(grad) for grad in self._vjp(rebuild(entering))]
        grad_inputs: list[Any] = [None] * max([*self._positions, len(trace.facts.names) - 1], default=0)
        grad_inputs.append(None)
        for position, grad in zip(self._positions, grads, strict=True):
            grad_inputs[position] = grad
        leaving = step.after(grad_inputs, entering)
        return [leaving[position] for position in self._positions]


def followed(driver: EagerDriver, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `backward_pass` with the routines of tools around each node."""

    @functools.wraps(original)
    def backward_pass(gradient: Any, end_node: Any) -> Any:
        activation = interceptor.active()
        outer = _running.state, _running.traces
        traces: dict[int, Trace] = {}
        _running.state, _running.traces = None if activation is None else activation.state, traces
        try:
            # What computes gradients are no ops of the program, with or without routines.
            with Suspension():
                return original(gradient, end_node)
        finally:
            _running.state, _running.traces = outer
            if activation is not None:
                # A new step begins after a backward pass, so ids at the top level count anew.
                interceptor.reset_root()
            for trace in traces.values():
                if not trace.pending:
                    driver.finish(trace)

    return backward_pass
