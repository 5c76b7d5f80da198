"""The thread that executes the program, also for routines that a framework calls on threads of its own."""

from __future__ import annotations

import threading


class Caller:
    """A thread that executes a program; it lives as long as the thread."""


class _ThreadCallers(threading.local):
    """The callers of one thread: its own one, and the one whose graph calls back on it."""

    thread_caller: Caller | None = None
    served: Caller | None = None


_thread_callers = _ThreadCallers()


def caller() -> Caller | None:
    """Return the caller that this routine runs for; None on a framework's thread where that is unknown."""
    if _thread_callers.served is not None:
        return _thread_callers.served
    if _thread_callers.thread_caller is None and not isinstance(
        threading.current_thread(), threading._DummyThread
    ):
        _thread_callers.thread_caller = Caller()
    return _thread_callers.thread_caller


class serving:
    """Context in which routines run for a caller; a hot path."""

    __slots__ = ("_before", "_caller")

    def __init__(self, caller: Caller | None) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        self._before, _thread_callers.served = _thread_callers.served, self._caller

    def __exit__(self, *_: object) -> None:
        _thread_callers.served = self._before
