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
from amanda.plan.arguments import Parameters, parameters_of
from amanda.plan.gathered import gathered_form

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

Routine = Callable[..., Any]
RoutineT = TypeVar("RoutineT", bound=Routine)

_MARKS = "__amanda_marks__"


class InstrumentationPoint(enum.Enum):
    """A point of an op at which analysis routines run.

    is_backward: whether it lies in the backward pass.
    is_after: whether the op has run there.
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

    is_backward: whether it concerns a backward op.
    is_after, is_replacement: whether its routine runs after the op, or instead of the op.
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

    select: positions of the values that the routine is given; None for all of them.
    kwargs: what the tool injects into every call of the routine.
    reads: of a replacement in a graph, inputs of other ops that it is given: op ids and positions.
    gathered: takes many executions of the routine in one call; None where nothing does.
    takes_run: whether the routine has a parameter `run`, for what one execution hands on.
    takes_shapes: whether the routine, unless it replaces, has a keyword `shapes`, for those of one execution.
    takes_recomputed: whether the routine has a parameter `recomputed`, True in a recomputation.
    takes_original: whether a replacement has a parameter `original`, for what computes the op.
    parameters: those of a replacement that the op's inputs may fill; None of one written in C.
    """

    __slots__ = (
        "differentiable", "func", "gathered", "innermost", "kwargs", "observer", "opening", "parameters",
        "reads", "select", "takes_original", "takes_recomputed", "takes_run", "takes_shapes", "tool",
        "traceable", "type",
    )  # fmt: skip

    # Recorded by the thousand, so this is no dataclass: a frozen one takes twice as long to make.
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
        carried = marks(func)
        self.differentiable = "differentiable" in carried
        self.traceable = "traceable" in carried
        self.observer = "observer" in carried
        self.gathered = gathered_form(func) if self.observer else None
        self.opening = "opening" in carried
        self.innermost = "innermost" in carried
        self.takes_run = self._takes("run")
        self.takes_recomputed = not isinstance(func, interceptor.Tally) and self._takes("recomputed")
        if self.takes_recomputed:
            self.kwargs = {**kwargs, "recomputed": False}
        self.takes_shapes = not type.is_replacement and self._takes("shapes")
        self.takes_original = type is REPLACE_OP and self._takes("original")
        self.parameters = self._parameters() if type is REPLACE_OP else None

    def _parameters(self) -> Parameters | None:
        taken = [*self.kwargs, *(name for name in ("run", "original") if self._takes(name))]
        return parameters_of(self.func, [*taken, "reads"] if self.reads else taken)

    def _takes(self, name: str) -> bool:
        return name not in self.kwargs and has_parameter(self.func, name, alone=name == "shapes")

    def in_recomputation(self) -> Action | None:
        """Return the action for a recomputation of the op; None where its routine is not called.

        Observers have heard of the execution, unless they ask for it by a parameter `recomputed`.
        A `Tally` counts in its attribute `recomputed`, if it has one.
        """
        if isinstance(self.func, interceptor.Tally):
            other = getattr(self.func, "recomputed", None)
            return None if other is None else self._with(other, self.kwargs)
        if self.takes_recomputed:
            return self._with(self.func, {**self.kwargs, "recomputed": True})
        return None if self.observer or self.opening else self

    def _with(self, func: Routine, kwargs: Mapping[str, Any]) -> Action:
        action = copy(self)
        action.func, action.kwargs = func, kwargs
        return action

    def __str__(self) -> str:
        return f"{self.type.value}({getattr(self.func, '__qualname__', self.func)})"


def has_run(func: Routine) -> bool:
    """Return True if a routine has a parameter `run`."""
    return has_parameter(func, "run")


def has_parameter(func: Routine, name: str, alone: bool = False) -> bool:
    """Return True if a routine has a parameter of this name.

    alone: whether it has to be one that only a keyword fills.
    """
    function, first = (func.__func__, 1) if isinstance(func, MethodType) else (func, 0)
    if isinstance(func, interceptor.Tally):
        function, first = type(func).__call__, 1
    if isinstance(function, FunctionType) and not _is_described_elsewhere(function.__dict__):
        # A tenth of what inspect takes; a tool may record thousands of actions.
        code = function.__code__
        start, end = code.co_argcount if alone else first, code.co_argcount + code.co_kwonlyargcount
        return end > start and name in code.co_varnames[start:end]
    try:
        found = inspect.signature(func).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return found is not None and (not alone or found.kind is found.KEYWORD_ONLY)


def _is_described_elsewhere(attributes: Mapping[str, Any]) -> bool:
    return bool(attributes) and ("__wrapped__" in attributes or "__signature__" in attributes)


def marks(func: Routine) -> frozenset[str]:
    """Return the names of the decorators that a routine carries."""
    function = func.__func__ if isinstance(func, MethodType) else func
    if isinstance(function, FunctionType):  # `getattr` would make an AttributeError for most
        carried: frozenset[str] = function.__dict__.get(_MARKS, _UNMARKED)
    else:
        carried = getattr(func, _MARKS, _UNMARKED)
    return carried


_UNMARKED: frozenset[str] = frozenset()


def _marked(func: RoutineT, mark: str) -> RoutineT:
    carried = marks(func) | {mark}
    try:
        setattr(func, _MARKS, carried)
    except (AttributeError, TypeError):

        @wraps(func)
        def routine(*values: Any, **kwargs: Any) -> Any:
            return func(*values, **kwargs)

        setattr(routine, _MARKS, carried)
        return routine  # type: ignore[return-value]
    return func


@checked(error=RoutineError)
def differentiable(func: RoutineT) -> RoutineT:
    """Mark an instrumentation routine that takes part in the backward pass, and is free in shape.

    >>> @differentiable
    ... def scale(weight):
    ...     return weight * 2
    """
    return _marked(func, "differentiable")


@checked(error=RoutineError)
def traceable(func: RoutineT) -> RoutineT:
    """Promise that a routine is pure tensor code, which a graph backend inlines as native ops."""
    return _marked(func, "traceable")


@checked(error=RoutineError)
def observer(func: RoutineT) -> RoutineT:
    """Promise that a routine never changes a value, so that a driver may batch its calls."""
    return _marked(func, "observer")


def opening(func: RoutineT) -> RoutineT:
    """Mark a routine, given no value, that a graph calls once as each run of it begins, ahead of all ops."""
    return _marked(func, "opening")


@checked(error=RoutineError)
def innermost(func: RoutineT) -> RoutineT:
    """Mark a routine that is next to the op: the last before it, or the first after it, of all tools.

    Among several such routines the order of tools decides, as ever.
    """
    return _marked(func, "innermost")


def in_turn(actions: Iterable[Action], after: bool) -> list[Action]:
    """Actions in the order of their tools, except that innermost ones are next to the op."""
    ordered = list(actions)
    if len(ordered) > 1:
        ordered.sort(key=lambda action: action.innermost is not after)
    return ordered
