"""Observers that take many executions in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action, Routine
    from amanda.plan.facts import OpFacts


class Place(Protocol):
    """The place of an observer: its action, and facts of the op."""

    action: Action
    facts: OpFacts


RunOf = Callable[[Any], dict[Any, Any]]
RoutineT = TypeVar("RoutineT", bound="Routine")
PreparedT = TypeVar("PreparedT")

_NAME = "__amanda_gathered__"


class Observed:
    """One execution of an op that an observer would have been called for.

    values: those that the observer selects.  kwargs: keyword arguments from the tool.
    """

    __slots__ = ("_at", "_run_of", "kwargs", "values")

    def __init__(self, values: Sequence[Any], kwargs: Mapping[str, Any], at: Place, run_of: RunOf) -> None:
        self.values = values
        self.kwargs = kwargs
        self._at = at
        self._run_of = run_of

    @property
    def run(self) -> dict[Any, Any]:
        """Return what routines of this execution hand on: `run` of a routine that takes it."""
        return self._run_of(self._at)

    def explain(self, error: BaseException) -> None:
        """Note the op and the observer on an exception."""
        self._at.facts.explain(error, self._at.action)


class Executions(Sequence[Observed]):
    """Executions of ops, in the order in which observers would have been called.

    Remembers the one that an iteration has reached, so that an exception is traced to an op.

    executions: a driver may give a sequence that makes each `Observed` when it is asked for.
    tensors: see the property.  prepared: kept by the driver for executions that come together again.
    values: returns what the method of this name does, where a driver has it without each `Observed`.
    """

    def __init__(
        self,
        executions: Sequence[Observed] = (),
        tensors: Sequence[Any] | None = None,
        prepared: dict[Any, Any] | None = None,
        values: Callable[[], Sequence[Sequence[Any]]] | None = None,
    ) -> None:
        self._executions = executions
        self._values = values
        self._tensors = tensors
        self._prepared = {} if prepared is None else prepared
        self._reached: int | None = None

    @property
    def tensors(self) -> Sequence[Any]:
        """Return all values that the observers are given, tensors of lists one by one; maybe others, too.

        Asking for these makes no `Observed`.
        """
        if self._tensors is None:
            self._tensors = spread(value for one in self._executions for value in one.values)
        return self._tensors

    def values(self) -> Sequence[Sequence[Any]]:
        """Return the values of each execution, in order; quicker than to ask each for its own."""
        return [one.values for one in self._executions] if self._values is None else self._values()

    def prepared(self, make: Callable[[Sequence[Observed]], PreparedT]) -> PreparedT:
        """Return what `make` returns of the executions, which may depend on their `kwargs` alone.

        `make` is called once for executions of the same ops.
        """
        if make not in self._prepared:
            self._prepared[make] = make(self._executions)
        found: PreparedT = self._prepared[make]
        return found

    def __len__(self) -> int:
        return len(self._executions)

    @overload
    def __getitem__(self, index: int) -> Observed: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Observed]: ...

    def __getitem__(self, index: int | slice) -> Observed | Sequence[Observed]:
        return self._executions[index]

    def __iter__(self) -> Iterator[Observed]:
        """Yield the executions."""
        for i, one in enumerate(self._executions):
            self._reached = i
            yield one
        self._reached = None

    def observe(self, action: Action) -> None:
        """Call the gathered form of their observers, of which one belongs to the action."""
        assert action.gathered is not None
        try:
            with action.tool._amanda.lock:
                action.gathered(self)
        except BaseException as error:
            reached = self._reached
            for one in (self[0], self[-1]) if reached is None else (self[reached],):
                one.explain(error)
            raise


def gathered(*observers: Routine) -> Callable[[RoutineT], RoutineT]:
    """Mark a routine that takes many executions of observers of the same class, or module, in one call.

    The routine is given a sequence of `Observed`, and has to do what the observers do one by one.  Drivers
    that gather observers call it, others call the observers.

    >>> class Count:
    ...     @observer
    ...     def see(self, *values): self.seen += 1
    ...     @gathered(see)
    ...     def see_all(self, executions): self.seen += len(executions)
    """

    def mark(func: RoutineT) -> RoutineT:
        for one in observers:
            setattr(one, _NAME, func)
        return func

    return mark


def gathered_form(func: Routine) -> Routine | None:
    """Return the routine that takes many executions of an observer; None where the class has none."""
    if not isinstance(func, MethodType):
        attributes = getattr(func, "__dict__", {})
        return None if "__wrapped__" in attributes else attributes.get(_NAME)
    found = getattr(func.__func__, _NAME, None)
    if found is None:
        return None
    bound: Routine = getattr(func.__self__, found.__name__)
    return bound
