"""Tools and plugins as the core sees them: analysis routines, their order, and the core's state of a tool."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from amanda import interceptor
from amanda.errors import DependencyCycleError
from amanda.namespace import Namespace
from amanda.options import Where
from amanda.plan.action import Action, ActionType, InstrumentationPoint, Routine

if TYPE_CHECKING:
    from amanda.plan.context import OpContext

AnalysisRoutine: TypeAlias = Annotated[
    Callable[["OpContext"], None], Where("the routine without calling it: add_inst_for_op(self.analyse)")
]
Admission = Callable[["OpContext"], bool]
Wrapper = Callable[["OpContext", ActionType, Routine], Routine | None]
Guard = Literal["shape", "read"] | Callable[[Sequence[Any]], Hashable] | None


class AnyTool(Protocol):
    """A tool, as `amanda.Tool` describes it."""

    follows_dependents: bool
    intercepts: bool
    _amanda: ToolState

    def stands_for(self) -> Hashable:
        """Return a name that interchangeable tools share; None where no other tool may stand for this one."""

    def unmatched(self) -> list[str]:
        """Return a sentence for each selection that no op has matched."""

    def scope_entered(self) -> None:
        """Called when a scope has opened."""

    def scope_left(self) -> None:
        """Called when a scope has closed."""

    def op_gone(self, op_id: int) -> None:
        """Called once an op cannot execute again."""

    def refused(self, action: Action, reason: str) -> None:
        """Called when a routine cannot run at its op."""


def is_tool(value: object) -> bool:
    """Return True for an instance of `amanda.Tool`."""
    # By the state and not by the class, which this room cannot import: `amanda.tool` is above it.
    return isinstance(getattr(value, "_amanda", None), ToolState) and not isinstance(value, type)


class InNamespace:
    """Restriction of a tool to the ops of a namespace; it remembers whether any op was of it."""

    def __init__(self, tags: str) -> None:
        self._namespace = Namespace(tags.removeprefix("amanda/"))
        self._other_namespaces: dict[str, None] = {}  # an ordered set of those that ops had
        self._has_matched = False

    def __call__(self, context: OpContext) -> bool:
        """Return True for an op of the namespace."""
        if context.namespace.matches(self._namespace):
            self._has_matched = True
            return True
        self._other_namespaces[str(context.namespace)] = None
        return False

    def unmatched(self) -> list[str]:
        """Return a list with a sentence if there were ops, but none in the namespace; else an empty list."""
        if self._has_matched or not self._other_namespaces:
            return []
        others = ", ".join(self._other_namespaces)
        return [f"no op is of the namespace {self._namespace}; there were ops of {others}"]


class RegisteredRoutine(NamedTuple):
    """One analysis routine of a tool.

    guard: what distinguishes plans of one op beside the signature of the inputs; None for nothing more.
    closing: whether the routine runs after the routines of all tools that depend on its tool.
    """

    tool: AnyTool
    callback: AnalysisRoutine
    point: InstrumentationPoint
    guard: Guard
    closing: bool


class ToolState:
    """The core's state of a tool: created with the tool, even if its `__init__` never calls the base's."""

    _numbers = count(1)

    def __init__(self) -> None:
        # Part of the key of stacks instead of `id`, which another tool may have once this one is dead.
        self.number = next(self._numbers)
        self.analyses: list[RegisteredRoutine] = []
        self.dependencies: list[AnyTool] = []
        self.admissions: list[Admission] = []
        self.wrappers: list[Wrapper] = []
        self.version = 0
        self.lock = interceptor.Lock()
        # With the tool, so that plans end with it.
        self.stacks: OrderedDict[Hashable, Any] = OrderedDict()
        self.state: dict[str, Any] = {}  # of `Tool.keep`: values, and the numbers of their keys
        self.loaded: dict[str, Any] = {}  # given to `load_state_dict`, and used by no op yet
        self.former_parameters: dict[str, Any] = {}  # before `load_state_dict`; an optimizer may hold them
        self.names_loaded: list[str] = []  # a loaded state that lacks one of these is an error
        self.analysed_ops: set[int] = set()  # ids; `op_gone` is called for each that dies
        self.dead_ops: deque[int] = deque()  # ids; `op_gone` is called for these before the next analysis
        self.options_read: tuple[str, ...] = ()  # names of options that the analysis routines read
        self.options_read_version = -1  # version of the tool for which these were found
        self.options: dict[str, str] | None = None  # when a scope opened last
        self.logged: set[str] = set()  # selections that no op has matched
        self.was_used = False  # True once a scope with the tool has opened

    def note_dead_op(self, op_id: int) -> None:
        """Record that an op is dead, if the tool has analysed it.

        The tool's `op_gone` is called later, under the tool's lock: an object may die at any line of code.
        """
        if op_id in self.analysed_ops:
            self.analysed_ops.discard(op_id)
            self.dead_ops.append(op_id)

    def __getstate__(self) -> dict[str, Any]:
        # Plans, locks and numbers belong to this process; a copy starts without them.
        pickled = ("analyses", "dependencies", "admissions", "wrappers", "state", "loaded", "names_loaded")
        return {name: getattr(self, name) for name in pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ToolState.__init__(self)
        self.__dict__.update(state)


ToolT = TypeVar("ToolT", bound="AnyTool")


def in_dependency_order(tools: Iterable[ToolT]) -> list[ToolT]:
    """Return the tools and all that they depend on, each once, dependencies first.

    Of interchangeable tools only the first is returned.
    Raises DependencyCycleError, which prints the cycle.
    """
    ordered: list[Any] = []
    path: list[AnyTool] = []

    def visit(tool: AnyTool) -> None:
        """Append a tool behind its dependencies, unless an interchangeable tool is there already.

        Raises DependencyCycleError for a tool on the path to it.
        """
        if any(interchangeable(tool, ordered_tool) for ordered_tool in ordered):
            return
        if any(tool is dependent for dependent in path):
            start = next(i for i, dependent in enumerate(path) if dependent is tool)
            cycle = " -> ".join(type(member).__name__ for member in [*path[start:], tool])
            raise DependencyCycleError(
                f"tools depend on each other in a circle: {cycle}; drop one depends_on"
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
    """Return True if both arguments are the same tool, or if either tool may stand for the other.

    Tools stand for each other if they have the same name in `stands_for`, as many routines, and neither
    restrictions nor wrappers.
    """
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
    # In reverse, so that of two tools with closing routines the dependency closes last.
    for tool in reversed(tools):
        closing_routines = [routine for routine in _routines_of(tool, point) if routine.closing]
        if closing_routines and takes_part(tool, point, applied):
            indices_of_dependents = [
                i
                for i, routine in enumerate(routines)
                if routine.tool is tool or depends_on(routine.tool, tool)
            ]
            end = indices_of_dependents[-1] + 1 if indices_of_dependents else len(routines)
            routines = [*routines[:end], *closing_routines, *routines[end:]]
    return tuple(routines)


def takes_part(tool: AnyTool, point: InstrumentationPoint, applied: Sequence[AnyTool]) -> bool:
    """Return True if a tool's routines run at a point.

    False only for a tool with `follows_dependents` of whose dependents among `applied` none has a routine at
    the point; dependents that themselves follow others do not count.
    """
    if not tool.follows_dependents:
        return True
    dependents = [
        dependent for dependent in applied if depends_on(dependent, tool) and not dependent.follows_dependents
    ]
    # A tool that nobody depends on was applied for itself.
    return not dependents or any(_routines_of(dependent, point) for dependent in dependents)


def _routines_of(tool: AnyTool, point: InstrumentationPoint) -> list[RegisteredRoutine]:
    return [routine for routine in tool._amanda.analyses if routine.point is point]


def _without_plugins(hook: str, **arguments: Any) -> None:
    pass


# `plugins` imports this room, so this room cannot import `plugins`: it is given the function.
class HookCaller:
    """Caller of plugins' hooks.

    call: calls all implementations of the hook with this name, with the arguments.
    """

    call: Callable[..., None] = staticmethod(_without_plugins)


hooks = HookCaller()
