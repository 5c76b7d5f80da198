"""Observers of several places, which run together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda.backend import Action, Execution, Executions, Insertion, Observed, failed, matched, picked_by

from ._handles import borrowed


class _Observer:
    """One observer at one place.

    indices: of the place's tensors among those of the node.  layout: the same of each value that the observer
    selects: an index, those of a list, or None for a value that is out of sight.
    """

    __slots__ = ("action", "facts", "indices", "is_flat", "kwargs", "layout", "place")

    def __init__(self, action: Action, place: Insertion, indices: Sequence[int]) -> None:
        self.action = action
        self.facts = place.facts
        self.place = place
        self.indices = indices
        self.kwargs = {**action.kwargs, "shapes": None} if action.takes_shapes else action.kwargs
        self.layout: Sequence[Any] | None = None  # until the first execution, which may raise
        self.is_flat = False

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """Return the values that the observer selects."""
        layout = self.layout
        if layout is None:
            every = self.place.values(self.indices)
            select = self.action.select
            layout = every if select is None else picked_by(self.action, every, self.facts)
            self.layout, self.is_flat = layout, all(isinstance(one, int) for one in layout)
        if self.is_flat:
            return [flat[i] for i in layout]
        return [
            [flat[i] for i in one] if isinstance(one, list) else None if one is None else flat[one]
            for one in layout
        ]

    def explain(self, error: BaseException, flat: Sequence[Any], values: Sequence[Any]) -> None:
        """Note the op on an exception of the observer; raise another one where that says more."""
        every = self.place.values([flat[i] for i in self.indices])
        told = failed(error, self.action, every, values, self.facts)
        if told is not None:
            raise told from error


class _Together:
    """Observers of one tool with the same gathered form.

    prepared: what the gathered form keeps for them from run to run.
    """

    __slots__ = ("action", "is_laid_out", "observers", "prepared")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.observers: list[_Observer] = []
        self.prepared: dict[Any, Any] = {}
        self.is_laid_out = False  # until the first execution, which may raise


class _Lazily(Sequence[Observed]):
    """What observers see in one run, each made when it is asked for."""

    def __init__(
        self, observers: Sequence[_Observer], flat: Sequence[Any], run_of: Callable[..., dict[Any, Any]]
    ) -> None:
        self._observers = observers
        self._flat = flat
        self._run_of = run_of

    def __len__(self) -> int:
        return len(self._observers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        one = self._observers[index]
        return Observed(one.values(self._flat), one.kwargs, one, self._run_of)

    def values(self) -> list[list[Any]]:
        """Return the values of each."""
        return [one.values(self._flat) for one in self._observers]


class Packed:
    """Observers of several places, which run in the order of these and give nothing back.

    Observers with a gathered form come after the others.
    """

    def __init__(self, members: Sequence[tuple[Insertion, Sequence[int]]]) -> None:
        """Take places, and for each the indices of its tensors among those of the node."""
        self.borrows: Sequence[int] = ()
        self._alone: list[_Observer] = []
        self._together: dict[Any, _Together] = {}
        for place, indices in members:
            for action in place.actions:
                one = _Observer(action, place, indices)
                if action.gathered is None:
                    self._alone.append(one)
                elif not action.opening:
                    key = action.gathered, id(action.tool)
                    self._together.setdefault(key, _Together(action)).observers.append(one)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Hand each observer its tensors; a hot path."""
        flat = borrowed(execution, flat, self.borrows)

        def run_of(one: _Observer) -> dict[Any, Any]:
            return one.place.run_of(execution, rounds)

        for one in self._alone:
            action = one.action
            values: Sequence[Any] = ()
            if not execution.runs_action(action):
                continue
            try:
                values = one.values(flat)
                kwargs = {**one.kwargs, "run": run_of(one)} if action.takes_run else one.kwargs
                with action.tool._amanda.lock:
                    result = action.func(*values, **kwargs)
                if result is not None:
                    matched(action, result, values)
            except BaseException as error:
                one.explain(error, flat, values)
                raise
        for together in self._together.values():
            if execution.runs_action(together.action):
                self._lay_out(together, flat)
                seen = _Lazily(together.observers, flat, run_of)
                Executions(seen, flat, together.prepared, seen.values).observe(together.action)
        return []

    @staticmethod
    def _lay_out(together: _Together, flat: Sequence[Any]) -> None:
        """Find what each observer selects."""
        if together.is_laid_out:
            return
        for one in together.observers:
            try:
                one.values(flat)
            except BaseException as error:
                one.explain(error, flat, ())
                raise
        together.is_laid_out = True
