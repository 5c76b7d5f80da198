"""Instrumentation points, the six actions, and the marks that a routine may carry."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from amanda.plan.arguments import Parameters, parameters_of

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

Routine = Callable[..., Any]
RoutineT = TypeVar("RoutineT", bound=Routine)

_MARKS = "__amanda_marks__"


class InstrumentationPoint(enum.Enum):
    """A point of an op at which analysis routines run."""

    BEFORE_FORWARD_OP = "before_forward_op"
    AFTER_FORWARD_OP = "after_forward_op"
    BEFORE_BACKWARD_OP = "before_backward_op"
    AFTER_BACKWARD_OP = "after_backward_op"

    @classmethod
    def of(cls, backward: bool, require_outputs: bool) -> InstrumentationPoint:
        """The point that the arguments of `Tool.add_inst_for_op` name."""
        side, phase = ("after" if require_outputs else "before"), ("backward" if backward else "forward")
        return cls(f"{side}_{phase}_op")

    @property
    def is_backward(self) -> bool:
        """Return True if it lies in the backward pass."""
        return self in (self.BEFORE_BACKWARD_OP, self.AFTER_BACKWARD_OP)

    @property
    def is_after(self) -> bool:
        """Return True if the op has run there."""
        return self in (self.AFTER_FORWARD_OP, self.AFTER_BACKWARD_OP)


class ActionType(enum.Enum):
    """A kind of action; the value is the name of the method of `OpContext` that records it."""

    INSERT_BEFORE_OP = "insert_before_op"
    INSERT_AFTER_OP = "insert_after_op"
    INSERT_BEFORE_BACKWARD_OP = "insert_before_backward_op"
    INSERT_AFTER_BACKWARD_OP = "insert_after_backward_op"
    REPLACE_OP = "replace_op"
    REPLACE_BACKWARD_OP = "replace_backward_op"

    @property
    def is_backward(self) -> bool:
        """Return True if it concerns a backward op."""
        return "backward" in self.value

    @property
    def is_after(self) -> bool:
        """Return True if its routine runs after the op."""
        return "after" in self.value

    @property
    def is_replacement(self) -> bool:
        """Return True if its routine runs instead of the op."""
        return "replace" in self.value


NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
INSERT_BEFORE_OP = ActionType.INSERT_BEFORE_OP
REPLACE_OP = ActionType.REPLACE_OP


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """One instrumentation routine at one op.

    select: positions of the values that the routine is given; None for all of them.
    kwargs: what the tool injects into every call of the routine.
    reads: of a replacement in a graph, inputs of other ops that it is given: op ids and positions.
    takes_run: whether the routine has a parameter `run`, for what one execution hands on.
    takes_shapes: whether the routine, unless it replaces, has a keyword `shapes`, for those of one execution.
    takes_original: whether a replacement has a parameter `original`, for what computes the op.
    parameters: those of a replacement that the op's inputs may fill; None of one written in C.
    """

    type: ActionType
    func: Routine
    tool: AnyTool
    select: tuple[int, ...] | None
    kwargs: Mapping[str, Any]
    reads: tuple[tuple[int, int], ...] = ()

    differentiable: bool = field(init=False)
    traceable: bool = field(init=False)
    observer: bool = field(init=False)
    opening: bool = field(init=False)
    innermost: bool = field(init=False)
    takes_run: bool = field(init=False)
    takes_shapes: bool = field(init=False)
    takes_original: bool = field(init=False)
    parameters: Parameters | None = field(init=False)

    def __post_init__(self) -> None:
        carried = marks(self.func)
        for mark in ("differentiable", "traceable", "observer", "opening", "innermost"):
            object.__setattr__(self, mark, mark in carried)
        object.__setattr__(self, "takes_run", self._takes("run"))
        object.__setattr__(self, "takes_shapes", not self.type.is_replacement and self._takes("shapes"))
        object.__setattr__(self, "takes_original", self.type is REPLACE_OP and self._takes("original"))
        object.__setattr__(self, "parameters", self._parameters() if self.type is REPLACE_OP else None)

    def _parameters(self) -> Parameters | None:
        taken = [*self.kwargs, *(name for name in ("run", "original") if self._takes(name))]
        return parameters_of(self.func, [*taken, "reads"] if self.reads else taken)

    def _takes(self, name: str) -> bool:
        return name not in self.kwargs and has_parameter(self.func, name, alone=name == "shapes")

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
    if isinstance(function, FunctionType) and not function.__dict__.keys() & {"__wrapped__", "__signature__"}:
        # A tenth of what inspect takes; a tool may record thousands of actions.
        code = function.__code__
        start = code.co_argcount if alone else first
        return name in code.co_varnames[start : code.co_argcount + code.co_kwonlyargcount]
    try:
        found = inspect.signature(func).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return found is not None and (not alone or found.kind is found.KEYWORD_ONLY)


def marks(func: Routine) -> frozenset[str]:
    """Names of the decorators that a routine carries."""
    found: frozenset[str] = getattr(func, _MARKS, frozenset())
    return found


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


def differentiable(func: RoutineT) -> RoutineT:
    """Mark an instrumentation routine that takes part in the backward pass, and is free in shape.

    >>> @differentiable
    ... def scale(weight):
    ...     return weight * 2
    """
    return _marked(func, "differentiable")


def traceable(func: RoutineT) -> RoutineT:
    """Promise that a routine is pure tensor code, which a graph backend inlines as native ops."""
    return _marked(func, "traceable")


def observer(func: RoutineT) -> RoutineT:
    """Promise that a routine never changes a value, so that a driver may batch its calls."""
    return _marked(func, "observer")


def opening(func: RoutineT) -> RoutineT:
    """Mark a routine, given no value, that a graph calls once as each run of it begins, ahead of all ops."""
    return _marked(func, "opening")


def innermost(func: RoutineT) -> RoutineT:
    """Mark a routine that is next to the op: the last before it, or the first after it, of all tools.

    Among several such routines the order of tools decides, as ever.
    """
    return _marked(func, "innermost")


def in_turn(actions: Iterable[Action], after: bool) -> list[Action]:
    """Actions in the order of their tools, except that innermost ones are next to the op."""
    return sorted(actions, key=lambda action: action.innermost is not after)
