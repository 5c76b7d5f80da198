"""The backward pass: marks lead from autograd nodes to the ops that created them, and hooks run routines."""

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import mindspore._c_expression as native
from amanda import interceptor
from amanda.backend import BackwardPass, BackwardStep, EagerDriver, Operation, Patches, State, Trace
from amanda.interceptor import Suspension
from mindspore import Parameter, Tensor
from mindspore.graph import api

from ._tensors import MindSporeTensorOps, StraightThroughFunction, tensors_of

# Places of leaves begin beyond those of nodes, of which an execution has fewer.
_LEAF_PLACE = 1 << 32


class NodeMark:
    """The execution that created an autograd node; the node holds its mark as a hook without effect.

    place: number of the node among those of the execution.  sequence_number: the node's, which is unique.
    leaves: leaves that the execution read, by their nodes' ids; some have no other owner.
    """

    __slots__ = ("__weakref__", "leaves", "place", "sequence_number", "trace")

    def __init__(self, trace: Trace, place: int, sequence_number: int, leaves: dict[int, Any]) -> None:
        self.trace = trace
        self.place = place
        self.sequence_number = sequence_number
        self.leaves = leaves

    def __call__(self, grad_outputs: Any) -> None:
        return None


class InputNodes:
    """The autograd nodes of an op's inputs, from which on the op's own nodes are new.

    node_ids: ids of the nodes.  leaves: the leaves among the inputs, by the ids of their nodes.
    """

    __slots__ = ("leaves", "node_ids")

    def __init__(self) -> None:
        self.node_ids: set[int] = set()
        self.leaves: dict[int, Any] = {}

    def __enter__(self) -> "InputNodes":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MindSporeAutograd(MindSporeTensorOps, EagerDriver):
    """The part of the driver that maps backward ops to forward ops, and adds hooks for their routines."""

    def __init__(self) -> None:
        # By the ids of nodes, and weak: marks and leaves die with their graph.
        self._mark_by_node_id: weakref.WeakValueDictionary[int, NodeMark] = weakref.WeakValueDictionary()
        self._leaf_by_node_id: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._results_by_function: dict[int, list[weakref.ref[Any]]] = {}

    def capture_backward_ops(self) -> InputNodes:
        """Return a context of an op's execution."""
        return InputNodes()

    def note_op_inputs(self, input_nodes: InputNodes, inputs: Sequence[Any]) -> None:
        """Record the autograd nodes of an op's inputs, and the leaves among the inputs.

        Parameters are recorded for later backward passes, too.
        """
        for tensor in tensors_of(inputs):
            node = node_of(tensor)
            if node is not None:
                node_id = node._unique_id()
                input_nodes.node_ids.add(node_id)
                if tensor._is_leaf:
                    input_nodes.leaves[node_id] = tensor
                    if isinstance(tensor, Parameter):
                        self._leaf_by_node_id[node_id] = tensor

    def attach_trace(self, trace: Trace, input_nodes: InputNodes, values: list[Any]) -> None:
        """Mark each node between the op's results, `values`, and its inputs with the trace.

        Nodes of ops within this one keep their marks.
        """
        result_nodes = [tensor._grad_node for tensor in tensors_of(values)]
        new_nodes = _reachable(
            result_nodes,
            lambda node: node._unique_id() not in input_nodes.node_ids and self.mark_of(node) is None,
        )
        inner_nodes = [node for node in new_nodes if not node.is_leaf()]
        for place, node in enumerate(sorted(inner_nodes, key=lambda inner: inner._sequence_nr())):
            mark = NodeMark(trace, place, node._sequence_nr(), input_nodes.leaves)
            # The dictionary is weak: the node owns its mark, as a hook without effect.
            node.register_prehook(mark)
            self._mark_by_node_id[node._unique_id()] = mark

    def mark_of(self, node: Any) -> NodeMark | None:
        """Return the mark of a node; None if it has none."""
        # The id of a node is its address, which an earlier node may have had; sequence numbers differ.
        mark = self._mark_by_node_id.get(node._unique_id())
        return mark if mark is not None and mark.sequence_number == node._sequence_nr() else None

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` instead of `original`; a leaf is recorded, since the value's node hides it."""
        if original._is_leaf and (node := node_of(original)) is not None:
            self._leaf_by_node_id[node._unique_id()] = original
        return super().straight_through(original, value)

    def patch_backward(self, patches: Patches) -> None:
        """Patch the functions that run backward passes, until `patches` are restored."""
        patches.set(api._PyNativeExecutor, "end_graph", self._stand_in_for_end_graph())
        patches.set(api._PyNativeExecutor, "grad", self._stand_in_for_grad())
        patches.set(native, "run_backward", self._stand_in_for_run_backward())

    def _stand_in_for_end_graph(self) -> Callable[..., Any]:
        """Stand-in for `end_graph`, the end of a function that is differentiated: records its results."""
        original = api._PyNativeExecutor.end_graph

        @wraps(original)
        def end_graph(executor: Any, obj: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            """Record the results weakly where a scope is in force, then call the original."""
            if interceptor.active() is not None and self._mark_by_node_id:
                values = output if isinstance(output, (list, tuple)) else [output]
                # `grad` gets the same function as `obj`, but not the results.
                self._results_by_function[id(obj)] = [weakref.ref(tensor) for tensor in tensors_of(values)]
            return original(executor, obj, output, *args, **kwargs)

        return end_graph

    def _stand_in_for_grad(self) -> Callable[..., Any]:
        """Stand-in for `grad`: runs a backward pass from the results of the forward function."""
        original = api._PyNativeExecutor.grad

        @wraps(original)
        def grad(executor: Any, obj: Any, *args: Any) -> Any:
            results = [reference() for reference in self._results_by_function.pop(id(obj), ())]
            living_results = [tensor for tensor in results if tensor is not None]
            return self._run_hooked_pass(lambda: original(executor, obj, *args), living_results)

        return grad

    def _stand_in_for_run_backward(self) -> Callable[..., Any]:
        """Stand-in for `run_backward`, as of `Tensor.backward`: runs a backward pass from tensors."""
        original = native.run_backward

        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run_hooked_pass(lambda: original(tensors, *args, **kwargs), tensors)

        return run_backward

    def _run_hooked_pass(self, run: Callable[[], Any], results: Iterable[Any]) -> Any:
        """Run a backward pass from results, with hooks where tools have routines; raise what these raised.

        Returns the gradients.  The program's places are numbered anew, also outside of a scope.
        """
        activation = interceptor.active()
        if activation is None or not self._mark_by_node_id:
            interceptor.reset_root()  # as after a hooked pass: places are numbered anew
            return run()
        with _HookedPass(self, activation.state) as backward_pass:
            with Suspension():
                backward_pass.add_hooks([tensor._grad_node for tensor in results])
            gradients = run()
        backward_pass.raise_failure()
        return gradients


class _HookedPass(BackwardPass):
    """A backward pass, whose hooks run the routines at backward ops and are removed at its end.

    _failures: what a routine at a leaf has raised, at most one exception.
    """

    def __init__(self, driver: MindSporeAutograd, state: State) -> None:
        super().__init__(driver, state)
        self._autograd = driver
        self._removers: list[Callable[[], object]] = []
        self._failures: list[BaseException] = []

    def __exit__(self, *exception: object) -> None:
        self.remove_hooks()
        super().__exit__(*exception)

    def add_hooks(self, roots: Iterable[Any]) -> None:
        """Add hooks at the nodes and leaves below the roots where a tool has an analysis or routines."""
        marked_nodes = []
        for node in _reachable(roots, lambda node: True):
            mark = self._autograd.mark_of(node)
            if mark is not None:
                marked_nodes.append((mark, node))
        first_mark_by_leaf: dict[int, NodeMark] = {}
        # In the order of the forward pass, so that a leaf belongs to the op that used it first.
        for mark, node in sorted(marked_nodes, key=lambda pair: pair[0].sequence_number):
            for leaf_node_id in _leaf_node_ids(node):
                first_mark_by_leaf.setdefault(leaf_node_id, mark)
            step = self.step(mark.trace, backward_operation(node.name()), mark.place)
            if step.has_work:
                hooks = _NodeHooks(step, self._failures)
                self._removers += [
                    node.register_prehook(hooks.before).remove,
                    node.register_hook(hooks.after).remove,
                ]
        self._add_leaf_hooks(first_mark_by_leaf)

    def _add_leaf_hooks(self, first_mark_by_leaf: dict[int, NodeMark]) -> None:
        """Add hooks at leaves, as backward ops of the op that used a leaf first.

        first_mark_by_leaf: the marks of these ops, by the ids of the leaves' nodes.
        """
        leaf_counts: dict[int, int] = {}  # of leaves that are not parameters, by the trace of their op
        for node_id, mark in first_mark_by_leaf.items():
            trace, leaf = mark.trace, self._autograd._leaf_by_node_id.get(node_id, mark.leaves.get(node_id))
            if leaf is None:  # it has died
                continue
            # Beyond the places of nodes parameters have theirs, by an ordinal that is the same in each pass.
            # Other leaves come after these, by their number among those that the op used first.
            if isinstance(leaf, Parameter):
                place = _LEAF_PLACE + interceptor.ordinal(leaf)
            else:
                leaf_count = leaf_counts.get(id(trace), 0)
                leaf_counts[id(trace)] = leaf_count + 1
                place = 2 * _LEAF_PLACE + leaf_count
            step = self.step(trace, ACCUMULATE_GRAD, place, replaceable=False)
            if step.has_work:
                self._removers.append(_register_leaf_hook(leaf, _NodeHooks(step, self._failures).at_leaf))

    def remove_hooks(self) -> None:
        """Remove all hooks; after an interrupt, another call removes the rest."""
        while self._removers:
            # Dropped after the removal: an interrupt in between removes a hook twice, which is harmless.
            self._removers[-1]()
            self._removers.pop()

    def raise_failure(self) -> None:
        """Raise the exception of a routine at a leaf, once the pass has ended."""
        if self._failures:
            raise self._failures.pop()


class _NodeHooks:
    """The hooks of one node, which run the routines of a step; MindSpore takes None for unchanged gradients.

    failures: receives what a routine at a leaf raises, after which the pass calls no other routine. MindSpore
    raises an exception of a leaf's hook again in every later pass, so none may leave that hook.
    """

    __slots__ = ("_failures", "_step")

    def __init__(self, step: BackwardStep, failures: list[BaseException]) -> None:
        self._step = step
        self._failures = failures

    def before(self, grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Call the routines before a backward op; return changed gradients, or None."""
        if self._failures:
            return None
        with Suspension():
            return _changed_or_none(grad_outputs, self._step.run_before(grad_outputs))

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Call the routines after a backward op; return changed gradients, or None."""
        if self._failures:
            return None
        with Suspension():
            return _changed_or_none(grad_inputs, self._step.run_after(grad_inputs, grad_outputs))

    def at_leaf(self, grad: Any) -> Any:
        """Call the routines at a leaf; return its gradient; keep their exception for the end of the pass."""
        if self._failures:
            return grad
        try:
            with Suspension():
                (new_grad,) = self._step.run_before([grad])
                # AccumulateGrad computes no gradients, so the points after it have none.
                self._step.run_after([], [new_grad])
        except BaseException as error:
            self._failures.append(error)
            return grad
        return new_grad


def node_of(tensor: Any) -> Any:
    """Return the node that a tensor's gradient goes to; None if there is none."""
    # A view of a parameter that is created outside of a gradient claims to need a gradient, and has no node.
    # For a view created with autodiff off, and written with it on, MindSpore raises.
    try:
        return tensor._grad_node if tensor._requires_grad else None
    except RuntimeError:
        return None


def _register_leaf_hook(tensor: Any, hook: Callable[[Any], Any]) -> Callable[[], None]:
    hook_id = native.TensorPy.register_hook(tensor, hook)
    return lambda: native.TensorPy.remove_hook(hook_id)


def _reachable(roots: Iterable[Any], is_included: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the included nodes that the roots lead to over included nodes, breadth first, each once."""
    visited: set[int] = set()
    pending = deque(roots)
    while pending:
        node = pending.popleft()
        if node is None or node._unique_id() in visited:
            continue
        visited.add(node._unique_id())
        if not is_included(node):
            continue
        yield node
        pending += _next_nodes(node)


def _next_nodes(node: Any) -> list[Any]:
    """Return the nodes that get a node's gradients, as of a leaf; None for each input that needs none."""
    return [next_node for next_node, *_ in node.next_functions]


def _leaf_node_ids(node: Any) -> Iterator[int]:
    """Yield the node ids of the leaves that get a node's gradients, also through a routine's value."""
    for next_node in _next_nodes(node):
        # A routine's value stands between an op and the leaf that it replaces, which is its first input.
        while next_node is not None and next_node.name() == StraightThroughFunction.__name__:
            next_node = _next_nodes(next_node)[0]
        if next_node is not None and next_node.is_leaf():
            yield next_node._unique_id()


def _changed_or_none(old_grads: tuple[Any, ...], new_grads: list[Any]) -> tuple[Any, ...] | None:
    """Return the new gradients, None for what is no tensor; None if all are the same objects as before."""
    if len(old_grads) == len(new_grads) and all(map(operator.is_, old_grads, new_grads)):
        return None
    # Some ops give 0 as the gradient of an argument that is not a tensor, which MindSpore takes from no hook.
    return tuple([grad if isinstance(grad, Tensor) else None for grad in new_grads])


ACCUMULATE_GRAD = Operation("AccumulateGrad")
"""The backward op that receives the gradient of a leaf."""


def backward_operation(node: str) -> Operation:
    """Return the backward op of a node, such as "ReLUBackward" for a node named "ReLU"."""
    return Operation(node if node.endswith("Grad") else f"{node}Backward")
