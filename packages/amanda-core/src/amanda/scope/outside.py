"""Threads that run ops outside of the scopes that are open meanwhile: the reports of these name them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from amanda import interceptor

if TYPE_CHECKING:
    from amanda.scope.scope import Scope

OUTSIDE = (
    "ran ops outside of the scope: it started before, or in C; scope.bind(function) brings the scope along"
)

_this_thread = threading.local()


def watch(scopes: Collection[Scope]) -> None:
    """Name, in the reports of these open scopes, each thread that runs ops where no scope is in force.

    A thread that opens scopes itself, such as this one, knows what runs outside of them, and is not named.
    """
    _this_thread.opens_scopes = True
    interceptor.watch_outside(partial(_name_thread, scopes))


def _name_thread(scopes: Collection[Scope]) -> bool:
    """Report this thread; False where tools are switched off just now, or a routine's thread runs.

    No lock is taken: an import may run ops, and attaching drivers imports.
    """
    if getattr(_this_thread, "opens_scopes", False):
        return True
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and (activation.state.scopes or activation.state.stack is None):
        return False
    here = threading.get_ident()
    name = next((thread.name for thread in threading.enumerate() if thread.ident == here), here)
    for scope in tuple(scopes):
        scope.report.add(f"thread {name}", OUTSIDE)
    return True
