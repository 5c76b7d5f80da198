"""The driver of the fake framework: its operators, modules, tape and backward passes, brought to Amanda."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.backend import (
    BackwardPass,
    Call,
    EagerDriver,
    OpFacts,
    SelfTestProgram,
    SignatureCall,
    TensorOps,
    Trace,
    code_within,
    complex_error,
    path_among,
    path_of_call,
    recomputable,
    shape_error,
)
from amanda.interceptor import Detour, Site, Suspension
from amanda.testing import fake
from amanda.testing.fake import Node, Tensor, _autograd, _operators


class FakeTensors(TensorOps):
    """Operations of the core on the fake framework's tensors, and on the tape that records gradients."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor."""
        return isinstance(value, Tensor)

    def without_autodiff(self) -> AbstractContextManager[Any]:
        """Return a context in which the tape records nothing."""
        context: AbstractContextManager[Any] = fake.no_grad()
        return context

    def version(self, value: Any) -> Any:
        """Return how often a tensor was written into; for a list, of each tensor."""
        return self.read_each(value, lambda tensor: tensor.version)

    def straight_through(self, original: Tensor, value: Tensor) -> Tensor:
        """Return a copy of `value` in the dtype of `original`, to which its gradient goes unchanged."""
        value_copy = _cast_copy(original, value)
        _autograd.record("StraightThrough", [original], [value_copy], lambda grads: grads)
        return value_copy

    def write(self, target: Tensor, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor; unless isolated, the tape leads from there to the value.

        Raises RoutineError for another shape, or a complex value for a real one or the reverse.
        """
        target.assign(_cast_copy(target, value))
        if not isolated and value.requires_grad:
            _autograd.record("CopyBackward", [value], [target], lambda grads: grads)

    def detach_value(self, value: Any) -> Any:
        """Return a tensor off the tape, also in a list; a leaf, and any other value, as it is."""
        if isinstance(value, Tensor):
            # A leaf has no graph behind it, and tools tell parameters by identity.
            return value if value.is_leaf else value.detach()
        return [self.detach_value(tensor) for tensor in value] if isinstance(value, (list, tuple)) else value

    def differentiable_copy(self, value: Any) -> Any:
        """Return a copy of a tensor whose gradient goes to the tensor; any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach()
        _autograd.record("CopyBackward", [value], [copy], lambda grads: grads)
        return copy

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors require a gradient; None if none does, or the tape records nothing."""
        needs = tuple(self.read_each(value, lambda tensor: tensor.requires_grad) for value in inputs)
        return needs if fake.is_grad_enabled() and "True" in str(needs) else None


def _cast_copy(original: Tensor, value: Tensor) -> Tensor:
    """Return a copy of a value in the dtype of an original, off the tape.

    Raises RoutineError for another shape, and for a complex value in the place of a real one or the reverse.
    """
    if value.shape != original.shape:
        raise shape_error(value.shape, original.shape)
    if (value.dtype == "complex128") != (original.dtype == "complex128"):
        raise complex_error(value.dtype, original.dtype)
    return value.astype(original.dtype)


_WRITTEN = {"add_": "input", "batch_norm": "running_mean"}
"""Names of the inputs that an operator writes into, beside `out`."""


class FakeCall(SignatureCall):
    """A call of an operator, some of which write into an input."""

    def __init__(self, driver: TensorOps, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(driver, site, args, kwargs)
        if site.key in _WRITTEN:
            self.written_positions = [self.names.index(_WRITTEN[site.key])]
            # The running mean of a batch normalization is written, and not returned.
            self.target_positions = [] if site.key == "batch_norm" else self.written_positions


_ORIGIN_KEY = "amanda"
"""Key in a node's metadata for its origin."""
# Beyond any number of a node within its op, so that leaves and other nodes have different places.
_LEAF_PLACE = 1 << 32


class NodeRange:
    """A context of an operator's call: the operator's nodes have numbers between `start` and `end`."""

    def __enter__(self) -> NodeRange:
        self.start = _autograd.next_number()
        return self

    def __exit__(self, *_: object) -> None:
        self.end = _autograd.next_number()


class _Origin(NamedTuple):
    """The execution that made a node: its trace, and the number from which its nodes count."""

    trace: Trace
    start: int


def mark_nodes(trace: Trace, node_range: NodeRange, results: list[Any]) -> None:
    """Store the trace of an operator's execution in the nodes that it made; inner operators' keep theirs.

    results: outputs, and inputs that the operator wrote.
    """
    result_nodes = [result.node for result in results if isinstance(result, Tensor) and result.node]
    for node in _reachable(result_nodes, lambda node: node_range.start < node.number < node_range.end):
        # `setdefault`, since an op within a composite has marked its node already.
        node.metadata.setdefault(_ORIGIN_KEY, _Origin(trace, node_range.start))


def _instrumented_run_backward(driver: EagerDriver, original: Callable[..., None]) -> Callable[..., None]:
    """Return `run_backward` with the routines of tools around each node while a scope is in force."""

    @functools.wraps(original)
    def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Run a backward pass, with hooks for its duration where a scope is in force."""
        activation = interceptor.active()
        if activation is None:
            return original(outputs, grads)
        edges = [edge for output in outputs if (edge := _autograd._edge(output))]
        nodes = list(_reachable([node for node, _ in edges]))
        with BackwardPass(driver, activation.state) as backward_pass:
            hook_removers = [
                _add_hooks(backward_pass, node, origin) for node, origin in _origin_by_node(nodes).items()
            ]
            try:
                original(outputs, grads)
            finally:
                # Also after an error: a graph that is kept must not call the hooks of this pass again.
                for remove_hooks in hook_removers:
                    remove_hooks()

    return run_backward


def _add_hooks(backward_pass: BackwardPass, node: Node, origin: _Origin) -> Callable[[], None]:
    """Add hooks to a node that run its routines, if there are any; return a function that removes them."""
    if isinstance(node, _autograd.AccumulateGrad):
        # By the leaf and not by a number, since one node serves every op that reads the leaf.
        place, is_leaf = _LEAF_PLACE + interceptor.ordinal(node.leaf), True
    else:
        place, is_leaf = node.number - origin.start, False
    step = backward_pass.step(origin.trace, type(node), place, replaceable=not is_leaf)
    if not step.has_work:
        return lambda: None

    def before(grad_outputs: Any) -> list[Any]:
        with Suspension():
            return step.run_before(grad_outputs)

    def after(grad_inputs: Any, grad_outputs: Any) -> list[Any]:
        with Suspension():
            return step.run_after(grad_inputs, grad_outputs)

    def remove() -> None:
        node.pre_hooks.remove(before)
        node.hooks.remove(after)

    node.pre_hooks.append(before)
    node.hooks.append(after)
    return remove


def _reachable(roots: list[Node], is_included: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Yield the included nodes among the roots and along edges from included nodes, each once."""
    visited: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in visited or not is_included(node):
            continue
        visited.add(node)
        yield node
        pending += _next_nodes(node)


def _next_nodes(node: Node) -> list[Node]:
    """Return the nodes to which the gradients of a node's inputs go."""
    return [edge[0] for edge in node.edges if edge]


def _origin_by_node(nodes: list[Node]) -> dict[Node, _Origin]:
    """Return the execution that made each marked node, and for a leaf the first execution that used it."""
    origin_by_node: dict[Node, _Origin] = {}
    # In the order in which nodes were made, so that `setdefault` leaves a leaf to its first operator.
    for node in sorted(nodes, key=lambda node: node.number):
        origin = node.metadata.get(_ORIGIN_KEY)
        if origin is None:  # made outside of scopes, or a leaf
            continue
        origin_by_node[node] = origin
        for next_node in _next_nodes(node):
            if isinstance(next_node, _autograd.AccumulateGrad):
                origin_by_node.setdefault(next_node, origin)
    return origin_by_node


class FakeDriver(FakeTensors, EagerDriver):
    """The driver of the fake framework, whose operators are Python functions that run eagerly."""

    api = 2
    framework = "amanda.testing.fake"
    modes = ("eager",)
    newest_tested = "1.0"
    call_type = FakeCall
    identity_types = (fake.Parameter,)

    def __init__(self) -> None:
        self._sites = [self.site(operator, operator, operator.__name__) for operator in fake.OPERATORS]

    def register_framework(self) -> None:
        """Mark the code that is not the user's: what a checkpoint calls belongs to where it ran first."""
        super().register_framework()
        checkpoint = _operators.checkpoint
        self.skip_code(checkpoint.__code__, code_within(checkpoint, "backward"))

    def attach(self) -> None:
        """Replace operators by detours, instrument backward passes and checkpoints, track module calls."""
        run_backward, checkpoint = _autograd.run_backward, _operators.checkpoint
        replacements: dict[Any, Any] = {site.target: Detour(site) for site in self._sites}
        replacements[run_backward] = _instrumented_run_backward(self, run_backward)
        replacements[checkpoint] = _instrumented_checkpoint(checkpoint)
        self.patches.replace(replacements, [fake, _operators, _autograd])
        self.patches.track_module_calls(fake.Module)

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of one op, relu, and its backward op."""
        return SelfTestProgram(_run_self_test, "relu", "relu")

    def uninstrumented_reason(self, site: Site) -> tuple[str, str] | None:
        """Return subject and reason of a report for a call without instrumentation; None for other calls."""
        # Reported and not passed over: a user must know what tools did not see.
        return ("opaque", "it has no operators inside") if site.op.__name__ == "opaque" else None

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op, with the calling module and the parameters that the op reads.

        subjects: the modules that are being called, the outermost first.
        """
        facts = super().describe(call, subjects)
        facts.scope = path_of_call(subjects, lambda outer, inner: path_among(outer.named_modules(), inner))
        facts.variable_of, facts.path_of = _parameter_of, _parameter_paths(subjects)
        return facts

    def capture_backward_ops(self) -> NodeRange:
        """Return a context of an operator's call that knows the nodes made in it."""
        return NodeRange()

    def attach_trace(self, trace: Trace, nodes: NodeRange, values: list[Any]) -> None:
        """Mark the nodes that the operator made for its results, `values`."""
        mark_nodes(trace, nodes, values)


def _run_self_test() -> list[float]:
    """Compute relu and its gradient; return their numbers."""
    x = fake.tensor([0.5, -0.25], requires_grad=True)
    with fake.enable_grad():
        y = fake.relu(x)
    y.backward()
    assert x.grad is not None
    return [*y.numbers, *x.grad.numbers]


def _instrumented_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `checkpoint` such that the second run of a function, in the backward pass, has the same ids."""

    @functools.wraps(original)
    def checkpoint(function: Callable[[Tensor], Tensor], input: Tensor) -> Any:
        return original(recomputable(function), input)

    return checkpoint


def _parameter_of(value: Any) -> fake.Parameter | None:
    """Return the parameter that an input is; None for another value."""
    return value if isinstance(value, fake.Parameter) else None


def _parameter_paths(subjects: Sequence[Any]) -> Callable[[Any], str | None]:
    """Return a function from a parameter to its path in the outermost module; None if it is not in there."""
    modules = subjects[0].named_modules() if subjects else ()
    path_by_parameter = {
        value: f"{path}.{name}".lstrip(".")
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, fake.Parameter)
    }
    # Weak: the function lives with the facts of the op, which must not keep the model alive.
    return WeakKeyDictionary(path_by_parameter).get
