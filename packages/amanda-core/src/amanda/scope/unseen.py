"""Parts of a program that tools do not see: reports of them, and stand-ins that run them without tools."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from amanda import interceptor

P = ParamSpec("P")
T = TypeVar("T")


def report_unseen(subject: str, reason: str, where: str = "") -> None:
    """Add an uninstrumented part of the program to the reports of the scopes in force here, if there are any.

    where: "file:line" of the user's code.
    """
    activation = interceptor.active()
    if activation is not None:
        activation.state.report(subject, reason, where)


def hide_ops(
    function: Callable[P, T], entry_of: Callable[..., tuple[Any, ...] | None] | None = None
) -> Callable[P, T]:
    """Return a stand-in that runs a function without tools, which see no op inside.

    entry_of: returns the report's entry for a call with these arguments; None for no entry.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        """Report the call if it has an entry, and make it without tools."""
        if entry_of is not None and interceptor.active() is not None:
            entry = entry_of(*args, **kwargs)
            if entry is not None:
                report_unseen(*entry)
        with interceptor.Suspension():
            return function(*args, **kwargs)

    return run
