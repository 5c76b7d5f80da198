"""Tools as the core sees them: their analysis routines, and what is kept for them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

from amanda import interceptor
from amanda.namespace import Namespace
from amanda.options import Where
from amanda.plan.action import Action, ActionType, InstrumentationPoint, Routine
from amanda.plan.context import OpContext

AnalysisRoutine: TypeAlias = Annotated[
    Callable[[OpContext], None], Where("the routine without calling it: add_inst_for_op(self.analyse)")
]
Admission = Callable[[OpContext], bool]
Wrapper = Callable[[OpContext, ActionType, Routine], Routine | None]
Guard = Literal["shape", "read"] | Callable[[Sequence[Any]], Hashable] | None


class AnyTool(Protocol):
    """A tool, as `amanda.Tool` describes it."""

    follows_dependents: bool
    intercepts: bool
    _amanda: Registry

    def stands_for(self) -> Hashable:
        """Name the tools of which any one may stand for all."""

    def unmatched(self) -> list[str]:
        """Say what was selected and no op fitted."""

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
    return isinstance(getattr(value, "_amanda", None), Registry) and not isinstance(value, type)


class InNamespace:
    """Restriction of a tool to the ops of a namespace."""

    def __init__(self, tags: str) -> None:
        self._tags = Namespace(tags.removeprefix("amanda/"))
        self._others: dict[str, None] = {}
        self._matched = False

    def __call__(self, context: OpContext) -> bool:
        """Return True for an op of the namespace."""
        if context.namespace.matches(self._tags):
            self._matched = True
            return True
        self._others[str(context.namespace)] = None
        return False

    def unmatched(self) -> list[str]:
        """Return a sentence if there were ops, and none of the namespace."""
        if self._matched or not self._others:
            return []
        return [f"no op is of the namespace {self._tags}; there were ops of {', '.join(self._others)}"]


class Analysis(NamedTuple):
    """One analysis routine of a tool."""

    tool: AnyTool
    callback: AnalysisRoutine
    point: InstrumentationPoint
    guard: Guard
    closing: bool


class Registry:
    """State of a tool that the framework keeps: made with the tool, whatever its `__init__` does."""

    _numbers = count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.analyses: list[Analysis] = []
        self.dependencies: list[AnyTool] = []
        self.admissions: list[Admission] = []
        self.wrappers: list[Wrapper] = []
        self.version = 0
        self.lock = interceptor.Lock()
        self.layers: OrderedDict[Hashable, Any] = OrderedDict()
        self.state: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}
        self.former: dict[str, Any] = {}
        self.names_loaded: list[str] = []  # where what these lack is an error
        self.analysed: set[int] = set()  # the ops that `op_gone` will tell of
        self.gone: deque[int] = deque()  # those that it tells of before the next analysis
        self.options_read: tuple[int, tuple[str, ...]] = (-1, ())  # of which version
        self.options: dict[str, str] | None = None  # those when a scope opened last
        self.logged: set[str] = set()  # selections that fitted no op
        self.was_used = False  # in a scope

    def on_death(self, op_id: int) -> None:
        """Note that an op is gone; the tool is told later, since an object may die anywhere."""
        if op_id in self.analysed:
            self.analysed.discard(op_id)
            self.gone.append(op_id)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("analyses", "dependencies", "admissions", "wrappers", "state", "loaded", "names_loaded")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Registry.__init__(self)
        self.__dict__.update(state)
