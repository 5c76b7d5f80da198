"""Primitives of a framework's tensors, which a driver implements."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from amanda.errors import RoutineError

if TYPE_CHECKING:
    from amanda.plan.action import Action, Routine
    from amanda.plan.facts import OpFacts

T = TypeVar("T")


class TensorOps(ABC):
    """Primitives of a framework's tensors, which a driver implements.

    has_symbols: whether calls may be traced into a program, where tensors stand for values to come.
    """

    has_symbols: ClassVar[bool] = False

    def run_later(
        self, action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], autodiff: bool,
        shapes: Hashable,
    ) -> list[Any] | None:  # fmt: skip
        """Put a routine into the program that is traced; return the values with those that it will give.

        None where the routine is called now.  It is asked of a driver that `has_symbols`.
        """
        return None

    def note_replacement(self, action: Action, facts: OpFacts) -> None:  # noqa: B027 - most have nothing to do
        """Note that a replacement runs now, perhaps in a program that is traced.

        It is told to a driver that `has_symbols`.
        """

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor of the framework."""

    @abstractmethod
    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype, rank and device of every tensor among the inputs."""

    def device_of(self, value: Any) -> str:
        """Name the device of a value, in the framework's words; "" where it is no tensor or has none."""
        return str(getattr(value, "device", "")) if self.is_tensor(value) else ""

    @abstractmethod
    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each input: a tuple for a tensor, a tuple of these for a list, else None."""

    @abstractmethod
    def isolated(self) -> AbstractContextManager[Any]:
        """Context in which autodiff records nothing."""

    @abstractmethod
    def version(self, value: Any) -> Any:
        """Return what changes when a value is written into; None where that cannot be told."""

    def versions(self, values: Sequence[Any]) -> list[Any]:
        """The version of each value."""
        return [self.version(value) for value in values]

    def call_isolated(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine where autodiff records nothing."""
        with self.isolated():
            return func(*values, **kwargs)

    def call_observer(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine that changes no value; it reads tensors outside of what their classes override."""
        return self.call_isolated(func, values, kwargs)

    def call(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine that computes for the program, such as a replacement."""
        return func(*values, **kwargs)

    def reading(self) -> AbstractContextManager[Any]:
        """Context in which tensors are read for tools: no mode, and no class of tensors, sees it."""
        return nullcontext()

    @abstractmethod
    def straight_through(self, original: Any, value: Any) -> Any:
        """`value`, with the identity as its gradient's way back to `original`.

        Raises RoutineError where it has another shape or is complex and `original` is not, or the
        reverse; casts between floating types.
        """

    @abstractmethod
    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor, straight through where isolated."""

    @abstractmethod
    def kept(self, value: Any) -> Any:
        """A value for later: what it holds, without the graph that it hangs in."""

    @abstractmethod
    def copied(self, value: Any) -> Any:
        """A differentiable copy of a tensor."""


class UnwrittenTensors(TensorOps):
    """Primitives of tensors that nothing writes into, and that hang in no graph of autodiff."""

    def isolated(self) -> AbstractContextManager[Any]:
        """Context that does nothing."""
        return nullcontext()

    def version(self, value: Any) -> Any:
        """Return None."""
        return None

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Raise RoutineError."""
        raise RoutineError(f"a {type(target).__name__} cannot be written into; return another value instead")

    def kept(self, value: Any) -> Any:
        """Return the value."""
        return value

    def copied(self, value: Any) -> Any:
        """Return the value."""
        return value


class TensorMap(Generic[T]):
    """A weak map from tensors of any framework to something: it keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[weakref.ref[Any], T]] = {}

    @staticmethod
    def key(tensor: Any) -> Hashable:
        """Return a key that no other living tensor has."""
        return getattr(tensor, "_id", None) or id(tensor)  # eager tensors of TensorFlow have numbers

    def __setitem__(self, tensor: Any, value: T) -> None:
        key = self.key(tensor)
        self._known[key] = weakref.ref(tensor, partial(self._forget, key)), value

    def get(self, tensor: Any) -> T | None:
        """Return the value of a tensor; None for a tensor without one."""
        found = self._known.get(self.key(tensor))
        return found[1] if found is not None and found[0]() is not None else None

    def _forget(self, key: Hashable, gone: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is gone:
            del self._known[key]


def spread(values: Iterable[Any]) -> list[Any]:
    """Values, each list among them as its elements."""
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]
