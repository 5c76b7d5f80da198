"""Recomputation: what a framework runs again, as a checkpoint does, is the same executions again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

from amanda import interceptor
from amanda.plan.run_dicts import RunRecord
from amanda.scope.state import State, activated, replayed

P = ParamSpec("P")
T = TypeVar("T")


class Recomputation:
    """A part of the program that a framework runs at this place, and runs again later.

    Ops that run again have the ids, the tools and the `run` of their first execution, except for tensors in
    it.  Routines with a parameter `recomputed` are told, and observers without one are not called.
    """

    def __init__(self) -> None:
        self._at_place: Callable[..., object] = replayed(_call)
        self._record = RunRecord()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Return a context for the part of the program that may run again."""
        state = State.current()
        try:
            with activated(replace(state, records=(*state.records, self._record))):
                yield
        finally:
            self._record.close()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it at this place for the first time."""
        return self._at_place(self._recorded, function, *args, **kwargs)  # type: ignore[return-value]

    def again(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it again, at this place, on any thread."""
        return self._at_place(self._recalled, function, *args, **kwargs)  # type: ignore[return-value]

    def _recorded(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.first():
            return function(*args, **kwargs)

    def _recalled(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with activated(replace(State.current(), records=(), recall=self._record.recall())):
            return function(*args, **kwargs)


def recomputed(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function for a framework that calls it once here, and then again, as a checkpoint does.

    Where no scope is in force it is the function itself.
    """
    if interceptor.active() is None:
        return function
    recomputation, ran = Recomputation(), False

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal ran
        run_at_place, ran = recomputation.again if ran else recomputation.run, True
        return run_at_place(function, *args, **kwargs)

    return run


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return function(*args, **kwargs)
