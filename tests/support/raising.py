"""Exceptions at calls that Amanda makes, and what of it is found afterwards."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import amanda
from amanda import interceptor
from amanda.interceptor.attributes import Patches
from amanda.scope.attachment import attachment

HOMES = tuple(amanda.__path__)
WHOLE = "AMANDA_EVERY_CALL" in os.environ
BEFORE_ITS_FIRST_LINE = ("Scope.__exit__", "allow_tapes_in_routines.<locals>._pop_tape")
"""Names of functions that an exception at their call leaves undone, as of context managers written in Python.

The second stands for a method that TensorFlow's `GradientTape.__exit__` calls, which is in Python too.
"""


class RaiseAt:
    """Raises at one call among those of Amanda's own code: a real SIGINT, or an exception.

    sites: the number of the first call from each line to each function.
    """

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._number, self._error, self._calls = number, error, 0
        self.sites: dict[tuple[CodeType, CodeType | None, int | None], int] = {}

    def __enter__(self) -> RaiseAt:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(HOMES):
            return
        if code.co_qualname in BEFORE_ITS_FIRST_LINE:
            return
        self._calls += 1
        caller = frame.f_back
        place = (code, None, None) if caller is None else (code, caller.f_code, caller.f_lineno)
        self.sites.setdefault(place, self._calls)
        if self._calls == self._number:
            sys.setprofile(None)
            if self._error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise self._error


def raised(program: Callable[[], Any], *errors: type[BaseException]) -> bool:
    """Run a program; return whether it raised one of these."""
    try:
        program()
    except errors:
        return True
    return False


class InstalledPatches:
    """The attributes that a scope sets, as they are without one."""

    def __init__(self, program: Callable[[], Any]) -> None:
        with amanda.apply(amanda.Tool()):
            program()
            gc.unfreeze()
            self._attributes = [item for item in gc.get_objects() if type(item) is Patches]
            places = [
                (holder, name)
                for attributes in self._attributes
                for holder, name, *_ in attributes._replaced_attributes
            ]
        self._before = [(holder, name, vars(holder).get(name)) for holder, name in places]
        self._finders = list(sys.meta_path)

    def left(self) -> list[str]:
        """Return what is not as without a scope."""
        found = [
            f"{holder}.{name}" for holder, name, was in self._before if vars(holder).get(name) is not was
        ]
        lists = [
            entries
            for attributes in self._attributes
            for entries in (attributes._replaced_attributes, attributes._undo_steps)
            if entries
        ]
        found += [f"{entries} to be put back" for entries in lists]
        if sys.meta_path != self._finders:
            found.append("a finder of modules")
        if attachment._scopes or attachment._attached or interceptor.active() is not None:
            found.append("a scope")
        return found


def failures(
    program: Callable[[], Any],
    check: Callable[[], list[str]],
    tool: Callable[[], amanda.Tool],
    error: type[BaseException],
    most: int,
) -> dict[int, list[str]]:
    """Run a program under tools, with the error at some calls; return what was found after each.

    most: how many calls; at all places that call, where the environment has AMANDA_EVERY_CALL.
    """

    def run(number: int) -> RaiseAt:
        at, applied = RaiseAt(number, error), tool()

        def within() -> None:
            with at, amanda.apply(applied):
                program()

        raised(within, Exception, error)  # a framework may raise one of its own for it
        return at

    run(0)
    sites = run(0).sites
    places, names = list(sites.values()), {number: place[0].co_qualname for place, number in sites.items()}
    found = {}
    for number in places[:: 1 if WHOLE else len(places) // most or 1]:
        run(number)
        left = check()
        if left:
            found[number] = [names[number], *left]
    return found
