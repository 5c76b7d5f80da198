"""Routines that take the place of a tool's own."""

import functools
from collections.abc import Callable
from typing import Any

import amanda
from amanda.action import Routine, has_run, marks
from amanda.plan.order import in_order


def wrap(tool: amanda.Tool, instead: Callable[[Routine], Routine]) -> None:
    """Record `instead(routine)` for each routine of a tool and of those that it depends on."""
    for one in in_order([tool]):
        one.wrap_routines(lambda context, type, routine: in_place_of(routine, instead(routine)))


def in_place_of(routine: Routine, call: Routine) -> Routine:
    """`call` with all that drivers read off a routine: its name, marks, and whether it wants its run."""

    def with_run(*values: Any, run: Any, **kwargs: Any) -> Any:
        return call(*values, run=run, **kwargs)

    wrapper: Routine = with_run if has_run(routine) else call
    functools.update_wrapper(wrapper, routine, updated=())
    for mark in marks(routine):
        wrapper = getattr(amanda, mark)(wrapper)
    return wrapper


def hollow(tool: amanda.Tool) -> amanda.Tool:
    """The tool, at the same ops with routines that do nothing: what is left is the framework's own."""
    wrap(tool, lambda routine: lambda *values, **kwargs: None)
    return tool
