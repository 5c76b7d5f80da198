"""Instrumentation points, the six actions, the marks of a routine, and the arguments that it takes."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from amanda import interceptor
from amanda.errors import RoutineError
from amanda.options import checked
from amanda.plan.observers import gathering_routine

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

Routine = Callable[..., Any]
RoutineT = TypeVar("RoutineT", bound=Routine)

# An attribute and not a wrapper: a marked routine stays the object that the tool's author wrote, so that
# methods are still bound and `inspect` sees their signature.
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
        """Return the point at which an analysis routine runs.

        Args:
            backward: As in `Tool.add_inst_for_op`.
            require_outputs: As in `Tool.add_inst_for_op`.
        """
        side, phase = ("after" if require_outputs else "before"), ("backward" if backward else "forward")
        return cls(f"{side}_{phase}_op")


# Looked up at every analysis: the hash of an enum member is computed in Python from its name, that of an
# object is its address.
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


# Shared by all actions without keyword arguments, so nothing may be added to it.
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
# Native code does not call these: they would not see a parameter `recomputed`.
_WITH_RECOMPUTED = (
    interceptor.ShapeCounter, interceptor.ClockObserver, interceptor.RepeatObserver,
    interceptor.StorageObserver,
)  # fmt: skip
INSERT_BEFORE_OP = ActionType.INSERT_BEFORE_OP
REPLACE_OP = ActionType.REPLACE_OP


class Action:
    """One instrumentation routine at one op.

    differentiable, traceable, observer, opening, innermost: whether the routine has the mark of this name.
    gathered: routine that takes many executions in one call; None where there is none.
    takes_run: whether the routine has a parameter `run`, the dict that routines of one execution share.
    takes_shapes: whether the routine has a keyword `shapes`; False for a replacement.
    takes_recomputed: whether the routine has a parameter `recomputed`, True in a recomputation.
    takes_original: whether a replacement has a parameter `original`, a function that computes the op.
    parameters: a replacement's parameters that inputs of the op may fill; None for a routine written in C.

    Args:
        type: Kind of the action.
        func: The routine.
        tool: Tool that records the action.
        select: Positions of the values that the routine receives; None for all values.
        kwargs: Keyword arguments from the tool, passed in every call of the routine.
        reads: For a replacement in a graph, inputs of other ops that it receives: op ids and positions.
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
        self.gathered = gathering_routine(func) if self.observer else None
        self.opening = "opening" in mark_names
        self.innermost = "innermost" in mark_names
        names, keyword_only_names = _parameter_names(func)
        self.takes_run = "run" in names and "run" not in kwargs
        # Objects that native code serves have an attribute of that name, and no parameter.
        self.takes_recomputed = (
            "recomputed" in names and "recomputed" not in kwargs and not isinstance(func, _WITH_RECOMPUTED)
        )
        if self.takes_recomputed:
            self.kwargs = {**kwargs, "recomputed": False}
        # A replacement computes the op from its values, which have their shapes.
        self.takes_shapes = (
            "shapes" in keyword_only_names and "shapes" not in kwargs and not type.is_replacement
        )
        self.takes_original = type is REPLACE_OP and self._takes("original")
        self.parameters = self._free_parameters() if type is REPLACE_OP else None

    def _free_parameters(self) -> RoutineParameters | None:
        bound_names = [*self.kwargs, *(name for name in ("run", "original") if self._takes(name))]
        return parameters_of(self.func, [*bound_names, "reads"] if self.reads else bound_names)

    def _takes(self, name: str) -> bool:
        return name not in self.kwargs and has_parameter(self.func, name, keyword_only=name == "shapes")

    def for_recomputation(self) -> Action | None:
        """Return the action for a recomputation of the op; None where its routine is not called.

        Observers were called in the first execution; those with a parameter `recomputed` are called again.
        The attribute `recomputed` of an object that native code serves, if there is one, sees recomputations.
        """
        if isinstance(self.func, _WITH_RECOMPUTED):
            routine = getattr(self.func, "recomputed", None)
            return None if routine is None else self._with_routine(routine, self.kwargs)
        if self.takes_recomputed:
            return self._with_routine(self.func, {**self.kwargs, "recomputed": True})
        # A checkpoint runs the same execution again: who counts or records would see it twice.  A routine
        # that changes a value has to change it again, since the backward pass reads what the recomputation
        # computes.
        return None if self.observer or self.opening else self

    def _with_routine(self, func: Routine, kwargs: Mapping[str, Any]) -> Action:
        action = copy(self)
        action.func, action.kwargs = func, kwargs
        return action

    def __str__(self) -> str:
        return f"{self.type.value}({routine_name(self.func)})"


def routine_name(routine: Any) -> str:
    """Return the name of a routine for messages, with file and line: "Count.see at count.py:12".

    Functions within functions have their own name alone.  Routines of Amanda's tools have no line, nor have
    those without code in Python.
    """
    while isinstance(routine, partial):
        routine = routine.func
    function = inspect.unwrap(getattr(routine, "__func__", routine))
    qualified_name = getattr(function, "__qualname__", None)
    if qualified_name is None:
        return f"{type(routine).__name__} object"
    # "<lambda>.<locals>.<lambda>" says nothing of which of the lambdas it is.
    name = str(qualified_name).rpartition("<locals>.")[2].replace("<lambda>", "lambda")
    code = getattr(function, "__code__", None)
    if code is None or str(getattr(function, "__module__", "")).startswith("amanda."):
        return name
    return f"{name} at {code.co_filename}:{code.co_firstlineno}"


def has_run(func: Routine) -> bool:
    """Return True if a routine has a parameter `run`."""
    return has_parameter(func, "run")


def has_parameter(func: Routine, name: str, keyword_only: bool = False) -> bool:
    """Return True if a routine has a parameter of this name; False where its signature is unknown, as in C.

    Args:
        func: The routine.
        name: Name of the parameter.
        keyword_only: Whether the parameter has to be keyword-only.
    """
    names, keyword_only_names = _parameter_names(func)
    return name in (keyword_only_names if keyword_only else names)


def _parameter_names(func: Routine) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of a routine's parameters, and those of the keyword-only ones.

    Both are empty where the signature is unknown, as in C.
    """
    if isinstance(func, interceptor.ClockObserver):
        return (), ()  # it takes no values
    # The first argument of a bound method is `self`, which no caller passes.
    function, first_index = (func.__func__, 1) if isinstance(func, MethodType) else (func, 0)
    if not isinstance(function, (FunctionType, type)) and not _has_other_signature(func):
        # Observers and tallies are objects whose class has a `__call__` in Python.
        function, first_index = type(func).__call__, 1
    if isinstance(function, FunctionType) and not _has_other_signature(function):
        # Takes a tenth of the time of `inspect`; a tool may record thousands of actions.
        code = function.__code__
        # `co_varnames`, a new tuple each time, has the positional parameters first, then keyword-only ones.
        parameter_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return parameter_names[first_index:], parameter_names[code.co_argcount :]
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):
        return (), ()
    keyword_only = [
        name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return tuple(parameters), keyword_only


def _has_other_signature(func: Routine) -> bool:
    # `functools.wraps` and `__signature__` say that the code object is not what a caller sees.
    if isinstance(func, FunctionType):  # most functions have no attributes, and `hasattr` takes longer
        attributes = func.__dict__
        return bool(attributes) and ("__wrapped__" in attributes or "__signature__" in attributes)
    return hasattr(func, "__wrapped__") or hasattr(func, "__signature__")


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


def with_marks(func: RoutineT, mark_names: Iterable[str]) -> RoutineT:
    """Add marks to a routine, such as those of a routine that it wraps.

    Returns the routine itself, or a wrapper of a routine that takes no attributes.

    Args:
        func: The routine.
        mark_names: Names of decorators, as `marks` returns them.
    """
    for mark in mark_names:
        func = _add_mark(func, mark)
    return func


def _add_mark(func: RoutineT, mark: str) -> RoutineT:
    """Add a mark to a routine and return it; return a wrapper of a builtin, which takes no attributes."""
    mark_names = marks(func) | {mark}
    try:
        setattr(func, _MARKS, mark_names)
    # Builtins, and objects with `__slots__`, take no attributes.
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


def all_samples(func: RoutineT) -> RoutineT:
    """Mark an observer that reads values within a function transform as tensors outside of the transform.

    A value under a vmap comes with the samples of all batches, whose axes are the first.  The observer has a
    keyword `batches`, () by default: the number of these axes of each value, where any value has them;
    elements of lists and tuples count as values.
    """
    return _add_mark(func, "all_samples")


@checked(error=RoutineError)
def innermost(func: RoutineT) -> RoutineT:
    """Mark a routine that is next to the op: the last before it, or the first after it, of all tools.

    Among several such routines the order of tools decides, as ever.
    """
    return _add_mark(func, "innermost")


def in_running_order(actions: Iterable[Action], after: bool) -> list[Action]:
    """Return the actions in the order of their tools, except that innermost ones are next to the op.

    after: whether the actions run after the op, so that innermost ones come first.
    """
    ordered = list(actions)
    if len(ordered) < 2:
        return ordered
    next_to_op = [action for action in ordered if action.innermost]
    others = [action for action in ordered if not action.innermost]
    return next_to_op + others if after else others + next_to_op


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RoutineParameters:
    """Parameters of a routine that the op's inputs may fill.

    positional: names of parameters that a position fills.  named: names of keyword-only parameters.
    variadic, any_name: whether the routine has `*args`, and `**kwargs`.
    """

    __slots__ = ("any_name", "named", "positional", "variadic")

    def __init__(self, routine: Routine, bound_names: Iterable[str]) -> None:
        parameters = inspect.signature(routine).parameters.values()
        # `run`, `reads`, `original` and the tool's keyword arguments have their values already.
        free_parameters = [parameter for parameter in parameters if parameter.name not in set(bound_names)]
        self.positional = [parameter.name for parameter in free_parameters if parameter.kind in _POSITIONAL]
        self.named = frozenset(
            parameter.name for parameter in free_parameters if parameter.kind is parameter.KEYWORD_ONLY
        )
        self.variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in free_parameters)
        self.any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in free_parameters)


def parameters_of(routine: Routine, bound_names: Iterable[str]) -> RoutineParameters | None:
    """Return the parameters of a routine except the bound ones; None for a routine written in C."""
    try:
        return RoutineParameters(routine, bound_names)
    except (TypeError, ValueError):
        return None


def replacement_arguments(
    parameters: RoutineParameters | None,
    inputs: Sequence[Any],
    names: Sequence[str],
    holds_tensors: Callable[[Any], bool],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a replacement, by position and by name, chosen by its parameters.

    With as many parameters as the op has inputs, or any number, it receives all inputs in order, those of its
    keyword-only parameters by name.  Else it receives other inputs than tensors by name, where it has a
    parameter of that name, and by position the op's tensors; its first inputs if there are more parameters
    than tensors.
    parameters: None for a routine written in C, which receives the tensors.  names: those of the inputs.
    """
    # A routine written in C has no signature to read names from: it gets what any replacement can compute
    # with.
    if parameters is None:
        return [value for value in inputs if holds_tensors(value)], {}
    inputs_with_names = _with_names(inputs, names)
    # The routine was written for this op's schema, so position tells what each input is.
    if parameters.variadic or len(parameters.positional) >= len(inputs):
        input_by_name = {name: value for value, name in inputs_with_names if name in parameters.named}
        return [value for value, name in inputs_with_names if name not in input_by_name], input_by_name
    parameter_names = {*parameters.positional, *parameters.named}
    input_by_name = {
        name: value
        for value, name in inputs_with_names
        if name and not holds_tensors(value) and (name in parameter_names or parameters.any_name)
    }
    other_inputs = [value for value, name in inputs_with_names if name not in input_by_name]
    tensors = [value for value in other_inputs if holds_tensors(value)]
    free_parameter_count = sum(name not in input_by_name for name in parameters.positional)
    # With more free parameters than tensors, the routine takes the op's leading inputs by position, numbers
    # among them, provided that no tensor comes after these.
    leading_inputs = other_inputs[:free_parameter_count]
    has_all_tensors = sum(map(holds_tensors, leading_inputs)) == len(tensors)
    takes_leading_inputs = len(tensors) < free_parameter_count and has_all_tensors
    return (leading_inputs if takes_leading_inputs else tensors), input_by_name


def signature_error(
    action: Action,
    inputs: Sequence[Any],
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RoutineError | None:
    """Return an error if a routine's signature does not accept the arguments; else None.

    None also for a routine written in C, whose signature is unknown.
    inputs, names: all values at the routine's point and their names, for the message.
    """
    # `bind` compares only names with the signature, so any value stands for these.
    core_kwargs = {name: None for name in ("run", "shapes") if getattr(action, f"takes_{name}")}
    try:
        inspect.signature(action.func).bind(*args, **{**core_kwargs, **action.kwargs, **kwargs})
    except TypeError as error:
        message = f"{action} cannot be called with {len(args)} value{'s' * (len(args) != 1)}: {error}. "
        unexpected = re.search(r"unexpected keyword argument '(?P<name>\w+)'", str(error))
        if unexpected is not None:
            name = unexpected["name"]
            return RoutineError(f"{message}Give the routine a parameter {name}, or leave {name}= away")
        # The gradients of the outputs enter a backward op, those of the inputs leave it.
        side = "outputs" if action.type.is_after != action.type.is_backward else "inputs"
        selecting_option = f"grad_{side}" if action.type.is_backward else side
        return RoutineError(
            f"{message}The op has {_listed_values(inputs, names)} here. "
            f"Select values, as by {selecting_option}=[0], "
            "give the routine a parameter for each, or pass others as keywords, "
            f"{action.type.value}(routine, name=value)"
        )
    except ValueError:  # `inspect` knows no signature: the routine is written in C
        return None
    return None


def _with_names(inputs: Sequence[Any], names: Sequence[str]) -> list[tuple[Any, str]]:
    return [(value, names[i] if i < len(names) else "") for i, value in enumerate(inputs)]


def _listed_values(inputs: Sequence[Any], names: Sequence[str]) -> str:
    """Return the values with position, name and type, for messages: "0: input (Tensor (2, 3))"."""
    descriptions = []
    for position, (value, name) in enumerate(_with_names(inputs, names)):
        label = f"{position}: {name}" if name else str(position)
        descriptions.append(f"{label} ({_type_and_shape(value)})")
    return ", ".join(descriptions) or "no values"


def _type_and_shape(value: Any) -> str:
    """Name the type of a value with its shape or length, for messages."""
    if isinstance(value, (list, tuple)) and value:
        return f"{type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"
