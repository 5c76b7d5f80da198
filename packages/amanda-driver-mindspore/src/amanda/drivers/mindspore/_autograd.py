"""The backward pass: the autograd nodes of each op, and hooks at nodes where a tool has routines."""

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

    place: number of the node among those of the execution.  number: the node's sequence number.
    leaves: leaves that the execution read, by their nodes' ids; some have no other owner.
    """

    __slots__ = ("__weakref__", "leaves", "number", "place", "trace")

    def __init__(self, trace: Trace, place: int, number: int, leaves: dict[int, Any]) -> None:
        self.trace = trace
        self.place = place
        self.number = number
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
        # Weak: marks and leaves die with their graph.
        self._marks: weakref.WeakValueDictionary[int, NodeMark] = weakref.WeakValueDictionary()
        self._leaves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._results_by_function: dict[int, list[weakref.ref[Any]]] = {}

    def capture_backward_ops(self) -> InputNodes:
        """Return a context of an op's execution."""
        return InputNodes()

    def note_op_inputs(self, input_nodes: InputNodes, inputs: Sequence[Any]) -> None:
        """Record the autograd nodes of an op's inputs, and the leaves among the inputs."""
        for tensor in tensors_of(inputs):
            node = node_of(tensor)
            if node is not None:
                node_id = node._unique_id()
                input_nodes.node_ids.add(node_id)
                if tensor._is_leaf:
                    input_nodes.leaves[node_id] = tensor
                    if isinstance(tensor, Parameter):
                        self._leaves[node_id] = tensor

    def attach_trace(self, trace: Trace, input_nodes: InputNodes, values: list[Any]) -> None:
        """Mark each node between the op's results and its inputs with the trace, but for inner ops' nodes."""
        roots = [tensor._grad_node for tensor in tensors_of(values)]
        # Nodes that carry a mark belong to an op within this one, which has marked them already.
        new_nodes = _reachable(
            roots, lambda node: node._unique_id() not in input_nodes.node_ids and self.mark_of(node) is None
        )
        inner_nodes = [node for node in new_nodes if not node.is_leaf()]
        for place, node in enumerate(sorted(inner_nodes, key=lambda inner: inner._sequence_nr())):
            mark = NodeMark(trace, place, node._sequence_nr(), input_nodes.leaves)
            # A weak dictionary alone would lose the mark, and an entry on the node is the only strong owner
            # that dies with it.
            node.register_prehook(mark)
            self._marks[node._unique_id()] = mark

    def mark_of(self, node: Any) -> NodeMark | None:
        """Return the mark of a node; None if it has none."""
        # The id of a node is its address, which an earlier node may have had; sequence numbers differ.
        mark = self._marks.get(node._unique_id())
        return mark if mark is not None and mark.number == node._sequence_nr() else None

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` instead of `original`; a leaf is recorded, since the value's node hides it."""
        if original._is_leaf and (node := node_of(original)) is not None:
            self._leaves[node._unique_id()] = original
        return super().straight_through(original, value)

    def patch_backward(self, patches: Patches) -> None:
        """Patch the functions that run backward passes, until `patches` are restored."""
        patches.set(api._PyNativeExecutor, "end_graph", self._stand_in_for_end_graph())
        patches.set(api._PyNativeExecutor, "grad", self._stand_in_for_grad())
        patches.set(native, "run_backward", self._stand_in_for_run_backward())

    def _stand_in_for_end_graph(self) -> Callable[..., Any]:
        """Stand-in for `end_graph`: remembers the results from which `grad` starts."""
        original = api._PyNativeExecutor.end_graph

        @wraps(original)
        def end_graph(executor: Any, obj: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            """Record the results weakly where a scope is in force, then call the original."""
            if interceptor.active() is not None and self._marks:
                values = output if isinstance(output, (list, tuple)) else [output]
                # `grad` gets the same object, but not the results.
                self._results_by_function[id(obj)] = [weakref.ref(tensor) for tensor in tensors_of(values)]
            return original(executor, obj, output, *args, **kwargs)

        return end_graph

    def _stand_in_for_grad(self) -> Callable[..., Any]:
        """Stand-in for `grad`: runs a backward pass from the results of the forward function."""
        original = api._PyNativeExecutor.grad

        @wraps(original)
        def grad(executor: Any, obj: Any, *args: Any) -> Any:
            results = [reference() for reference in self._results_by_function.pop(id(obj), ())]
            living = [tensor for tensor in results if tensor is not None]
            return self._run_pass(lambda: original(executor, obj, *args), living)

        return grad

    def _stand_in_for_run_backward(self) -> Callable[..., Any]:
        """Stand-in for `run_backward`: runs a backward pass from tensors."""
        original = native.run_backward

        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run_pass(lambda: original(tensors, *args, **kwargs), tensors)

        return run_backward

    def _run_pass(self, run: Callable[[], Any], results: Iterable[Any]) -> Any:
        """Run a backward pass from results, with hooks at the nodes where tools have routines."""
        activation = interceptor.active()
        if activation is None or not self._marks:
            interceptor.reset_root()
            return run()
        with _HookedPass(self, activation.state) as backward_pass:
            with Suspension():
                backward_pass.add_hooks([tensor._grad_node for tensor in results])
            gradients = run()
        backward_pass.raise_failure()
        return gradients


class _HookedPass(BackwardPass):
    """A backward pass, with its hooks."""

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
        marked = []
        for node in _reachable(roots, lambda node: True):
            mark = self._autograd.mark_of(node)
            if mark is not None:
                marked.append((mark, node))
        leaves: dict[int, NodeMark] = {}
        # In the order of the forward pass, so that a leaf belongs to the op that used it first.
        for mark, node in sorted(marked, key=lambda pair: pair[0].number):
            for leaf in _leaves_of(node):
                leaves.setdefault(leaf, mark)
            step = self.step(mark.trace, backward_operation(node.name()), mark.place)
            if step.has_work:
                hooks = _NodeHooks(step, self._failures)
                self._removers += [
                    node.register_prehook(hooks.before).remove,
                    node.register_hook(hooks.after).remove,
                ]
        self._hook_leaves(leaves)

    def _hook_leaves(self, leaves: dict[int, NodeMark]) -> None:
        """Add hooks at leaves, as backward ops of the op that used a leaf first.

        leaves: the marks of these ops, by the ids of the leaves' nodes.
        """
        counts: dict[int, int] = {}  # of leaves that are not parameters, by the trace of their op
        for node_id, mark in leaves.items():
            trace, leaf = mark.trace, self._autograd._leaves.get(node_id, mark.leaves.get(node_id))
            if leaf is None:
                continue
            if isinstance(leaf, Parameter):
                # Leaves have places beyond those of nodes: parameters by their ordinal, which is the same in
                # each pass.
                place = _LEAF_PLACE + interceptor.ordinal(leaf)
            else:
                # Other leaves by their number among those that the op used first, beyond the parameters.
                count = counts.get(id(trace), 0)
                counts[id(trace)] = count + 1
                place = 2 * _LEAF_PLACE + count
            step = self.step(trace, ACCUMULATE_GRAD, place, False)
            if step.has_work:
                self._removers.append(_register_leaf_hook(leaf, _NodeHooks(step, self._failures).of_leaf))

    def remove_hooks(self) -> None:
        """Remove all hooks; after an interrupt, another call removes the rest."""
        while self._removers:
            # An entry is dropped after its hook is removed: an interrupt in between removes it twice, which
            # is harmless.
            self._removers[-1]()
            self._removers.pop()

    def raise_failure(self) -> None:
        """Raise the exception of a routine at a leaf, once the pass has ended."""
        if self._failures:
            raise self._failures.pop()


class _NodeHooks:
    """The hooks of one node.

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

    def of_leaf(self, grad: Any) -> Any:
        """Call the routines at a leaf; keep their exception for the end of the pass."""
        if self._failures:
            return grad
        try:
            with Suspension():
                (changed,) = self._step.run_before([grad])
                # AccumulateGrad computes no gradients, so the points after it have none.
                self._step.run_after([], [changed])
        except BaseException as error:
            self._failures.append(error)
            return grad
        return changed


def node_of(tensor: Any) -> Any:
    """Return the node that a tensor's gradient goes to; None if there is none."""
    # A view of a parameter that is created outside of a gradient claims to need a gradient, and has no node.
    # For a view created with autodiff off, and written with it on, MindSpore raises.
    try:
        return tensor._grad_node if tensor._requires_grad else None
    except RuntimeError:
        return None


def _register_leaf_hook(tensor: Any, hook: Callable[[Any], Any]) -> Callable[[], None]:
    number = native.TensorPy.register_hook(tensor, hook)
    return lambda: native.TensorPy.remove_hook(number)


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
        pending += [edge[0] for edge in node.next_functions]


def _leaves_of(node: Any) -> Iterator[int]:
    """Yield the node ids of the leaves that get a node's gradients, also through a routine's value."""
    for edge in node.next_functions:
        target = edge[0]
        # A routine's value stands between an op and the leaf that it replaces.
        while target is not None and target.name() == StraightThroughFunction.__name__:
            target = target.next_functions[0][0]
        if target is not None and target.is_leaf():
            yield target._unique_id()


def _changed_or_none(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...] | None:
    """Return the new gradients; None where they are the very same objects as the old ones."""
    if len(old) == len(new) and all(before is after for before, after in zip(old, new, strict=True)):
        return None
    # Some ops give 0 as the gradient of an argument that is not a tensor, which MindSpore takes from no hook.
    return tuple([gradient if isinstance(gradient, Tensor) else None for gradient in new])


ACCUMULATE_GRAD = Operation("AccumulateGrad")
"""The backward op that receives the gradient of a leaf."""


def backward_operation(node: str) -> Operation:
    """Return the backward op of a node, such as "ReLUBackward" for a node named "ReLU"."""
    return Operation(node if node.endswith("Grad") else f"{node}Backward")
