"""The backward pass: which nodes an op made, and hooks where a tool wants them."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import mindspore._c_expression as native
from amanda import interceptor
from amanda.backend import Attributes, BackwardStep, EagerDriver, State, Trace
from amanda.interceptor import Suspension
from mindspore import Parameter
from mindspore.graph import api

from ._operation import ACCUMULATE_GRAD, backward_operation
from ._tensors import MindSporeTensors, StraightThrough, tensors_of

_LEAF_PLACE = 1 << 32


class Mark:
    """One node of the graph of gradients, and the execution that made it.

    place: tells the nodes of one execution apart.  leaves: by their nodes, those that the execution read,
    some of which nothing else holds.  A node holds its mark as a hook, which does nothing.
    """

    __slots__ = ("__weakref__", "leaves", "number", "place", "trace")

    def __init__(self, trace: Trace, place: int, number: int, leaves: dict[int, Any]) -> None:
        self.trace = trace
        self.place = place
        self.number = number
        self.leaves = leaves

    def __call__(self, grad_outputs: Any) -> None:
        return None


class Made:
    """Context of an op's execution: the nodes that are made in it lead to those of its inputs."""

    __slots__ = ("known", "leaves")

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.leaves: dict[int, Any] = {}

    def __enter__(self) -> "Made":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Autograd(MindSporeTensors, EagerDriver):
    """The part of the driver that maps backward ops to forward ops and instruments them."""

    def __init__(self) -> None:
        self._marks: weakref.WeakValueDictionary[int, Mark] = weakref.WeakValueDictionary()
        self._leaves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._results: dict[int, list[weakref.ref[Any]]] = {}

    def tracing(self) -> Made:
        """Context whose nodes are marked."""
        return Made()

    def begin(self, made: Made, inputs: Sequence[Any]) -> None:
        """Know the nodes that the op's inputs come from, and the leaves among them."""
        for tensor in tensors_of(inputs):
            node = node_of(tensor)
            if node is not None:
                number = node._unique_id()
                made.known.add(number)
                if tensor._is_leaf:
                    made.leaves[number] = tensor
                    if isinstance(tensor, Parameter):
                        self._leaves[number] = tensor

    def attach_trace(self, trace: Trace, made: Made, values: list[Any]) -> None:
        """Leave the trace at each node between the op's results and its inputs."""
        roots = [tensor._grad_node for tensor in tensors_of(values)]
        new = _reached(roots, lambda node: node._unique_id() not in made.known and self.mark_of(node) is None)
        found = [node for node in new if not node.is_leaf()]
        for place, node in enumerate(sorted(found, key=lambda one: one._sequence_nr())):
            mark = Mark(trace, place, node._sequence_nr(), made.leaves)
            node.register_prehook(mark)
            self._marks[node._unique_id()] = mark

    def mark_of(self, node: Any) -> Mark | None:
        """The mark of a node; numbers tell it from one that was at its address before."""
        mark = self._marks.get(node._unique_id())
        return mark if mark is not None and mark.number == node._sequence_nr() else None

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` for `original`; the leaf that the original is stays known."""
        if original._is_leaf and (node := node_of(original)) is not None:
            self._leaves[node._unique_id()] = original
        return super().straight_through(original, value)

    def follow_backward(self, attributes: Attributes) -> None:
        """Make every backward pass bring its nodes to the tools."""
        attributes.set(api._PyNativeExecutor, "end_graph", self._followed_end())
        attributes.set(api._PyNativeExecutor, "grad", self._followed_grad())
        attributes.set(native, "run_backward", self._followed_run())

    def _followed_end(self) -> Callable[..., Any]:
        original = api._PyNativeExecutor.end_graph

        @wraps(original)
        def end_graph(executor: Any, obj: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            if interceptor.active() is not None and self._marks:
                values = output if isinstance(output, (list, tuple)) else [output]
                self._results[id(obj)] = [weakref.ref(one) for one in tensors_of(values)]
            return original(executor, obj, output, *args, **kwargs)

        return end_graph

    def _followed_grad(self) -> Callable[..., Any]:
        original = api._PyNativeExecutor.grad

        @wraps(original)
        def grad(executor: Any, obj: Any, *args: Any) -> Any:
            results = [one() for one in self._results.pop(id(obj), ())]
            return self._run(
                lambda: original(executor, obj, *args), [one for one in results if one is not None]
            )

        return grad

    def _followed_run(self) -> Callable[..., Any]:
        original = native.run_backward

        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(lambda: original(tensors, *args, **kwargs), tensors)

        return run_backward

    def _run(self, run: Callable[[], Any], results: Iterable[Any]) -> Any:
        activation = interceptor.active()
        if activation is None or not self._marks:
            interceptor.reset_root()
            return run()
        under_way = _Backward(self, activation.state)
        try:
            with Suspension():
                under_way.add_hooks([tensor._grad_node for tensor in results])
            gradients = run()
        finally:
            under_way.remove_hooks()
            interceptor.reset_root()
            under_way.finish()
        under_way.raise_failure()
        return gradients


class _Backward:
    """One backward pass: its nodes, mapped and hooked."""

    def __init__(self, driver: Autograd, state: State) -> None:
        self._driver = driver
        self._state = state
        self._remove: list[Callable[[], object]] = []
        self._traces: dict[int, Trace] = {}
        self._failures: list[BaseException] = []

    def add_hooks(self, roots: Iterable[Any]) -> None:
        """Hook the nodes that a tool wants of the graph from the roots."""
        marked = []
        for node in _reached(roots, lambda node: True):
            mark = self._driver.mark_of(node)
            if mark is not None:
                marked.append((mark, node))
        leaves: dict[int, Mark] = {}
        for mark, node in sorted(marked, key=lambda pair: pair[0].number):
            for leaf in _leaves_of(node):
                leaves.setdefault(leaf, mark)
            step = self._step(mark.trace, backward_operation(node.name()), mark.place, True)
            if step.wanted:
                hooks = _Hooks(step, self._failures)
                self._remove += [
                    node.register_prehook(hooks.before).remove,
                    node.register_hook(hooks.after).remove,
                ]
        self._hook_leaves(leaves)

    def _hook_leaves(self, leaves: dict[int, Mark]) -> None:
        others: dict[int, int] = {}  # leaves that are no parameters, by the op that used them first
        for number, mark in leaves.items():
            trace, leaf = mark.trace, self._driver._leaves.get(number, mark.leaves.get(number))
            if leaf is None:
                continue
            if isinstance(leaf, Parameter):
                place = _LEAF_PLACE + interceptor.ordinal(leaf)
            else:
                others[id(trace)] = others.get(id(trace), -1) + 1
                place = 2 * _LEAF_PLACE + others[id(trace)]
            step = self._step(trace, ACCUMULATE_GRAD, place, False)
            if step.wanted:
                self._remove.append(_hooked(leaf, _Hooks(step, self._failures).of_leaf))

    def _step(self, trace: Trace, op: Any, place: int, replaceable: bool) -> BackwardStep:
        self._traces[id(trace)] = trace
        return BackwardStep(self._driver, trace, op, place, self._state, replaceable)

    def remove_hooks(self) -> None:
        """Leave the graph without hooks of ours; after an interrupt the rest goes when it is called again."""
        while self._remove:
            self._remove[-1]()
            self._remove.pop()

    def raise_failure(self) -> None:
        """Raise what a routine at a leaf has raised in the pass that has ended."""
        if self._failures:
            raise self._failures.pop()

    def finish(self) -> None:
        """Settle the plans of ops whose backward ops have all been analysed."""
        for trace in self._traces.values():
            if not trace.pending:
                self._driver.finish(trace)


class _Hooks:
    """The hooks of one node.

    failures: receives what a routine at a leaf raises, after which the pass calls no other routine. MindSpore
    raises an exception of a leaf's hook again in every later pass, so none may leave that hook.
    """

    __slots__ = ("_failures", "_step")

    def __init__(self, step: BackwardStep, failures: list[BaseException]) -> None:
        self._step = step
        self._failures = failures

    def before(self, grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._failures:
            return None
        with Suspension():
            return _changed(grad_outputs, self._step.before(grad_outputs))

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._failures:
            return None
        with Suspension():
            return _changed(grad_inputs, self._step.after(grad_inputs, grad_outputs))

    def of_leaf(self, grad: Any) -> Any:
        if self._failures:
            return grad
        try:
            with Suspension():
                (changed,) = self._step.before([grad])
                self._step.after([], [changed])
        except BaseException as error:
            self._failures.append(error)
            return grad
        return changed


def node_of(tensor: Any) -> Any:
    """Return the node that a tensor's gradient goes to; None where there is none.

    A view of a parameter that is made outside of a gradient says that it needs one, and has no node.
    MindSpore does not tell of a view that was made where autodiff was off, and is written where it is on.
    """
    try:
        return tensor._grad_node if tensor._requires_grad else None
    except RuntimeError:
        return None


def _hooked(tensor: Any, hook: Callable[[Any], Any]) -> Callable[[], None]:
    number = native.TensorPy.register_hook(tensor, hook)
    return lambda: native.TensorPy.remove_hook(number)


def _reached(roots: Iterable[Any], wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes that are wanted on the way from the roots; what is not wanted leads no further."""
    seen: set[int] = set()
    waiting = deque(roots)
    while waiting:
        node = waiting.popleft()
        key = 0 if node is None else node._unique_id()
        if node is None or key in seen:
            continue
        seen.add(key)
        if not wanted(node):
            continue
        yield node
        waiting += [edge[0] for edge in node.next_functions]


def _leaves_of(node: Any) -> Iterator[int]:
    """Numbers of the leaves that a node's gradients go to, also past a routine's value."""
    for edge in node.next_functions:
        target = edge[0]
        while target is not None and target.name() == StraightThrough.__name__:
            target = target.next_functions[0][0]
        if target is not None and target.is_leaf():
            yield target._unique_id()


def _changed(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...] | None:
    if len(old) == len(new) and all(one is other for one, other in zip(old, new, strict=True)):
        return None
    return tuple(new)
