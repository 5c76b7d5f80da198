"""The order of tools: dependencies first, then as applied; and the order of their routines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from amanda.errors import DependencyCycleError
from amanda.plan.action import InstrumentationPoint

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool, RegisteredRoutine

ToolT = TypeVar("ToolT", bound="AnyTool")


def in_dependency_order(tools: Iterable[ToolT]) -> list[ToolT]:
    """Return the tools and all that they depend on, each once, dependencies first.

    Of interchangeable tools only the first is returned.
    Raises DependencyCycleError, which prints the cycle.
    """
    ordered: list[Any] = []
    path: list[AnyTool] = []

    def visit(tool: AnyTool) -> None:
        if any(interchangeable(tool, done) for done in ordered):
            return
        if any(tool is above for above in path):
            start = next(i for i, above in enumerate(path) if above is tool)
            cycle = [*path[start:], tool]
            names = [type(member).__name__ for member in cycle]
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


def interchangeable(tool: AnyTool, peer: AnyTool) -> bool:
    """Return True if both arguments are the same tool, or if either tool may stand for the other."""
    if tool is peer:
        return True
    name, state, peer_state = tool.stands_for(), tool._amanda, peer._amanda
    if name is None or name != peer.stands_for() or len(state.analyses) != len(peer_state.analyses):
        return False
    return not (state.admissions or state.wrappers or peer_state.admissions or peer_state.wrappers)


def depends_on(tool: AnyTool, dependency: AnyTool) -> bool:
    """Return True if `tool` depends on `dependency`, directly or through other tools."""
    return any(
        interchangeable(direct, dependency) or depends_on(direct, dependency)
        for direct in tool._amanda.dependencies
    )


def routines_at(
    point: InstrumentationPoint, tools: Sequence[AnyTool], applied: Sequence[AnyTool]
) -> tuple[RegisteredRoutine, ...]:
    """Return the analysis routines of `tools` at a point, in running order.

    Closing routines of a tool run after the routines of the last tool that depends on the tool.
    applied: `tools` and the tools of the scopes around, which may depend on each other.
    """
    routines: list[RegisteredRoutine] = []
    for tool in tools:
        if takes_part(tool, point, applied):
            routines += [routine for routine in _routines_of(tool, point) if not routine.closing]
    for tool in reversed(tools):
        closing = [routine for routine in _routines_of(tool, point) if routine.closing]
        if closing and takes_part(tool, point, applied):
            last = max(
                (
                    i
                    for i, routine in enumerate(routines)
                    if routine.tool is tool or depends_on(routine.tool, tool)
                ),
                default=len(routines) - 1,
            )
            routines[last + 1 : last + 1] = closing
    return tuple(routines)


def takes_part(tool: AnyTool, point: InstrumentationPoint, applied: Sequence[AnyTool]) -> bool:
    """Return True if a tool's routines run at a point: always, unless it follows those that depend on it."""
    if not tool.follows_dependents:
        return True
    dependents = [
        dependent for dependent in applied if depends_on(dependent, tool) and not dependent.follows_dependents
    ]
    return not dependents or any(any(_routines_of(dependent, point)) for dependent in dependents)


def _routines_of(tool: AnyTool, point: InstrumentationPoint) -> Iterator[RegisteredRoutine]:
    return (routine for routine in tool._amanda.analyses if routine.point is point)
