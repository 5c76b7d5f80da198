"""The backward pass: which nodes an op made, and hooks where a tool wants them."""

import functools
import operator
import sys
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.autograd.graph
from amanda import interceptor
from amanda.backend import (
    Attributes,
    BackwardStep,
    EagerDriver,
    State,
    Trace,
)
from amanda.interceptor import Graphs, Mark, Suspension, uninterrupted
from amanda.scope import in_force
from torch.autograd.graph import GradientEdge

from ._graphs import relieve
from ._hooks import Hooks, place_hooks_quickly, remove_all
from ._leaves import tell
from ._overrides import Unseen, reading
from ._requirements import found
from ._saved import end_traceback_in_torch

AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
LEAF_PLACE = 1 << 32
_ORDER_STEP = 1 << 40

_sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_graphs = Graphs(
    tensors=torch.Tensor, leaf=AccumulateGrad, maker="grad_fn", base="_base", next="next_functions",
    notes="metadata", number="_sequence_nr", key="amanda", met=relieve,
)  # fmt: skip


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

    @property
    @abstractmethod
    def seen(self) -> "Autograd":
        """This driver for calls under no dispatch mode."""

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
        if made.start != made.end:
            _graphs.mark(values, Mark(trace, made.begin, made.start, made.end))

    def leaving(self, trace: Trace, writes: bool) -> Any:
        """Marks the nodes of executions; a view's base has a new node where the view was written."""
        return _graphs.leaving(trace, writes)

    def follow_backward(self, attributes: Attributes) -> None:
        """Make every backward pass bring its nodes to the tools."""
        for module in (torch.autograd.graph, torch.autograd):
            attributes.set(module, _RUN, self._followed(getattr(module, _RUN)))
        place_hooks_quickly(attributes)

    def _followed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if (around := of_pass()) is not None:
                with in_force(around):
                    return run_backward(outputs, *args, **kwargs)
            activation = interceptor.active()
            create_graph = bool(kwargs.get("create_graph", args[2] if len(args) > 2 else False))
            keeps_graph = bool(kwargs.get("retain_graph", args[1] if len(args) > 1 else False))
            if activation is not None:
                tell(activation.state, outputs, bool(kwargs.get("accumulate_grad")))
            if activation is not None and create_graph:
                _expect_second_order(activation.state)
            if activation is None or not Mark.alive():
                interceptor.reset_root()
                return original(outputs, *args, **kwargs)
            remove_abandoned_hooks()
            backward = _Backward(self.seen, activation.state, create_graph, keeps_graph)
            try:
                uninterrupted(lambda: backward.add_hooks(outputs))
                result = original(outputs, *args, **kwargs)
            except RuntimeError as error:
                end_traceback_in_torch(error)
                raise
            finally:
                uninterrupted(backward.remove_hooks)
                interceptor.reset_root()
            backward.finish(keeps_graph)
            return result

        return run_backward


_RUN = "_engine_run_backward"
_is_kept, _kept = found("_C._is_key_in_tls"), found("_C._get_obj_in_tls")


def of_pass() -> interceptor.Activation | None:
    """Return what is in force where the backward pass of a thread began that the engine has started.

    None on other threads, and of a torch that does not bring the caller's context to these.
    """
    if interceptor.ACTIVATION.get(None) is not None or _is_kept is None or not _is_kept("context"):
        return None
    activation: interceptor.Activation | None = _kept("context").get(interceptor.ACTIVATION)
    return activation


def _expect_second_order(state: State) -> None:
    stack = state.stack
    if stack is None or not any(one.wants_backward for one in stack.chain):
        return
    if stack.enable_double_backward():
        state.report(
            "the first differentiation of gradients",
            "it came after passes without one; backward ops of backward ops are seen from the next on",
        )


class _Backward:
    """One backward pass: its nodes, mapped and hooked.

    Hooks at a node act in every pass through it. What one pass has hooked another that is under way at the
    same time, around it or on another thread, leaves as it is, and keeps if it is the one that ends last.
    """

    under_way: ClassVar[list["_Backward"]] = []
    _changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, driver: Autograd, state: State, create_graph: bool, keeps_graph: bool) -> None:
        self._driver = driver
        self._state = state
        self._create_graph = create_graph
        self._is_last = not (create_graph or keeps_graph)
        self._expected: Counter[int] = Counter()  # backward ops that are to be analysed, by the trace's id
        self._handles: list[tuple[Any, Any]] = []
        self._shared: set[int] = set()
        self._steps: list[Trace] = []
        self._found: list[tuple[Any, Mark, int]] = []
        self.thread = threading.get_ident()

    def add_hooks(self, outputs: Sequence[Any]) -> None:
        """Hook the nodes that a tool wants of the graph from `outputs`."""
        with Unseen():
            roots = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
            found = _graphs.marked(roots)
        with self._changing:
            self._found = found
            if self.under_way:
                self._shared = {id(node) for node, *_ in found}.intersection(
                    id(node) for other in self.under_way for node, *_ in other._found
                )
            self.under_way.append(self)
        settling = self._state.settles and not self._create_graph
        stack, shared, keep = self._state.stack, self._shared, self._handles.append
        others: dict[int, int] = {}  # leaves that are no parameters, by the op that used them first
        for node, mark, number in found:
            kind, trace = type(node), mark.trace
            leaf = kind is AccumulateGrad
            if not leaf:
                place = number - mark.start
            elif isinstance(node.variable, torch.nn.Parameter):
                place = LEAF_PLACE + interceptor.ordinal(node.variable)
            else:
                others[id(mark)] = others.get(id(mark), -1) + 1
                place = 2 * LEAF_PLACE + others[id(mark)]
            if shared and id(node) in shared:
                continue
            if mark.order:
                place += mark.order * _ORDER_STEP
            plan = trace.plan
            if settling and plan.stack is stack:
                settled = plan.backward.steps.get((kind, place)) or BackwardStep.settled(
                    self._driver, trace, kind, place
                )
                if settled is not None:
                    before, after, at = settled
                    if at is not None:
                        before, after, _ = at(mark.shapes or trace.shapes)
                    if before is not None:
                        keep((node, node.register_prehook(before)))
                    if after is not None:
                        keep((node, node.register_hook(after)))
                    continue
            self._steps.append(trace)
            order = mark.order + 1
            step = BackwardStep(self._driver, trace, kind, place, self._state, not leaf, order, mark.shapes)
            if step.wanted or self._create_graph:
                self._expected[id(trace)] += 1
                hooks = _Hooks(step, mark, self._driver, self._is_done)
                keep((node, node.register_prehook(hooks.before)))
                keep((node, node.register_hook(hooks.after)))

    def remove_hooks(self) -> None:
        """Leave the graph without hooks of ours but those that another pass needs.

        What an exception leaves undone is done when it is called again.
        """
        with self._changing:
            others = [one for one in self.under_way if one is not self]
            if not others:  # to remove a hook once more does nothing
                remove_all(self._handles)
            while self._handles:
                node, handle = self._handles[-1]
                heir = next((one for one in others if id(node) in one._shared), None)
                if heir is None:
                    remove_all([(node, handle)])
                else:
                    heir._handles.append((node, handle))
                self._handles.pop()
            self.under_way[:] = others

    def _is_done(self, trace: Trace) -> None:
        """Drop the inputs and outputs of an op as soon as the last of its backward ops has run."""
        self._expected[id(trace)] -= 1
        if self._is_last and not self._expected[id(trace)] and trace.facts is not None:
            trace.facts.drop_values()

    def finish(self, keeps_graph: bool) -> None:
        """Settle the plans of ops whose backward ops have all been analysed.

        keeps_graph: whether another pass may come through it.

        Under create_graph there will be more of them, and once there were, wherever none was met.
        """
        if self._create_graph:
            return
        deep = {id(mark.trace.plan) for _, mark, _ in self._found if mark.order}
        for trace in {id(trace): trace for trace in self._steps}.values():
            if not trace.pending and (not trace.stack.double_backward or id(trace.plan) in deep):
                self._driver.finish(trace, keeps_graph)


def remove_abandoned_hooks() -> None:
    """Remove the hooks of passes on this thread that an interrupt ended before they could remove these."""
    thread = threading.get_ident()
    begun = [one for one in _Backward.under_way if one.thread == thread]
    if not begun:
        return
    running = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run_backward":
            running.add(id(frame.f_locals.get("backward")))
        frame = frame.f_back
    for one in begun:
        if id(one) not in running:
            uninterrupted(one.remove_hooks)


class _Hooks(Hooks):
    """The two hooks of one node."""

    def __init__(
        self, step: BackwardStep, mark: Mark, driver: Autograd, done: Callable[[Trace], None]
    ) -> None:
        self._step = step
        self._driver = driver
        self._mark = mark
        self._done = done
        self._start = 0

    def before(self, grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        with Suspension(), reading():
            grads = self._step.before(grad_outputs)
        self._start = _sequence()
        return _changed(grad_outputs, grads)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._map_second_order(grad_inputs)
        with Suspension(), reading():
            grads = self._step.after(grad_inputs, grad_outputs)
        self._done(self._mark.trace)
        return _changed(grad_inputs, grads)

    def _map_second_order(self, grad_inputs: tuple[Any, ...]) -> None:
        """Under create_graph the node made nodes of its own: they are backward ops of the same op."""
        end = _sequence()
        if end == self._start or not torch.is_grad_enabled():
            return
        trace = self._mark.trace.again(self._mark.shapes)
        mark = Mark(trace, self._start, self._start, end, self._mark.order + 1)
        with Unseen():
            _graphs.mark(grad_inputs, mark, False)


def _changed(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...] | None:
    return None if len(old) == len(new) and all(map(operator.is_, old, new)) else tuple(new)
