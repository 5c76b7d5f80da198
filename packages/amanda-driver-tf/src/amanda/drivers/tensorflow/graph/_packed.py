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

    def failed(
        self, error: BaseException, flat: Sequence[Any], values: Sequence[Any]
    ) -> BaseException | None:
        """Note the op on an exception of the observer; return the one to raise instead, if there is one."""
        every = self.place.values([flat[i] for i in self.indices])
        return failed(error, self.action, every, values, self.facts)


class Packed:
    """Observers of several places, which run in the order of these and give nothing back.

    Observers with a gathered form come after the others.
    """

    def __init__(self, members: Sequence[tuple[Insertion, Sequence[int]]]) -> None:
        """Take places, and for each the indices of its tensors among those of the node."""
        self.borrows: Sequence[int] = ()
        self._observers = [
            _Observer(action, place, indices) for place, indices in members for action in place.actions
        ]

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Hand each observer its tensors; a hot path."""
        flat = borrowed(execution, flat, self.borrows)
        gathered: dict[Callable[..., Any], tuple[Action, Executions]] = {}

        def run_of(one: _Observer) -> dict[Any, Any]:
            return one.place.run_of(execution, rounds)

        for one in self._observers:
            action = one.action
            values: Sequence[Any] = ()
            if not execution.runs_action(action):
                continue
            try:
                values = one.values(flat)
                if action.gathered is not None:
                    found = gathered.get(action.gathered)
                    if found is None:
                        found = gathered[action.gathered] = action, Executions()
                    found[1].append(Observed(values, one.kwargs, one, run_of))
                    continue
                kwargs = {**one.kwargs, "run": run_of(one)} if action.takes_run else one.kwargs
                with action.tool._amanda.lock:
                    result = action.func(*values, **kwargs)
                if result is not None:
                    matched(action, result, values)
            except BaseException as error:
                told = one.failed(error, flat, values)
                if told is not None:
                    raise told from error
                raise
        for action, executions in gathered.values():
            executions.observe(action)
        return []
