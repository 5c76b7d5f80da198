"""What the core asks of a framework's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda._calls import Call
    from amanda._views import Views
    from amanda.action import Routine


class TensorOps(ABC):
    """What a driver knows of its framework's tensors.

    views: which values stand for views; None where tensors never share memory.
    """

    views: Views | None = None

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the framework."""

    @abstractmethod
    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype, rank and device of every tensor among the inputs."""

    @abstractmethod
    def shapes(self, inputs: Sequence[Any]) -> Hashable:
        """Shape of every tensor among the inputs."""

    @abstractmethod
    def isolated(self) -> AbstractContextManager[Any]:
        """Context in which autodiff records nothing."""

    @abstractmethod
    def version(self, value: Any) -> Any:
        """What changes when a value is written into; None where that cannot be told."""

    def versions(self, values: Sequence[Any]) -> list[Any]:
        """The version of each value."""
        return [self.version(value) for value in values]

    def call_isolated(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine where autodiff records nothing."""
        with self.isolated():
            return func(*values, **kwargs)

    @abstractmethod
    def straight_through(self, original: Any, value: Any) -> Any:
        """`value`, with the identity as its gradient's way back to `original`.

        Raises RoutineError where it has another shape or is complex and `original` is not, or the
        reverse; casts between floating types.
        """

    @abstractmethod
    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor, straight through where isolated."""

    def written_later(self, values: Sequence[Any]) -> Saved | None:
        """Return the context to run an op in, after which these values may be written once more.

        None where `saved_of` finds all that it will have saved.
        """
        return None

    def saves_out_of_reach(self, value: Any) -> bool:
        """Whether `saved_of` could not find what an op that writes this value is about to save of it."""
        return True

    def saved_of(self, values: Sequence[Any]) -> Saved:
        """What the backward ops of the op that has just written these values have saved of them."""
        return Saved()

    @abstractmethod
    def kept(self, value: Any) -> Any:
        """A value for later: what it holds, without the graph that it hangs in."""

    @abstractmethod
    def copied(self, value: Any) -> Any:
        """A differentiable copy of a tensor."""


class Saved:
    """What the backward ops of an op save, which may share memory with what is written later."""

    def seeing(self, call: Call, inputs: list[Any]) -> Any:
        """Run an op and see what it saves."""
        return call.invoke(inputs)

    def keep(self) -> None:
        """Hear that the values will be written now: what was saved of them has to be copied."""


def spread(values: Iterable[Any]) -> list[Any]:
    """Values, each list among them as its elements."""
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]
