"""The order of tools: dependencies first, then as applied; and the order of their routines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from amanda.errors import DependencyCycleError
from amanda.plan.action import InstrumentationPoint

if TYPE_CHECKING:
    from amanda.plan.tools import Analysis, AnyTool

ToolT = TypeVar("ToolT", bound="AnyTool")


def in_order(tools: Iterable[ToolT]) -> list[ToolT]:
    """The tools and all that they depend on, each once, dependencies first.

    Of those that stand for each other the first is taken.
    Raises DependencyCycleError, which prints the cycle.
    """
    ordered: list[Any] = []
    path: list[AnyTool] = []

    def visit(tool: AnyTool) -> None:
        if any(same(tool, done) for done in ordered):
            return
        if any(tool is above for above in path):
            start = next(i for i, above in enumerate(path) if above is tool)
            names = [type(one).__name__ for one in [*path[start:], tool]]
            raise DependencyCycleError(
                "tools depend on each other in a circle: " + " -> ".join(names) + "; drop one depends_on"
            )
        path.append(tool)
        for dependency in tool._amanda.dependencies:
            visit(dependency)
        path.pop()
        ordered.append(tool)

    for tool in tools:
        visit(tool)
    return ordered


def same(tool: AnyTool, other: AnyTool) -> bool:
    """Return True for one tool, and for two of which either may stand for the other."""
    if tool is other:
        return True
    name, one, two = tool.stands_for(), tool._amanda, other._amanda
    if name is None or name != other.stands_for() or len(one.analyses) != len(two.analyses):
        return False
    return not (one.admissions or one.wrappers or two.admissions or two.wrappers)


def depends(tool: AnyTool, on: AnyTool) -> bool:
    """Return True if `tool` depends on `on`, at any distance."""
    return any(same(one, on) or depends(one, on) for one in tool._amanda.dependencies)


def routines_at(
    point: InstrumentationPoint, tools: Sequence[AnyTool], applied: Sequence[AnyTool]
) -> tuple[Analysis, ...]:
    """Analysis routines of `tools` at a point, closing ones behind those of the last dependent.

    applied: `tools` and those of the scopes around, which may depend on them or be depended on.
    """
    routines: list[Analysis] = []
    for tool in tools:
        if takes_part(tool, point, applied):
            routines += [one for one in _own(tool, point) if not one.closing]
    for tool in reversed(tools):
        closing = [one for one in _own(tool, point) if one.closing]
        if closing and takes_part(tool, point, applied):
            last = max(
                (i for i, one in enumerate(routines) if one.tool is tool or depends(one.tool, tool)),
                default=len(routines) - 1,
            )
            routines[last + 1 : last + 1] = closing
    return tuple(routines)


def takes_part(tool: AnyTool, point: InstrumentationPoint, applied: Sequence[AnyTool]) -> bool:
    """Return True if a tool's routines run at a point: always, unless it follows those that depend on it."""
    if not tool.follows_dependents:
        return True
    dependents = [one for one in applied if depends(one, tool) and not one.follows_dependents]
    return not dependents or any(any(_own(one, point)) for one in dependents)


def _own(tool: AnyTool, point: InstrumentationPoint) -> Iterator[Analysis]:
    return (one for one in tool._amanda.analyses if one.point is point)
