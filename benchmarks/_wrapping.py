"""Routines that take the place of a tool's own."""

import functools
from collections.abc import Callable
from typing import Any

import amanda
from amanda.action import Routine, has_run, marks
from amanda.plan.tools import in_dependency_order


def wrap(tool: amanda.Tool, instead: Callable[[Routine], Routine]) -> None:
    """Record `instead(routine)` for each routine of a tool and of those that it depends on."""
    for one in in_dependency_order([tool]):
        one.wrap_routines(lambda context, type, routine: in_place_of(routine, instead(routine)))


def in_place_of(routine: Routine, call: Routine) -> Routine:
    """Return `call` with everything that drivers read off a routine: name, marks, wish for its run."""

    def with_run(*values: Any, run: Any, **kwargs: Any) -> Any:
        return call(*values, run=run, **kwargs)

    wrapper: Routine = with_run if has_run(routine) else call
    functools.update_wrapper(wrapper, routine, updated=())
    for mark in marks(routine):
        wrapper = getattr(amanda, mark)(wrapper)
    return wrapper


def hollow(tool: amanda.Tool) -> amanda.Tool:
    """Return the tool with routines that do nothing: the rest of its cost is the framework's."""
    wrap(tool, lambda routine: lambda *values, **kwargs: None)
    return tool
