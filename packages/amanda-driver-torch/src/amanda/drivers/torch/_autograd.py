"""The backward pass: which nodes an op made, and hooks where a tool wants them."""

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
from amanda import interceptor
from amanda.backend import Attributes, BackwardStep, EagerDriver, State, Trace, settled_step
from amanda.interceptor import Suspension

from ._graphs import relieve
from ._overrides import Unseen

KEY = "amanda"
ACCUMULATE = "torch::autograd::AccumulateGrad"
_LEAF_PLACE = 1 << 32
_ORDER_STEP = 1 << 40

_sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Origin(NamedTuple):
    """Which execution a node comes from, told by readings of the sequence number.

    begin: before the op's routines, which may make nodes too.  start, end: around the op.
    order: 0 for the backward pass of an op, 1 for that of its backward op, and so on.
    """

    trace: Trace
    begin: int
    start: int
    end: int
    order: int = 0


class Made:
    """Context that brackets the nodes made within it, and those made since it was itself."""

    __slots__ = ("begin", "end", "start")

    def __init__(self) -> None:
        self.begin = _sequence()

    def __enter__(self) -> "Made":
        self.start = self.end = _sequence()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end = _sequence()


class Autograd(EagerDriver):
    """The part of the driver that maps backward ops to forward ops and instruments them."""

    def __init__(self) -> None:
        self.traces: weakref.WeakSet[Trace] = weakref.WeakSet()  # of graphs that are still there

    @property
    @abstractmethod
    def unseen(self) -> "Autograd":
        """The driver's face that no override of the user's sees."""

    def tracing(self) -> Made:
        """Context that brackets the nodes made by an op."""
        return Made()

    def made_between(self, begin: int, start: int, end: int) -> Made:
        """The bracket of these sequence numbers."""
        made = Made.__new__(Made)
        made.begin, made.start, made.end = begin, start, end
        return made

    def attach_trace(self, trace: Trace, made: Made, values: list[Any]) -> None:
        """Leave the trace at the nodes of the op's results; the rest is found from there."""
        if made.start == made.end:
            return
        self.traces.add(trace)
        origin = Origin(trace, made.begin, made.start, made.end)
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    _mark(tensor, origin)
                    if tensor._is_view() and tensor._base is not None:
                        _mark(tensor._base, origin)

    def follow_backward(self, attributes: Attributes) -> None:
        """Let every backward pass bring its nodes to the tools."""
        original = torch.autograd.graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            activation = interceptor.active()
            if activation is None or not self.traces:
                interceptor.reset_root()
                return original(outputs, *args, **kwargs)
            create_graph = bool(kwargs.get("create_graph", args[2] if len(args) > 2 else False))
            backward = _Backward(self.unseen, activation.state, create_graph)
            try:
                backward.add_hooks(outputs)
                result = original(outputs, *args, **kwargs)
            finally:
                backward.remove_hooks()
                interceptor.reset_root()
            backward.finish()
            return result

        attributes.set(torch.autograd.graph, original.__name__, run_backward)
        attributes.set(torch.autograd, original.__name__, run_backward)


class _Backward:
    """One backward pass: its nodes, mapped and hooked."""

    def __init__(self, driver: Autograd, state: State, create_graph: bool) -> None:
        self._driver = driver
        self._state = state
        self._create_graph = create_graph
        self._handles: list[Any] = []
        self._origins: dict[int, Origin] = {}

    def add_hooks(self, outputs: Sequence[Any]) -> None:
        """Hook the nodes that a tool wants of the graph from `outputs`."""
        with Unseen():
            self._nodes, edges = _graph_from(outputs)
        self._origins = _origins(self._nodes, edges)
        for key, origin in self._origins.items():
            self._hook(self._nodes[key], origin)

    def _hook(self, node: Any, origin: Origin) -> None:
        leaf = node.name() == ACCUMULATE
        place = (
            _LEAF_PLACE + interceptor.ordinal(node.variable) if leaf else node._sequence_nr() - origin.start
        )
        place += origin.order * _ORDER_STEP
        settled = settled_step(self._driver, origin.trace, type(node), place, self._state)
        if settled is not None and not self._create_graph:
            before = settled.before if settled.acts_before else None
            self._place_hooks(node, before, settled.after if settled.acts_after else None)
            return
        step = BackwardStep(self._driver, origin.trace, type(node), place, self._state, not leaf)
        if step.wanted or self._create_graph:
            hooks = _Hooks(step, origin, self._driver)
            self._place_hooks(node, hooks.before, hooks.after)

    def _place_hooks(
        self, node: Any, before: Callable[..., Any] | None, after: Callable[..., Any] | None
    ) -> None:
        if before is not None:
            self._handles.append(node.register_prehook(before))
        if after is not None:
            self._handles.append(node.register_hook(after))

    def remove_hooks(self) -> None:
        """Leave the graph without hooks of ours."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> None:
        """Settle the plans of ops whose backward ops have all been analysed.

        Under create_graph there will be more of them.
        """
        if self._create_graph:
            return
        traces = {id(origin.trace): origin.trace for origin in self._origins.values()}
        for trace in traces.values():
            if not trace.pending:
                self._driver.finish(trace)


class _Hooks:
    """The two hooks of one node."""

    def __init__(self, step: BackwardStep, origin: Origin, driver: Autograd) -> None:
        self._step = step
        self._driver = driver
        self._origin = origin
        self._start = 0

    def before(self, grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        with Suspension():
            grads = self._step.before(grad_outputs)
        self._start = _sequence()
        return _changed(grad_outputs, grads)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._map_second_order(grad_inputs)
        with Suspension():
            return _changed(grad_inputs, self._step.after(grad_inputs, grad_outputs))

    def _map_second_order(self, grad_inputs: tuple[Any, ...]) -> None:
        """Under create_graph the node made nodes of its own: they are backward ops of the same op."""
        end = _sequence()
        if end == self._start or not torch.is_grad_enabled():
            return
        origin = Origin(self._origin.trace.again(), self._start, self._start, end, self._origin.order + 1)
        self._driver.traces.add(origin.trace)
        with Unseen():
            for grad in grad_inputs:
                if isinstance(grad, torch.Tensor):
                    _mark(grad, origin)


def _changed(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...] | None:
    if len(old) == len(new) and all(one is other for one, other in zip(old, new, strict=True)):
        return None
    return tuple(new)


def _mark(tensor: torch.Tensor, origin: Origin) -> None:
    node = tensor.grad_fn
    if node is not None and origin.start <= node._sequence_nr() < origin.end:
        node.metadata.setdefault(KEY, origin)  # type: ignore[attr-defined]
        relieve(node)


def _graph_from(outputs: Sequence[Any]) -> tuple[dict[int, Any], list[tuple[Any, Any]]]:
    """Every node that a backward pass from `outputs` may reach, by `id`, and the edges between them."""
    roots = (output.node if hasattr(output, "node") else output.grad_fn for output in outputs)
    waiting = [node for node in roots if node is not None]
    nodes: dict[int, Any] = {}
    edges: list[tuple[Any, Any]] = []
    while waiting:
        node = waiting.pop()
        if id(node) in nodes:
            continue
        nodes[id(node)] = node
        relieve(node)
        children = [child for child, _ in node.next_functions if child is not None]
        edges += [(node, child) for child in children]
        waiting += children
    return nodes, edges


def _origins(nodes: dict[int, Any], edges: list[tuple[Any, Any]]) -> dict[int, Origin]:
    """Which execution each node comes from, by `id`.

    A node is told by its mark; one that an op made inside is told by the nodes that lead to it;
    a leaf belongs to the op that used it first, be it through what a routine made of it.
    """
    origins = {key: node.metadata[KEY] for key, node in nodes.items() if KEY in node.metadata}
    of_routines: dict[int, Origin] = {}
    spreading = True
    while spreading:
        spreading = False
        for parent, child in edges:
            origin = origins.get(id(parent)) or of_routines.get(id(parent))
            if origin is None:
                continue
            known = origins.get(id(child))
            if child.name() == ACCUMULATE:
                if known is None or origin.start < known.start:
                    origins[id(child)] = origin
            elif known is None and origin.start <= child._sequence_nr() < origin.end:
                origins[id(child)] = origin
                spreading = True
            elif id(child) not in of_routines and origin.begin <= child._sequence_nr() < origin.start:
                of_routines[id(child)] = origin
                spreading = True
    return origins
