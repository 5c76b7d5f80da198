"""The description of a framework by its driver's author, for the conformance suite: sample, gaps."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import pytest

from amanda.backend import Driver
from amanda.scope.attachment import attachment

Op = Callable[..., Any]


class Sample(ABC):
    """A framework's tensors, a handful of its ops, and a tiny model.

    Ops are properties that look the framework's callable up at each use, so that the suite's own
    lines are the call sites. Tensors support `tensor * number` and `tensor + number`, and can be
    referenced weakly. Importing the file that the class is in must have no other effect.

    driver: the driver under test.
    names: `__name__` of the ops for which it differs from the name here.
    weight_index: position of the weight among the inputs of `linear`.
    dtypes: two floating types, the wider first (tensors are made in it), an integer and a complex one.
    relu_backward, leaf_backward: `__name__` of relu's backward op and of what stores a leaf's gradient.
    outlive: names of the framework's attributes that the driver replaces for longer than a scope: as long
    as something that was instrumented lives.
    """

    driver: ClassVar[type[Driver]]
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    weight_index: ClassVar[int] = 1
    dtypes: ClassVar[tuple[Any, Any, Any, Any]]
    relu_backward: ClassVar[str]
    leaf_backward: ClassVar[str]
    outlive: ClassVar[Collection[str]] = ()

    # Tests use one name for each op; a framework's own may differ.
    def name(self, op: str) -> str:
        """`__name__` of an op."""
        return self.names.get(op, op)

    @abstractmethod
    def tensor(self, values: Sequence[Any], dtype: Any = None, requires_grad: bool = False) -> Any:
        """A tensor of nested lists of numbers, or of one number, without axes; a leaf."""

    @abstractmethod
    def parameter(self, values: Sequence[Any]) -> Any:
        """A trained weight, of the kind that tells ops apart."""

    @abstractmethod
    def bits(self, tensor: Any) -> bytes:
        """Return what a tensor holds, bit by bit."""

    @abstractmethod
    def numbers(self, tensor: Any) -> list[Any]:
        """Return what a tensor holds, as a flat list of Python numbers."""

    @abstractmethod
    def shape(self, tensor: Any) -> tuple[int, ...]:
        """A tensor's shape."""

    @abstractmethod
    def cast(self, tensor: Any, dtype: Any) -> Any:
        """A tensor in another of `dtypes`."""

    @abstractmethod
    def overwrite(self, tensor: Any) -> None:
        """Write into a tensor's memory."""

    def dtype(self, tensor: Any) -> Any:
        """A tensor's dtype."""
        return tensor.dtype

    def device(self, tensor: Any) -> str:
        """A tensor's device, in the framework's words."""
        return str(getattr(tensor, "device", ""))

    def gradient(self, tensor: Any) -> Any:
        """The gradient that a leaf has got; None where there is none."""
        return tensor.grad

    @abstractmethod
    def backward(self, tensor: Any) -> None:
        """Run the backward pass of the sum of a tensor's elements."""

    @abstractmethod
    def model(self) -> Any:
        """second(relu(first(x))) for modules `first` and `second`, each one `linear` without bias.

        first.weight and second.weight are square, 3 by 3, the same in every model that is made.
        """

    @abstractmethod
    def module(self, forward: Op) -> Any:
        """A module whose call is `forward`."""

    def input(self) -> Any:
        """An example input of the model: (2, 3)."""
        return self.tensor([[0.5, -1.25, 2.0], [1.5, 0.75, -0.375]])

    @property
    @abstractmethod
    def linear(self) -> Op:
        """linear(x, weight)."""

    @property
    @abstractmethod
    def relu(self) -> Op:
        """relu(x)."""

    @property
    @abstractmethod
    def add(self) -> Op:
        """add(x, y, out=tensor), whose inputs are named `input`, `other`, `out`."""

    @property
    @abstractmethod
    def add_(self) -> Op:
        """add_(x, y), in place."""

    @property
    @abstractmethod
    def cat(self) -> Op:
        """cat([x, y])."""

    @property
    @abstractmethod
    def pair(self) -> Op:
        """pair(x): a namedtuple of two differentiable tensors."""

    @property
    @abstractmethod
    def item(self) -> Op:
        """item(x): the Python number of a tensor of one element."""

    @property
    @abstractmethod
    def many(self) -> Op:
        """many(x, y), for x and y of one square shape: an op with several backward ops."""

    @abstractmethod
    def checkpoint(self, function: Op, tensor: Any) -> Any:
        """function(tensor), computed again in the backward pass."""

    def vmap(self, function: Op) -> Op:
        """Return `function` of a tensor, mapped over the first axis of a tensor."""
        raise NotImplementedError(_TRANSFORM.format("vmap"))

    def grad(self, function: Op) -> Op:
        """Return the gradient of a function of a tensor without axes that gives such a tensor."""
        raise NotImplementedError(_TRANSFORM.format("grad"))

    def jvp(self, function: Op) -> Op:
        """Return the function of a tensor and its tangent that gives the tangent of `function` there."""
        raise NotImplementedError(_TRANSFORM.format("jvp"))

    @abstractmethod
    def beyond(self) -> None:
        """Run an op that the driver cannot instrument, and reports."""


@contextmanager
def attached(driver: type[Driver]) -> Iterator[None]:
    """Attach the driver in scopes that open in this context, as if a distribution registered it."""
    # Nested, as where a fixture and a test both attach it.
    if driver in attachment.guests:
        yield
        return
    attachment.guests.append(driver)
    try:
        yield
    finally:
        attachment.guests.remove(driver)


T = TypeVar("T", bound=Callable[..., Any])

_TRANSFORM = 'a Sample has the method {0}, or the suite says why not: lacks = {{"{0}": "reason"}}'

CAPABILITIES: Mapping[str, str] = {
    "backward": "the framework computes gradients",
    "batched_values": "under `vmap` a routine is called once, for a value that gives no numbers",
    "call_sites": "an op is a call in the program, which loops and lines tell apart, not a node of a graph",
    "fork": "a forked child can use the framework",
    "grad": "functions are transformed to their gradients",
    "in_place": "ops write into tensors that they are given",
    "jvp": "functions are transformed to their forward-mode derivatives",
    "leaves": "a backward pass stores gradients on the tensors that need them",
    "mutable_tensors": "a routine can write into a tensor",
    "numbers": "an op gives a number of Python",
    "out": "ops take a tensor to write their result into",
    "schema": "an op is given its arguments in the order and under the names of its schema",
    "traceable_calls": "a traceable routine is called at each execution, not once to be traced",
    "values": "analysis routines see the values of an execution, not symbols",
    "vmap": "functions of a sample are transformed to functions of a batch",
}
"""Abilities of a framework, or of a mode of it, by the names that `needs` and `lacks` give them."""


def needs(*capabilities: str) -> Callable[[T], T]:
    """Mark a test of a suite that only drivers with these capabilities are given."""

    def mark(test: T) -> T:
        test.__dict__["needs"] = frozenset(capabilities)
        return test

    return mark


class Gaps:
    """A suite whose subclasses say what their driver lacks, and what they do not pass.

    lacks: capabilities that the driver does not have, with the reason; tests that need one are not collected.
    gaps: marks of other tests that do not pass, by name: `notimpl`, `notyet` or `never`.
    """

    lacks: ClassVar[dict[str, str]] = {}
    gaps: ClassVar[dict[str, pytest.MarkDecorator]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A misspelt capability would take no test away, and these tests would fail without a hint.
        unknown = cls.lacks.keys() - CAPABILITIES.keys()
        if unknown:
            capabilities = ", ".join(CAPABILITIES)
            raise TypeError(
                f"{cls.__name__}.lacks names {', '.join(sorted(unknown))}; there are {capabilities}"
            )
        for name in dir(cls):
            if getattr(getattr(cls, name), "needs", frozenset()) & cls.lacks.keys():
                # None hides a test of a base class from pytest; a skip would count as one.
                setattr(cls, name, None)
        for name, mark in vars(cls).get("gaps", {}).items():
            test = getattr(cls, name, None)
            if not isinstance(test, types.FunctionType):
                raise TypeError(f"{cls.__name__}.gaps names {name}, which is no test that it has")
            setattr(cls, name, mark(_copied(test)))


def _copied(test: types.FunctionType) -> types.FunctionType:
    """Return a copy of a test, which may be marked without its original."""
    # A copy, since the mark must not reach other drivers' subclasses of the same suite.
    copy = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__dict__.update({**vars(test), "pytestmark": list(getattr(test, "pytestmark", []))})
    return copy


def notimpl(reason: str) -> pytest.MarkDecorator:
    """A gap that this driver could close."""
    return pytest.mark.xfail(strict=True, reason=f"not implemented: {reason}")


def notyet(reason: str) -> pytest.MarkDecorator:
    """A gap that waits for the framework, or for the core."""
    return pytest.mark.xfail(strict=True, reason=f"not yet: {reason}")


def never(reason: str) -> pytest.MarkDecorator:
    """A gap that the framework's nature leaves open."""
    return pytest.mark.xfail(strict=True, reason=f"never: {reason}")
