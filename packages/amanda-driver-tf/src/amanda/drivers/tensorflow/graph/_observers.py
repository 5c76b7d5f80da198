"""Observers of several operations, which share a node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda.backend import Action, Execution, Executions, Insertion, Observed, failed, matched, picked_by

from ._handles import resolve_handles


class _PlacedObserver:
    """An observer at an operation.

    indices: indices of the operation's tensors among those of the node.
    layout: for each value that the observer selects, an index, a list of indices, or None for a value that
    the node does not read; None before the first execution, since a selection may raise.
    is_flat: True if the layout has indices alone.
    """

    __slots__ = ("action", "facts", "indices", "is_flat", "kwargs", "layout", "place")

    def __init__(self, action: Action, place: Insertion, indices: Sequence[int]) -> None:
        self.action = action
        self.facts = place.facts
        self.place = place
        self.indices = indices
        self.kwargs = {**action.kwargs, "shapes": None} if action.takes_shapes else action.kwargs
        self.layout: Sequence[Any] | None = None
        self.is_flat = False

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """Return the values that the observer selects."""
        layout = self.layout
        if layout is None:
            all_indices = self.place.values(self.indices)
            select = self.action.select
            layout = all_indices if select is None else picked_by(self.action, all_indices, self.facts)
            self.layout, self.is_flat = layout, all(isinstance(entry, int) for entry in layout)
        if self.is_flat:
            return [flat[i] for i in layout]
        return [
            [flat[i] for i in entry] if isinstance(entry, list) else None if entry is None else flat[entry]
            for entry in layout
        ]

    def explain(self, error: BaseException, flat: Sequence[Any], values: Sequence[Any]) -> None:
        """Add a note with the op to an exception of the observer, or raise a clearer exception."""
        all_values = self.place.values([flat[i] for i in self.indices])
        explained = failed(error, self.action, all_values, values, self.facts)
        if explained is not None:
            raise explained from error


class _ObserverGroup:
    """Observers of one tool with the same gathered function, which is called once for all of them.

    prepared: a dict that the gathered function uses from run to run.
    is_laid_out: True if each observer has its layout.
    """

    __slots__ = ("action", "is_laid_out", "observers", "prepared")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.observers: list[_PlacedObserver] = []
        self.prepared: dict[Any, Any] = {}
        self.is_laid_out = False


class _LazyObserved(Sequence[Observed]):
    """The observations of a run, each created when it is read."""

    def __init__(
        self, observers: Sequence[_PlacedObserver], flat: Sequence[Any], run_of: Callable[..., dict[Any, Any]]
    ) -> None:
        self._observers = observers
        self._flat = flat
        self._run_of = run_of

    def __len__(self) -> int:
        return len(self._observers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        observer = self._observers[index]
        return Observed(observer.values(self._flat), observer.kwargs, observer, self._run_of)

    def values(self) -> list[list[Any]]:
        """Return the values of each observer."""
        return [observer.values(self._flat) for observer in self._observers]


class PackedObservers:
    """Observers of several operations, which run in the order of these and return nothing.

    Observers with a gathered function run after the others.
    """

    def __init__(self, members: Sequence[tuple[Insertion, Sequence[int]]]) -> None:
        """Create the observers of `members`: each a place, and the indices of its tensors in the node."""
        self.loaned_positions: Sequence[int] = ()
        self._single_observers: list[_PlacedObserver] = []
        self._groups: dict[Any, _ObserverGroup] = {}
        for place, indices in members:
            for action in place.actions:
                observer = _PlacedObserver(action, place, indices)
                if action.gathered is None:
                    self._single_observers.append(observer)
                elif not action.opening:
                    key = action.gathered, id(action.tool)
                    self._groups.setdefault(key, _ObserverGroup(action)).observers.append(observer)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Call each observer with its tensors; a hot path."""
        flat = resolve_handles(execution, flat, self.loaned_positions)

        def run_of(observer: _PlacedObserver) -> dict[Any, Any]:
            return observer.place.run_of(execution, rounds)

        for observer in self._single_observers:
            action = observer.action
            values: Sequence[Any] = ()
            if not execution.runs_action(action):
                continue
            try:
                values = observer.values(flat)
                kwargs = {**observer.kwargs, "run": run_of(observer)} if action.takes_run else observer.kwargs
                # A tool's routines run one at a time; TensorFlow runs nodes on many threads.
                with action.tool._amanda.lock:
                    result = action.func(*values, **kwargs)
                if result is not None:
                    matched(action, result, values)
            except BaseException as error:
                observer.explain(error, flat, values)
                raise
        for group in self._groups.values():
            if execution.runs_action(group.action):
                self._lay_out(group, flat)
                observed = _LazyObserved(group.observers, flat, run_of)
                Executions(observed, flat, group.prepared, observed.values).observe(group.action)
        return []

    @staticmethod
    def _lay_out(group: _ObserverGroup, flat: Sequence[Any]) -> None:
        """Find the layout of each observer in a group, so that errors name the observer."""
        if group.is_laid_out:
            return
        for observer in group.observers:
            try:
                observer.values(flat)
            except BaseException as error:
                observer.explain(error, flat, ())
                raise
        group.is_laid_out = True
