"""Observers that native code or a driver runs without a call of Python for each execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from amanda import interceptor
from amanda.plan.tensors import sample_count, spread

if TYPE_CHECKING:
    from amanda.plan.action import Action, Routine
    from amanda.plan.facts import OpFacts


# Native code finds these classes by their base, and adds to the table of the object without calling it.
class Tally(interceptor.ShapeCounter):
    """Count executions of an op in native code.

    Insert the object itself, with no values.

    >>> tally = Tally()
    >>> context.insert_after_op(tally, outputs=[])  # doctest: +SKIP
    >>> tally()
    >>> tally.calls
    1
    """

    __slots__ = ()
    __amanda_marks__ = frozenset({"observer"})

    def __call__(self) -> None:
        """Count an execution, as native code does instead of this call."""
        self.add(())

    @property
    def recomputed(self) -> Tally | None:
        """Return what counts recomputations; None: they are not counted."""
        return None

    @property
    def calls(self) -> int:
        """Return how many executions were counted."""
        return sum(calls for _, calls in self.items())

    def __reduce__(self) -> tuple[Callable[[int], Tally], tuple[int]]:
        return _tally_of, (self.calls,)


def _tally_of(calls: int) -> Tally:
    """Return a tally with a count, as a copy has."""
    tally = Tally()
    if calls:
        tally.add((), calls)
    return tally


# A class of its own, as the signature decides whether native code builds the tuple of shapes.
class ShapeTally(interceptor.ShapeCounter):
    """Count executions of an op by the shapes of its values, in native code.

    Insert the object itself, with no values.

    limit: number of different shapes that native code counts; it calls the object where there are more.

    >>> tally = ShapeTally()
    >>> tally(shapes=(((2, 3),), ((2, 4),)))
    >>> tally.items()
    [((((2, 3),), ((2, 4),)), 1)]
    """

    __slots__ = ()
    __amanda_marks__ = frozenset({"observer"})

    def __call__(self, *, shapes: tuple[Any, ...]) -> None:
        """Count an execution, as native code does instead of this call up to the limit."""
        self.add(shapes)

    @property
    def recomputed(self) -> ShapeTally | None:
        """Return what counts recomputations; None: they are not counted."""
        return None

    @staticmethod
    def samples(shapes: tuple[Any, ...]) -> int:
        """Return how many samples an execution with these shapes computes: 1, unless a vmap maps the op.

        >>> ShapeTally.samples((((2, 3),), ((2, 4),)))
        1
        """
        return sample_count(shapes)


class GatedObserver(interceptor.GatedRoutine):
    """Observer that native code does not call while a gate is not open; Python calls it in any case.

    Args:
        gate: `interceptor.Gate`, which observers share; open at first.
        routine: Called with the values and options of an execution.
    """

    __amanda_marks__ = frozenset({"observer"})

    def __init__(self, gate: interceptor.Gate, routine: Callable[..., None]) -> None:
        super().__init__(gate)
        self._routine = routine

    def __call__(self, *values: Any, **options: Any) -> None:
        self._routine(*values, **options)


class FiniteObserver(interceptor.FiniteCheck):
    """Observer of all values of an op, which native code calls only where an output is not finite.

    One is inserted before an op and one after it.  While both have `skips` set, native code calls neither if
    all outputs are tensors in host memory without NaN and Inf.  Otherwise it calls the one before after the
    op: inputs that the op has written are no longer what they were.  If `copies` is set too, in the observer
    before, its `copy` has the bytes that the first input had before the op.

    Args:
        routine: Called with this object, the values, and the numbers of batches of a vmap, by flat index.
        *before_and_tally: Of the observer after an op: that before it, and a `Tally` of skipped executions.
    """

    __amanda_marks__ = frozenset({"observer", "all_samples"})

    def __init__(self, routine: Callable[..., None], *before_and_tally: Any) -> None:
        super().__init__(*before_and_tally)
        self._routine = routine

    def __call__(self, *values: Any, batches: Sequence[int] = ()) -> None:
        self._routine(self, values, batches)


class MomentsObserver(interceptor.MomentsObserver):
    """Observer that adds the numbers of values to `interceptor.Moments`, which native code does from then on.

    Args:
        routine: Called with the values and options of an execution whose values native code does not read.
        find_moments: Called after the first execution with this object, the values and the options: may set
            `moments`, for each value, with None for a value that is no tensor, and `length`.
    """

    __amanda_marks__ = frozenset({"observer", "all_samples"})

    def __init__(self, routine: Callable[..., None], find_moments: Callable[..., None]) -> None:
        super().__init__()
        self._routine, self._find_moments = routine, find_moments
        self._is_first = True

    def __call__(self, *values: Any, batches: Sequence[int] = (), **options: Any) -> None:
        """Call the routine, and after the first execution look for the moments."""
        self._routine(*values, batches=batches, **options)
        if self._is_first and not batches:
            self._is_first = False
            self._find_moments(self, values, **options)

    def restart(self) -> None:
        """Forget the moments and the executions that native code has measured."""
        self._is_first, self.moments, self.executions = True, None, 0


class StorageObserver(interceptor.StorageObserver):
    """Observer that follows the storages of an op's values; native code does so without a call of Python.

    One is inserted before an op and one after it.

    Args:
        routine: Called with the values and the options of an execution that native code cannot follow.
        find_recomputed: Returns the observer that takes the place of this one in recomputations.
        tracker: `interceptor.StorageTracker`, which observers share.
        number: Number of the op, to which the tracker ascribes the storages of its outputs.
        *before: Of the observer after an op: that before it; and `interceptor.SavedTensorReader`, with which
            native code follows what the op has saved for its backward ops.
    """

    __amanda_marks__ = frozenset({"observer"})

    def __init__(
        self, routine: Callable[..., None], find_recomputed: Callable[[], StorageObserver],
        tracker: interceptor.StorageTracker, number: int, *before: Any,
    ) -> None:  # fmt: skip
        super().__init__(tracker, number, *before)
        self._routine, self._find_recomputed = routine, find_recomputed

    def __call__(self, *values: Any, **options: Any) -> None:
        self._routine(*values, **options)

    @property
    def recomputed(self) -> StorageObserver:
        """Return the observer of recomputations."""
        return self._find_recomputed()


class ClockObserver(interceptor.ClockObserver):
    """Routine that starts or stops an execution of an op on an `interceptor.Clock`, next to the op.

    One is inserted before an op and one after it, with no values; native code runs them without a call of
    Python.

    Args:
        clock: Clock, which observers share.
        number: Number of the op on the clock.
        stops: Whether the routine is the one after the op.
        find_recomputed: Returns the observer that takes the place of this one in recomputations.
    """

    # Inside of the routines of all tools, whose time is not the op's.
    __amanda_marks__ = frozenset({"innermost"})

    def __init__(
        self, clock: interceptor.Clock, number: int, stops: bool, find_recomputed: Callable[[], ClockObserver]
    ) -> None:
        super().__init__(clock, number, stops)
        self._find_recomputed = find_recomputed

    @property
    def recomputed(self) -> ClockObserver:
        """Return the observer of recomputations."""
        return self._find_recomputed()


class RepeatObserver(interceptor.RepeatObserver):
    """Observer that native code calls only where an execution repeats none that the tool has recorded.

    One is inserted before an op and one after it.  For a repeated execution native code gives the tensors
    the indices of the record, notes writes, and counts.  An execution may begin in native code and end in
    Python: `ExecutionRecords.end` returns what was there before the op.

    Args:
        routine: Called with the values, `recomputed` and the options of an execution.
        records: `interceptor.ExecutionRecords` of the op.
        after: Whether the observer is inserted after the op.
    """

    __amanda_marks__ = frozenset({"observer"})
    __slots__ = ("_after", "_routine")  # there are two for each op

    def __init__(
        self, routine: Callable[..., None], records: interceptor.ExecutionRecords, after: bool = False
    ) -> None:
        super().__init__(records, after)
        self._routine, self._after = routine, after

    @property
    def recomputed(self) -> RepeatObserver:
        """Return the observer of recomputations, which are counted apart."""
        observer = type(self)(self._routine, self.records, self._after)
        observer.recomputes = True
        return observer

    def __call__(self, *values: Any, **options: Any) -> None:
        """Call the routine; native code on other threads calls Python meanwhile, which waits for the lock."""
        live = self.records.live
        live.busy += 1
        try:
            self._routine(*values, recomputed=self.recomputes, **options)
        finally:
            live.busy -= 1


# A class of its own: it is not called in recomputations, and has no attribute `recomputed`.
class BackwardRepeatObserver(interceptor.RepeatObserver):
    """`RepeatObserver` around a backward op: a repeated execution is one of the same forward execution.

    Args:
        routine: Called with the values and the options of an execution.
        records: `interceptor.ExecutionRecords` of the backward op.
        gradients: `interceptor.SentGradients`, from which native code takes those that enter the op, and
            to which it adds those that leave the op.
        after: Whether the observer is inserted after the op.
    """

    __amanda_marks__ = frozenset({"observer"})
    __slots__ = ("_routine",)

    def __init__(
        self, routine: Callable[..., None], records: interceptor.ExecutionRecords,
        gradients: interceptor.SentGradients, after: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(records, after, gradients)
        self._routine = routine

    def __call__(self, *values: Any, **options: Any) -> None:
        """Call the routine; native code on other threads calls Python meanwhile, which waits for the lock."""
        live = self.records.live
        live.busy += 1
        try:
            self._routine(*values, **options)
        finally:
            live.busy -= 1


# A protocol: drivers store more about a place than this room knows.
class ActionPlace(Protocol):
    """An observer's action, with facts of its op."""

    action: Action
    facts: OpFacts


RunOf = Callable[[Any], dict[Any, Any]]
RoutineT = TypeVar("RoutineT", bound="Routine")
PreparedT = TypeVar("PreparedT")

# An attribute of the observer and not of the routine that gathers: drivers look it up for an observer.
_GATHERED = "__amanda_gathered__"


class Observed:
    """One execution of an op, gathered instead of a call of its observer.

    Args:
        values: Values that the observer selects.
        kwargs: Keyword arguments from the tool.
        place: The op's facts and the action of the observer there.
        run_of: Returns the dict that routines of this execution share, for a place; called when `run` is
            read.
    """

    __slots__ = ("_place", "_run_of", "kwargs", "values")

    def __init__(
        self, values: Sequence[Any], kwargs: Mapping[str, Any], place: ActionPlace, run_of: RunOf
    ) -> None:
        self.values = values
        self.kwargs = kwargs
        self._place = place
        self._run_of = run_of

    @property
    def run(self) -> dict[Any, Any]:
        """Return the dict that routines of this execution share: the argument `run`."""
        return self._run_of(self._place)

    def annotate_error(self, error: BaseException) -> None:
        """Add a note to an exception with the op and the observer."""
        self._place.facts.annotate_error(error, self._place.action)


class Executions(Sequence[Observed]):
    """Executions of ops, in the order in which observers would have been called.

    An iteration remembers the execution that it has reached, so that an exception names the right op.

    Args:
        executions: Sequence of executions; a driver may create each `Observed` when it is read.
        tensors: Values for the property `tensors`; None to take those of the executions.
        prepared: Driver's cache for executions that are gathered together again; None for a new one.
        values: Returns the result of the method `values` without creating each `Observed`; None to create
            them.
        positions: Returns the result of the method `positions` where `tensors` has further tensors, or each
            of them once; None where all values follow one another.
    """

    def __init__(
        self,
        executions: Sequence[Observed] = (),
        tensors: Sequence[Any] | None = None,
        prepared: dict[Any, Any] | None = None,
        values: Callable[[], Sequence[Sequence[Any]]] | None = None,
        positions: Callable[[], Sequence[Sequence[Any]]] | None = None,
    ) -> None:
        self._executions = executions
        self._values, self._positions = values, positions
        self._tensors = tensors
        self._prepared = {} if prepared is None else prepared
        self._current_index: int | None = None

    @property
    def tensors(self) -> Sequence[Any]:
        """Return all values of the executions, with tensors of lists one by one; maybe further tensors, too.

        Reading this property creates no `Observed`.
        """
        if self._tensors is None:
            self._tensors = spread(value for execution in self._executions for value in execution.values)
        return self._tensors

    def values(self) -> Sequence[Sequence[Any]]:
        """Return the values of each execution, in order; faster than reading each execution's `values`."""
        return (
            [execution.values for execution in self._executions] if self._values is None else self._values()
        )

    def positions(self) -> list[list[Any]]:
        """Return for each execution the position in `tensors` of each tensor, those of lists one by one.

        None stands for a value that is not there.  The same at each run of the same ops.
        """
        if self._positions is not None:
            return [spread(layout) for layout in self._positions()]
        counter = count()
        return [[next(counter) for _ in spread(values)] for values in self.values()]

    def prepared(self, make: Callable[[Executions], PreparedT]) -> PreparedT:
        """Return the result of `make`, which is called once for all executions of the same ops.

        The result may depend only on the `kwargs` of the executions, on `positions()` and on element types.

        Args:
            make: Function of these executions; its result is cached.
        """
        # Keyed by the function: several tools may prepare something for the same executions.
        if make not in self._prepared:
            self._prepared[make] = make(self)
        prepared: PreparedT = self._prepared[make]
        return prepared

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
        for i, execution in enumerate(self._executions):
            # A number costs less at each execution than a context manager that names the op.
            self._current_index = i
            yield execution
        self._current_index = None

    def observe(self, action: Action) -> None:
        """Call the routine that gathers the observers, with the lock of the action's tool.

        An exception passes, with a note that names the op of the execution that the routine had reached.
        """
        assert action.gathered is not None
        try:
            with action.tool._amanda.lock:
                action.gathered(self)
        except BaseException as error:
            if self._current_index is not None:
                self[self._current_index].annotate_error(error)
            else:  # the routine does not iterate: the first and the last execution show its range
                self[0].annotate_error(error)
                self[-1].annotate_error(error)
            raise


def gathered(*observers: Routine) -> Callable[[RoutineT], RoutineT]:
    """Mark a routine that takes many executions of observers of the same class, or module, in one call.

    The routine receives a sequence of `Observed`, and has to do the same as calls of the observers one by
    one.  Drivers that gather observers call the routine, other drivers call the observers.

    Args:
        *observers: Methods or functions marked `@observer`, whose calls the routine replaces.

    >>> class Count:
    ...     @observer
    ...     def see(self, *values): self.seen += 1
    ...     @gathered(see)
    ...     def see_all(self, executions): self.seen += len(executions)
    """

    def mark(func: RoutineT) -> RoutineT:
        for routine in observers:
            setattr(routine, _GATHERED, func)
        return func

    return mark


def gathering_routine(func: Routine) -> Routine | None:
    """Return the routine that `gathered` marks as taking many executions of an observer; None without one."""
    if not isinstance(func, MethodType):
        attributes = getattr(func, "__dict__", {})
        # `functools.wraps` copies the attribute to functions that do something else.
        return None if "__wrapped__" in attributes else attributes.get(_GATHERED)
    gathering_function = getattr(func.__func__, _GATHERED, None)
    if gathering_function is None:
        return None
    # By name, so that a subclass may override the routine that gathers.
    gathering_method: Routine = getattr(func.__self__, gathering_function.__name__)
    return gathering_method
