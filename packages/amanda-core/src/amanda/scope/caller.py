"""The thread that executes the program, also for routines that a framework calls on threads of its own."""

from __future__ import annotations

import threading


class Caller:
    """A thread that executes a program; it lives as long as the thread."""


class _Here(threading.local):
    """The callers of one thread: its own one, and the one whose graph calls back on it."""

    own: Caller | None = None
    served: Caller | None = None


_here = _Here()


def caller() -> Caller | None:
    """Return the caller that this routine runs for; None on a framework's thread where that is unknown."""
    if _here.served is not None:
        return _here.served
    if _here.own is None and not isinstance(threading.current_thread(), threading._DummyThread):
        _here.own = Caller()
    return _here.own


class serving:
    """Context in which routines run for a caller; a hot path."""

    __slots__ = ("_before", "_one")

    def __init__(self, one: Caller | None) -> None:
        self._one = one

    def __enter__(self) -> None:
        self._before, _here.served = _here.served, self._one

    def __exit__(self, *_: object) -> None:
        _here.served = self._before
