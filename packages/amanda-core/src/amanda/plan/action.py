"""Instrumentation points, the six actions, and the marks that a routine may carry."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import wraps
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from amanda import interceptor
from amanda.errors import RoutineError
from amanda.options import checked
from amanda.plan.arguments import RoutineParameters, parameters_of
from amanda.plan.gathered import gathered_form

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

Routine = Callable[..., Any]
RoutineT = TypeVar("RoutineT", bound=Routine)

_MARKS = "__amanda_marks__"


class InstrumentationPoint(enum.Enum):
    """A point of an op at which analysis routines run.

    is_backward: whether the point is in the backward pass.
    is_after: whether the point comes after the op.
    """

    BEFORE_FORWARD_OP = "before_forward_op"
    AFTER_FORWARD_OP = "after_forward_op"
    BEFORE_BACKWARD_OP = "before_backward_op"
    AFTER_BACKWARD_OP = "after_backward_op"

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.is_backward = "backward" in name
        self.is_after = "after" in name

    @classmethod
    def of(cls, backward: bool, require_outputs: bool) -> InstrumentationPoint:
        """Return the point that the arguments of `Tool.add_inst_for_op` name."""
        side, phase = ("after" if require_outputs else "before"), ("backward" if backward else "forward")
        return cls(f"{side}_{phase}_op")


class ActionType(enum.Enum):
    """A kind of action; the value is the name of the method of `OpContext` that records it.

    is_backward: whether the action is at a backward op.
    is_after, is_replacement: whether the routine runs after the op, or instead of the op.
    """

    INSERT_BEFORE_OP = "insert_before_op"
    INSERT_AFTER_OP = "insert_after_op"
    INSERT_BEFORE_BACKWARD_OP = "insert_before_backward_op"
    INSERT_AFTER_BACKWARD_OP = "insert_after_backward_op"
    REPLACE_OP = "replace_op"
    REPLACE_BACKWARD_OP = "replace_backward_op"

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.is_backward = "backward" in name
        self.is_after = "after" in name
        self.is_replacement = "replace" in name


NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
INSERT_BEFORE_OP = ActionType.INSERT_BEFORE_OP
REPLACE_OP = ActionType.REPLACE_OP


class Action:
    """One instrumentation routine at one op.

    select: positions of the values that the routine receives; None for all values.
    kwargs: keyword arguments from the tool, passed in every call of the routine.
    reads: for a replacement in a graph, inputs of other ops that it receives: op ids and positions.
    gathered: routine that takes many executions in one call; None where there is none.
    takes_run: whether the routine has a parameter `run`, the dict that routines of one execution share.
    takes_shapes: whether the routine has a keyword `shapes`; False for a replacement.
    takes_recomputed: whether the routine has a parameter `recomputed`, True in a recomputation.
    takes_original: whether a replacement has a parameter `original`, a function that computes the op.
    parameters: a replacement's parameters that inputs of the op may fill; None for a routine written in C.
    """

    __slots__ = (
        "differentiable", "func", "gathered", "innermost", "kwargs", "observer", "opening", "parameters",
        "reads", "select", "takes_original", "takes_recomputed", "takes_run", "takes_shapes", "tool",
        "traceable", "type",
    )  # fmt: skip

    # No dataclass, since tools record thousands of actions: to create a frozen one takes twice as long.
    def __init__(
        self,
        type: ActionType,
        func: Routine,
        tool: AnyTool,
        select: tuple[int, ...] | None,
        kwargs: Mapping[str, Any],
        reads: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.type = type
        self.func = func
        self.tool = tool
        self.select = select
        self.kwargs = kwargs
        self.reads = reads
        mark_names = marks(func)
        self.differentiable = "differentiable" in mark_names
        self.traceable = "traceable" in mark_names
        self.observer = "observer" in mark_names
        self.gathered = gathered_form(func) if self.observer else None
        self.opening = "opening" in mark_names
        self.innermost = "innermost" in mark_names
        self.takes_run = self._takes("run")
        self.takes_recomputed = not isinstance(func, interceptor.ShapeCounter) and self._takes("recomputed")
        if self.takes_recomputed:
            self.kwargs = {**kwargs, "recomputed": False}
        self.takes_shapes = not type.is_replacement and self._takes("shapes")
        self.takes_original = type is REPLACE_OP and self._takes("original")
        self.parameters = self._parameters() if type is REPLACE_OP else None

    def _parameters(self) -> RoutineParameters | None:
        bound_names = [*self.kwargs, *(name for name in ("run", "original") if self._takes(name))]
        return parameters_of(self.func, [*bound_names, "reads"] if self.reads else bound_names)

    def _takes(self, name: str) -> bool:
        return name not in self.kwargs and has_parameter(self.func, name, keyword_only=name == "shapes")

    def in_recomputation(self) -> Action | None:
        """Return the action for a recomputation of the op; None where its routine is not called.

        Observers were called in the first execution; those with a parameter `recomputed` are called again.
        A `Tally` counts recomputations in its attribute `recomputed`, if it has one.
        """
        if isinstance(self.func, interceptor.ShapeCounter):
            recomputed_tally = getattr(self.func, "recomputed", None)
            return None if recomputed_tally is None else self._with_routine(recomputed_tally, self.kwargs)
        if self.takes_recomputed:
            return self._with_routine(self.func, {**self.kwargs, "recomputed": True})
        return None if self.observer or self.opening else self

    def _with_routine(self, func: Routine, kwargs: Mapping[str, Any]) -> Action:
        action = copy(self)
        action.func, action.kwargs = func, kwargs
        return action

    def __str__(self) -> str:
        return f"{self.type.value}({getattr(self.func, '__qualname__', self.func)})"


def has_run(func: Routine) -> bool:
    """Return True if a routine has a parameter `run`."""
    return has_parameter(func, "run")


def has_parameter(func: Routine, name: str, keyword_only: bool = False) -> bool:
    """Return True if a routine has a parameter of this name.

    keyword_only: whether the parameter has to be keyword-only.
    """
    function, first = (func.__func__, 1) if isinstance(func, MethodType) else (func, 0)
    if isinstance(func, interceptor.ShapeCounter):
        function, first = type(func).__call__, 1
    if isinstance(function, FunctionType) and not _has_other_signature(function.__dict__):
        # Takes a tenth of the time of `inspect`; a tool may record thousands of actions.
        code = function.__code__
        start, end = code.co_argcount if keyword_only else first, code.co_argcount + code.co_kwonlyargcount
        return end > start and name in code.co_varnames[start:end]
    try:
        parameter = inspect.signature(func).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and (not keyword_only or parameter.kind is parameter.KEYWORD_ONLY)


def _has_other_signature(attributes: Mapping[str, Any]) -> bool:
    return bool(attributes) and ("__wrapped__" in attributes or "__signature__" in attributes)


def marks(func: Routine) -> frozenset[str]:
    """Return the names of the decorators that a routine carries."""
    function = func.__func__ if isinstance(func, MethodType) else func
    if isinstance(function, FunctionType):
        # Most functions have no marks, and `getattr` would create an AttributeError for each of these.
        mark_names: frozenset[str] = function.__dict__.get(_MARKS, _UNMARKED)
    else:
        mark_names = getattr(func, _MARKS, _UNMARKED)
    return mark_names


_UNMARKED: frozenset[str] = frozenset()


def _add_mark(func: RoutineT, mark: str) -> RoutineT:
    """Return the routine with a mark; wraps a routine, such as a builtin, that takes no attributes."""
    mark_names = marks(func) | {mark}
    try:
        setattr(func, _MARKS, mark_names)
    except (AttributeError, TypeError):

        @wraps(func)
        def routine(*values: Any, **kwargs: Any) -> Any:
            return func(*values, **kwargs)

        setattr(routine, _MARKS, mark_names)
        return routine  # type: ignore[return-value]
    return func


@checked(error=RoutineError)
def differentiable(func: RoutineT) -> RoutineT:
    """Mark an instrumentation routine that takes part in the backward pass, and is free in shape.

    >>> @differentiable
    ... def scale(weight):
    ...     return weight * 2
    """
    return _add_mark(func, "differentiable")


@checked(error=RoutineError)
def traceable(func: RoutineT) -> RoutineT:
    """Promise that a routine is pure tensor code, which a graph backend inlines as native ops."""
    return _add_mark(func, "traceable")


@checked(error=RoutineError)
def observer(func: RoutineT) -> RoutineT:
    """Promise that a routine never changes a value, so that a driver may batch its calls."""
    return _add_mark(func, "observer")


def opening(func: RoutineT) -> RoutineT:
    """Mark a routine without values that a graph calls once at the start of each run, ahead of all ops."""
    return _add_mark(func, "opening")


@checked(error=RoutineError)
def innermost(func: RoutineT) -> RoutineT:
    """Mark a routine that is next to the op: the last before it, or the first after it, of all tools.

    Among several such routines the order of tools decides, as ever.
    """
    return _add_mark(func, "innermost")


def in_running_order(actions: Iterable[Action], after: bool) -> list[Action]:
    """Return the actions in the order of their tools, except that innermost ones are next to the op."""
    ordered = list(actions)
    if len(ordered) > 1:
        ordered.sort(key=lambda action: action.innermost is not after)
    return ordered
