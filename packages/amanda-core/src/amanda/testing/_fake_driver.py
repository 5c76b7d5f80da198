"""The driver of the fake framework: its operators, modules and backward passes, brought to Amanda."""

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
    """The fake framework's tensors, and its tape."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor."""
        return isinstance(value, Tensor)

    def without_autodiff(self) -> AbstractContextManager[Any]:
        """Context in which the tape takes nothing."""
        context: AbstractContextManager[Any] = fake.no_grad()
        return context

    def version(self, value: Any) -> Any:
        """Return how often a tensor was written into; of each, for a list."""
        return self.read_each(value, lambda tensor: tensor.version)

    def straight_through(self, original: Tensor, value: Tensor) -> Tensor:
        """`value` with an edge of the tape to `original`."""
        fitted = _cast_copy(original, value)
        # The gradient of the value goes unchanged to the original.
        _autograd.record("StraightThrough", [original], [fitted], lambda grads: grads)
        return fitted

    def write(self, target: Tensor, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor."""
        fitted = _cast_copy(target, value)
        target.assign(fitted)
        if not isolated and value.requires_grad:
            _autograd.record("CopyBackward", [value], [target], lambda grads: grads)

    def detach_value(self, value: Any) -> Any:
        """A tensor off the tape, or a leaf as it is."""
        if isinstance(value, Tensor):
            # A leaf has no graph behind it, and tools tell parameters by identity.
            return value if value.is_leaf else value.detach()
        return [self.detach_value(tensor) for tensor in value] if isinstance(value, (list, tuple)) else value

    def differentiable_copy(self, value: Any) -> Any:
        """A copy that the tape knows."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach()
        _autograd.record("CopyBackward", [value], [copy], lambda grads: grads)
        return copy

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors require a gradient."""
        needs = tuple(self.read_each(value, lambda tensor: tensor.requires_grad) for value in inputs)
        return needs if fake.is_grad_enabled() and "True" in str(needs) else None


def _cast_copy(original: Tensor, value: Tensor) -> Tensor:
    """A copy of a value in the type of an original."""
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


_KEY = "amanda"
# Beyond any number of a node within its op, so that leaves and other nodes have different places.
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
    """Leave a trace with the nodes that an operator made, except nodes that have one already."""
    roots = [value.node for value in values if isinstance(value, Tensor) and value.node]
    for node in _reachable(roots, lambda node: node_range.start < node.number < node_range.end):
        # `setdefault`, since an op within a composite has marked its node already.
        node.metadata.setdefault(_KEY, _Origin(trace, node_range.start))


def followed(driver: EagerDriver, original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs backward passes with the routines of tools around each node."""

    @functools.wraps(original)
    def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Run a backward pass, with hooks for its duration where a scope is in force."""
        activation = interceptor.active()
        if activation is None:
            return original(outputs, grads)
        nodes = list(_reachable([edge[0] for output in outputs if (edge := _autograd._edge(output))]))
        with BackwardPass(driver, activation.state) as backward_pass:
            removals = [_hook(backward_pass, node, origin) for node, origin in _origins(nodes).items()]
            try:
                original(outputs, grads)
            finally:
                # Also after an error: a graph that is kept must not call the hooks of this pass again.
                for remove in removals:
                    remove()

    return run_backward


def _hook(backward_pass: BackwardPass, node: Node, origin: _Origin) -> Callable[[], None]:
    """Put the routines of the open tools around a node; return a function that takes them away."""
    is_leaf = isinstance(node, _autograd.AccumulateGrad)
    place = node.number - origin.start
    if isinstance(node, _autograd.AccumulateGrad):
        # By the leaf and not by a number, since one node serves every op that reads the leaf.
        place = _LEAF_PLACE + interceptor.ordinal(node.leaf)
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


def _reachable(nodes: list[Node], admits: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Yield these nodes and those that edges lead to, each once, as far as a condition admits."""
    visited: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in visited or not admits(node):
            continue
        visited.add(node)
        yield node
        waiting += [edge[0] for edge in node.edges if edge]


def _origins(nodes: list[Node]) -> dict[Node, _Origin]:
    """Return where nodes come from; a leaf belongs to the operator that used it first."""
    origins: dict[Node, _Origin] = {}
    # In the order of making, so that a leaf goes to the operator that used it first.
    for node in sorted(nodes, key=lambda node: node.number):
        origin = node.metadata.get(_KEY)
        if origin is None:
            continue
        origins[node] = origin
        for edge in node.edges:
            if edge and isinstance(edge[0], _autograd.AccumulateGrad):
                origins.setdefault(edge[0], origin)
    return origins


class FakeDriver(FakeTensors, EagerDriver):
    """The fake framework, eager."""

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
        """Replace every operator, enclose module calls, follow backward passes and checkpoints."""
        run_backward, checkpoint = _autograd.run_backward, _operators.checkpoint
        stand_ins = {site.target: Detour(site) for site in self._sites}
        functions = {run_backward: followed(self, run_backward), checkpoint: _replaying(checkpoint)}
        self.patches.replace({**stand_ins, **functions}, [fake, _operators, _autograd])
        self.patches.track_module_calls(fake.Module)

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of one op and its backward op."""
        return SelfTestProgram(_run_relu, "relu", "relu")

    def uninstrumented_reason(self, site: Site) -> tuple[str, str] | None:
        """Return what keeps a call from being instrumented, and why."""
        # Said in the report and not passed over: a user must know what tools did not see.
        return ("opaque", "it has no operators inside") if site.op.__name__ == "opaque" else None

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op, with the calling module and the parameters that the op reads."""
        facts = super().describe(call, subjects)
        facts.scope = path_of_call(subjects, lambda outer, inner: path_among(outer.named_modules(), inner))
        facts.variable_of, facts.path_of = _parameter_of, _parameter_paths(subjects)
        return facts

    def capture_backward_ops(self) -> NodeRange:
        """Context that brackets the nodes made by an operator."""
        return NodeRange()

    def attach_trace(self, trace: Trace, nodes: NodeRange, values: list[Any]) -> None:
        """Mark the nodes that the operator made."""
        mark(trace, nodes, values)


def _run_relu() -> list[float]:
    """Return relu of two numbers, and its gradient."""
    x = fake.tensor([0.5, -0.25], requires_grad=True)
    with fake.enable_grad():
        y = fake.relu(x)
    y.backward()
    assert x.grad is not None
    return [*y.numbers, *x.grad.numbers]


def _replaying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `checkpoint` for functions whose second run is their first run again."""

    @functools.wraps(original)
    def checkpoint(function: Callable[[Tensor], Tensor], input: Tensor) -> Any:
        return original(recomputable(function), input)

    return checkpoint


def _parameter_of(value: Any) -> fake.Parameter | None:
    """Return the parameter that an input is; None for another value."""
    return value if isinstance(value, fake.Parameter) else None


def _parameter_paths(subjects: Sequence[Any]) -> Callable[[Any], str | None]:
    """Return a function from a parameter to its path in the outermost module; None where it is not in."""
    modules = subjects[0].named_modules() if subjects else ()
    paths = {
        value: f"{path}.{name}".lstrip(".")
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, fake.Parameter)
    }
    # Weak: the function lives with the facts of the op, which must not keep the model alive.
    return WeakKeyDictionary(paths).get
