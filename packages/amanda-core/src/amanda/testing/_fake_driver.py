"""The driver of the fake framework, written as a third party would write one."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from amanda import interceptor
from amanda.backend import (
    BOUNDARY,
    DRIVER_API,
    FRAMEWORK,
    SKIPPED,
    Attributes,
    BackwardStep,
    Call,
    EagerDriver,
    Namespace,
    State,
    Trace,
    codes,
    digest,
    in_force,
    replace_references,
)
from amanda.errors import RoutineError
from amanda.interceptor import Detour, Enclosure, Site, Suspension
from amanda.testing import fake
from amanda.testing.fake import Node, Tensor, _autograd, _modules, _operators

_KEY = "amanda"
_LEAF_PLACE = 1 << 32


class FakeDriver(EagerDriver):
    """The fake framework, eager."""

    api = DRIVER_API
    framework = "amanda.testing.fake"
    modes = ("eager",)
    identity_types = (fake.Parameter,)

    def __init__(self) -> None:
        self._attributes = Attributes()
        self._sites = [
            Site(function, function, function.__name__, digest("fake", function.__name__), self.handle)
            for function in fake.OPERATORS
        ]

    @property
    def namespace(self) -> Namespace:
        """`fake/1.0/eager`."""
        return Namespace(f"fake/{fake.__version__}/eager")

    # ---- attaching ----

    def attach(self) -> None:
        """Replace every operator, enclose module calls, follow backward passes and checkpoints."""
        codes.add_root(f"{Path(fake.__file__).parent}/", FRAMEWORK)
        codes.add_root(__file__, SKIPPED)
        interceptor.add_identity_type(fake.Parameter)
        codes.add_code(fake.Module.__call__.__code__, BOUNDARY)
        codes.add_code(_code_of(_modules.checkpoint, "backward"), SKIPPED)
        codes.add_code(_modules.checkpoint.__code__, SKIPPED)
        stand_ins = [(site.target, Detour(site)) for site in self._sites]
        replace_references(self._attributes, stand_ins, [fake, _operators])
        self._attributes.set(fake.Module, "__call__", Enclosure(vars(fake.Module)["__call__"]))
        run_backward = self._followed(_autograd.run_backward)
        checkpoint = _replayed_checkpoint(_modules.checkpoint)
        for module in (fake, _autograd, _modules):
            for stand_in in (run_backward, checkpoint):
                if hasattr(module, stand_in.__name__):
                    self._attributes.set(module, stand_in.__name__, stand_in)

    def detach(self) -> None:
        """Put every attribute back."""
        self._attributes.restore()

    # ---- calls ----

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in the order of the operator's signature."""
        return FakeCall(site, args, kwargs)

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """What keeps a call from being instrumented, and why."""
        return ("opaque", "it has no operators inside") if site.op.__name__ == "opaque" else None

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Path of the last module within the first."""
        paths = (
            path
            for outer, inner in pairwise(subjects)
            for path, module in outer.named_modules()
            if module is inner
        )
        return ".".join(path for path in paths if path)

    # ---- tensors ----

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor."""
        return isinstance(value, Tensor)

    def isolated(self) -> AbstractContextManager[Any]:
        """Context in which the tape takes nothing."""
        context: AbstractContextManager[Any] = fake.no_grad()
        return context

    def version(self, value: Any) -> Any:
        """How often a tensor was written into; of each, for a list."""
        return _each(value, lambda tensor: tensor.version)

    def straight_through(self, original: Tensor, value: Tensor) -> Tensor:
        """`value` with an edge of the tape to `original`."""
        fitted = _fitting(original, value)
        _autograd.record("StraightThrough", [original], [fitted], lambda grads: grads)
        return fitted

    def write(self, target: Tensor, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor."""
        fitted = _fitting(target, value)
        target.assign(fitted)
        if not isolated and value.requires_grad:
            _autograd.record("CopyBackward", [value], [target], lambda grads: grads)

    def kept(self, value: Any) -> Any:
        """A tensor off the tape, or a leaf as it is."""
        if isinstance(value, Tensor):
            return value if value.is_leaf else value.detach()
        return [self.kept(one) for one in value] if isinstance(value, (list, tuple)) else value

    def copied(self, value: Any) -> Any:
        """A copy that the tape knows."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach()
        _autograd.record("CopyBackward", [value], [copy], lambda grads: grads)
        return copy

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Which tensors require a gradient."""
        needs = tuple(_each(value, lambda tensor: tensor.requires_grad) for value in inputs)
        return needs if fake.is_grad_enabled() and "True" in str(needs) else None

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each tensor."""
        return tuple(_each(value, lambda tensor: (tensor.dtype, len(tensor.shape))) for value in inputs)

    def shapes(self, inputs: Sequence[Any]) -> Hashable:
        """Shape of each tensor."""
        return tuple(_each(value, lambda tensor: tensor.shape) for value in inputs)

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An operator's result as a list, and how to put it back into its form."""
        if isinstance(outputs, fake.Halves):
            return list(outputs), lambda values: fake.Halves(*values)
        return [outputs], lambda values: values[0]

    # ---- the backward pass ----

    def tracing(self) -> _Made:
        """Context that brackets the nodes made by an operator."""
        return _Made()

    def attach_trace(self, trace: Trace, made: _Made, values: list[Any]) -> None:
        """Mark the nodes that the operator made."""
        waiting = [value.node for value in values if isinstance(value, Tensor) and value.node]
        for node in _reached(waiting, lambda node: made.start < node.number < made.end):
            node.metadata.setdefault(_KEY, _Origin(trace, made.start))

    def _followed(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            activation = interceptor.active()
            if activation is None:
                return original(outputs, grads)
            nodes = list(_reached([edge[0] for one in outputs if (edge := _autograd._edge(one))]))
            origins = _origins(nodes)
            hooked = [self._hook(node, origin, activation.state) for node, origin in origins.items()]
            try:
                original(outputs, grads)
            finally:
                for remove in hooked:
                    remove()
                interceptor.reset_root()
            for trace in {id(origin.trace): origin.trace for origin in origins.values()}.values():
                if not trace.pending:
                    self.finish(trace)

        return run_backward

    def _hook(self, node: Node, origin: _Origin, state: State) -> Callable[[], None]:
        leaf = isinstance(node, _autograd.AccumulateGrad)
        place = node.number - origin.start
        if isinstance(node, _autograd.AccumulateGrad):
            place = _LEAF_PLACE + interceptor.ordinal(node.leaf)
        step = BackwardStep(self, origin.trace, type(node), place, state, replaceable=not leaf)
        if not step.wanted:
            return lambda: None

        def before(grad_outputs: Any) -> list[Any]:
            with Suspension():
                return step.before(grad_outputs)

        def after(grad_inputs: Any, grad_outputs: Any) -> list[Any]:
            with Suspension():
                return step.after(grad_inputs, grad_outputs)

        def remove() -> None:
            node.pre_hooks.remove(before)
            node.hooks.remove(after)

        node.pre_hooks.append(before)
        node.hooks.append(after)
        return remove


class FakeCall(Call):
    """A call bound to the operator's signature; trailing defaults are left out."""

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._site = site
        self._given = args, kwargs
        self._signature = inspect.signature(site.original)
        bound = self._signature.bind(*args, **kwargs)
        self.op = site.op
        self.inputs = list(bound.arguments.values())
        self.names = list(bound.arguments)
        self.mutable = (
            [0] if site.key == "add_" else [i for i, name in enumerate(self.names) if name == "out"]
        )
        self.targets = self.mutable

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the operator."""
        if inputs is self.inputs:
            return self._site.invoke(*self._given)
        arguments = OrderedDict(zip(self.names, inputs, strict=True))
        bound = inspect.BoundArguments(self._signature, arguments)
        return self._site.invoke(bound.args, bound.kwargs)

    def attributes(self) -> dict[str, Any]:
        """The arguments that are no tensors."""
        named = zip(self.names, self.inputs, strict=True)
        return {name: value for name, value in named if not isinstance(value, (Tensor, list, tuple))}


class _Made:
    """Context that knows which nodes were made within it."""

    def __enter__(self) -> _Made:
        self.start = _autograd.next_number()
        return self

    def __exit__(self, *_: object) -> None:
        self.end = _autograd.next_number()


class _Origin(NamedTuple):
    """Which execution a node comes from."""

    trace: Trace
    start: int


def _reached(nodes: list[Node], wanted: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen or not wanted(node):
            continue
        seen.add(node)
        yield node
        waiting += [edge[0] for edge in node.edges if edge]


def _origins(nodes: list[Node]) -> dict[Node, _Origin]:
    """Where nodes come from; a leaf belongs to the operator that used it first."""
    origins: dict[Node, _Origin] = {}
    for node in sorted(nodes, key=lambda node: node.number):
        origin = node.metadata.get(_KEY)
        if origin is None:
            continue
        origins[node] = origin
        for edge in node.edges:
            if edge and isinstance(edge[0], _autograd.AccumulateGrad):
                origins.setdefault(edge[0], origin)
    return origins


def _replayed_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, whose function runs again at the place where it ran first."""

    @functools.wraps(original)
    def checkpoint(function: Callable[[Tensor], Tensor], input: Tensor) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(function, input)
        snapshot = interceptor.snapshot()

        def replayed(value: Tensor) -> Tensor:
            with in_force(activation):
                result: Tensor = snapshot.replay(function, value)
                return result

        return original(replayed, input)

    return checkpoint


def _code_of(function: Any, name: str) -> CodeType:
    return next(
        one for one in function.__code__.co_consts if isinstance(one, CodeType) and one.co_name == name
    )


def _each(value: Any, read: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return read(value)
    if isinstance(value, (list, tuple)):
        return tuple(read(one) for one in value if isinstance(one, Tensor)) or None
    return None


def _fitting(original: Tensor, value: Tensor) -> Tensor:
    """A copy of a value in the type of an original."""
    if value.shape != original.shape:
        raise RoutineError(
            f"a routine returned shape {value.shape} where shape {original.shape} was given; mark it "
            "@amanda.differentiable if it is meant to change shapes"
        )
    if (value.dtype == "complex128") != (original.dtype == "complex128"):
        raise RoutineError(f"a routine returned {value.dtype} where {original.dtype} was given")
    return value.astype(original.dtype)
