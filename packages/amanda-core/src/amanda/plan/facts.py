"""Facts of an op: a driver's description, which contexts show to tools; and what errors say of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from amanda import interceptor
from amanda.errors import ActionError, ReplaceConflictError
from amanda.interceptor import codes
from amanda.interceptor.opid import BOUNDARY, FRAMEWORK, SKIPPED, digest, mix
from amanda.namespace import Namespace
from amanda.plan.action import Action, ActionType, InstrumentationPoint, parameters_of
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from types import TracebackType

    from amanda.plan.tools import AnyTool


ErrorT = TypeVar("ErrorT", bound=BaseException)


@dataclass(slots=True)
class OpFacts:
    """Facts of one execution of an op, from its driver; the contexts of all tools read them.

    op: the operator, an object whose `__name__` and equality tools use.  op_id: its id, which the core sets.
    namespace: tags of the driver's ops.
    inputs, outputs: the values of this execution, which the core sets; None where they are not known.
    backward_op, backward_op_id: the type of a backward op, and its id; None at the op itself.
    backward_order: 1 at a backward op, 2 at a backward op of a backward op.
    grad_outputs, grad_inputs: gradients that enter and leave the backward op; the core sets them.
    names: names of the inputs.  attributes: the arguments that are no tensors, by name.
    scope: path of the module that calls the op, within the outermost module, as a user writes it.
    source: "file:line" of the user's call, which the core sets for eager ops.
    op_type: the framework's own name for what the op computes; "" for the name of `op`.
    variable_positions: positions of the inputs that were read from a variable, where the values do not
    show it.
    read_value: returns the present value of an input, where the input is a symbol.
    graph: an object that the ops of one graph share; None where there is no graph.
    read_variables: returns names of the variables that an op of a graph reads, the same names in each graph.
    original: returns a function that computes the op of a graph and keeps nothing of the graph alive.
    variable_of: returns the variable that holds an input's value.
    path_of: returns the path of such a variable in the model.
    part_of: names the part of a variable that a value is, "" for all of it.
    device_of: names the device of a value, "" where the device is unknown.
    scope_aliases: other paths of the module of `scope`.  input_shapes: shapes of the inputs of an eager op.
    reads_shapes: whether an analysis routine has read the shapes.
    sample_count: number of samples that an execution computes at once, of an op of a graph within a vmap.
    compute: runs an eager op on other inputs; None where nothing can.
    is_replaceable: whether a tool may replace the backward op.
    has_dropped_values: whether the values were dropped.
    """

    op: Any
    op_id: int
    namespace: Namespace
    names: Sequence[str] = ()
    inputs: list[Any] | None = None
    outputs: list[Any] | None = None
    attributes: Mapping[str, Any] | None = None
    scope: str = ""
    source: str = ""
    backward_op: Any = None
    backward_op_id: int | None = None
    grad_outputs: list[Any] | None = None
    grad_inputs: list[Any] | None = None
    is_replaceable: bool = True
    has_dropped_values: bool = False
    read_value: Callable[[Any], Any] = field(default=lambda value: value)
    op_type: str = ""
    variable_positions: Sequence[int] = ()
    graph: Hashable = None
    read_variables: Callable[[], Hashable] = field(default=lambda: None)
    original: Callable[[], Callable[[Sequence[Any]], Any]] | None = None
    variable_of: Callable[[Any], Any] = field(default=lambda value: None)
    path_of: Callable[[Any], str | None] = field(default=lambda variable: None)
    part_of: Callable[[Any, Any], str] = field(default=lambda value, variable: "")
    device_of: Callable[[Any], str] = field(default=lambda value: "")
    compute: Callable[[Sequence[Any]], Any] | None = None
    backward_order: int = 0
    scope_aliases: Sequence[str] = ()
    input_shapes: Sequence[Any] = ()
    reads_shapes: bool = False
    sample_count: int = 1

    def drop_values(self) -> None:
        """Drop every tensor, attributes and `original`, so that a context that lives on keeps none alive."""
        self.inputs = self.outputs = self.grad_outputs = self.grad_inputs = self.attributes = None
        self.original = None
        self.has_dropped_values = True

    def first_variable_path(self) -> str | None:
        """Return the first path in the model of a variable that the op reads; None where none has a path."""
        variables = map(self.variable_of, spread(self.inputs or ()))
        paths = (self.path_of(variable) for variable in variables if variable is not None)
        return next(filter(None, paths), None)

    def variable_part(self, variable: Any) -> str:
        """Name the part of a variable that the op reads; "" for all of it, and where it reads several parts.

        Two reads of one variable count as several parts, even if both read all of it.
        """
        values = [value for value in spread(self.inputs or ()) if self.variable_of(value) is variable]
        return self.part_of(values[0], variable) if len(values) == 1 else ""

    def backward_id(self, name: str, place: int) -> int:
        """Return the id of a backward op of this op.

        Args:
            name: Name of the backward op's type.
            place: Number that tells the backward ops of one execution apart, the same in each execution.
        """
        # The tables of native code take 0 for "no op".
        return mix(mix(self.op_id, _digest_of(name)), place) or 1

    def for_backward_op(self, op: Any, op_id: int, replaceable: bool, order: int = 1) -> OpFacts:
        """Return facts of a backward op of this op: those of the op, without gradients.

        Args:
            op: Type of the backward op, whose `__name__` tools see.
            op_id: Id of the backward op, from `backward_id`.
            replaceable: Whether tools may replace the backward op.
            order: 1 for a backward op of the op, 2 for a backward op of that.
        """
        facts = OpFacts(*_fields_of(self))  # takes a fifth of the time of `dataclasses.replace`
        facts.backward_op, facts.backward_op_id, facts.backward_order = op, op_id, order
        facts.is_replaceable = replaceable
        facts.grad_outputs = facts.grad_inputs = facts.original = None
        facts.has_dropped_values = False
        return facts

    def annotate_error(self, error: ErrorT, action: Action) -> ErrorT:
        """Add a note to an error with the op and the tool's routine that raised it; return the error.

        Args:
            error: Exception that a routine raised.
            action: Action of the routine.
        """
        add_note(error, error_note(self, action.tool, str(action)))
        return error

    @property
    def name(self) -> str:
        """Name of the op that runs, for messages."""
        op = self.op if self.backward_op is None else self.backward_op
        return str(getattr(op, "__name__", op))


# There are a few hundred names of backward ops, and each backward op of each step asks for its id.
_digest_of: Callable[[str], int] = lru_cache(maxsize=4096)(digest)
_fields_of = attrgetter(*(fact.name for fact in fields(OpFacts)))


class Operation:
    """An operator by name: equal to another object of its class with the same name and key.

    __name__: the framework's name of the operator: "dot_general", "Conv2D".

    Args:
        name: Framework's name of the operator, which becomes its `__name__`: "dot_general", "Conv2D".
        *key: Values that distinguish operators of one name.
    """

    __slots__ = ("__name__", "__weakref__", "_key")

    def __init__(self, name: str, *key: Hashable) -> None:
        self.__name__ = name
        self._key = (name, *key)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def user_source() -> str:
    """Return "file:line" of the innermost frame neither a framework's nor Amanda's; "" without one."""
    # Asked once for each op, at its first execution: walking the frames costs microseconds.
    frame = codes.innermost_frame(sys._getframe(1), excluded_kinds=FRAMEWORK | BOUNDARY | SKIPPED)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once.

    Does nothing if the exception has the note.  A TypeError is also stored in the interceptor, which raises
    it again: operator methods of frameworks turn a TypeError into NotImplemented.
    """
    if isinstance(error, TypeError):
        interceptor.keep_failure(error)
    notes = getattr(error, "__notes__", [])
    # An error may pass several contexts on its way out, each of which would add the note.
    if note in notes:
        return
    # Python 3.10 lacks `add_note`; `__notes__` is what later versions and pytest print.
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


# A class, since a generator with `contextmanager` takes several times as long to enter at each routine.
class explain_errors:
    """Context that adds tool, op, id, point, module path and the user's line to an exception."""

    __slots__ = ("_action_or_point", "_facts", "_tool")

    def __init__(self, facts: OpFacts, tool: AnyTool, action_or_point: str) -> None:
        self._facts = facts
        self._tool = tool
        self._action_or_point = action_or_point

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            add_note(error, error_note(self._facts, self._tool, self._action_or_point))


def error_note(facts: OpFacts, tool: Any, action_or_point: str) -> str:
    """Return a note for an error: the tool, the action or point, the op, its module and the user's line."""
    op_id = facts.op_id if facts.backward_op_id is None else facts.backward_op_id
    where = f", module {facts.scope}" if facts.scope else ""
    line = f", called from {facts.source}" if facts.source else ""
    # A node of a file without lines, such as one of ONNX, is found by its name alone.
    node_name = "" if facts.source else getattr(facts.op, "name", "")
    line = f", node {node_name}" if node_name and isinstance(node_name, str) else line
    op = f"{facts.name} (op {op_id:#018x}{where}{line})"
    return f"[amanda] tool {type(tool).__name__}, {action_or_point} of {op}"


Selection = int | str | Sequence[int | str] | None


_OPTIONS_OF_ACTION = {
    ActionType.INSERT_BEFORE_OP: ("inputs",),
    ActionType.INSERT_AFTER_OP: ("outputs",),
    ActionType.INSERT_BEFORE_BACKWARD_OP: ("grad_outputs",),
    ActionType.INSERT_AFTER_BACKWARD_OP: ("grad_inputs",),
    ActionType.REPLACE_OP: ("inputs", "reads"),
    ActionType.REPLACE_BACKWARD_OP: ("grad_outputs",),
}
_SELECTING_OPTIONS = ("inputs", "outputs", "grad_outputs", "grad_inputs")


def check_routine(kind: ActionType, routine: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ActionError unless a routine is callable, and for a keyword that is a mistyped option.

    kwargs: keywords for the routine.  With `**kwargs` it would accept `input=` for `inputs=`, and the action
    would select every value.
    """
    if not callable(routine):
        raise ActionError(f"{kind.value} wants a callable routine, not {routine!r}")
    for name in kwargs:
        option = _intended_option(kind, name)
        parameters = parameters_of(routine, ()) if option else None
        # The signature of a routine written in C may be unknown.
        if parameters is not None and name not in {*parameters.positional, *parameters.named}:
            raise ActionError(
                f"{kind.value} has no option {name!r}; did you mean {option}=? "
                "(other keywords go to the routine)"
            )


# The same few names come with thousands of actions.
@lru_cache(maxsize=1024)
def _intended_option(kind: ActionType, name: str) -> str:
    """Return the option of an action that a keyword is like, or that is meant by another action's option."""
    options = _OPTIONS_OF_ACTION[kind]
    if not get_close_matches(name, {*options, *_SELECTING_OPTIONS}, n=1, cutoff=0.8):
        return ""
    return get_close_matches(name, options, n=1, cutoff=0)[0]


def check_action_at_point(facts: OpFacts, kind: ActionType, point: InstrumentationPoint) -> None:
    """Raise ActionError for an action that the point at which it is recorded does not allow.

    Forward actions belong to forward points, backward actions to backward points.  In eager mode the op has
    run at a point after it, which allows only actions after the op.  A graph is analysed before it runs:
    there a routine that requires outputs may act before the op, too.
    """
    if kind.is_backward != point.is_backward:
        required_argument = "backward=True" if kind.is_backward else "backward=False"
        raise ActionError(
            f"{kind.value} was called at {point.value} of {facts.name}; call it in a "
            f"callback registered with add_inst_for_op(callback, {required_argument})"
        )
    if point.is_after and not kind.is_after and facts.namespace[-1] == "eager":
        raise ActionError(
            f"{kind.value} was called at {point.value} of {facts.name}, when the op had run; "
            "call it in a callback registered with require_outputs=False"
        )


def check_replacement(facts: OpFacts, kind: ActionType, tool: AnyTool, recorded: Iterable[Action]) -> None:
    """Raise an error for a backward op that cannot be replaced, or an op that a tool replaces already.

    recorded: the actions so far at the op.
    """
    if kind.is_backward and not facts.is_replaceable:
        raise ActionError(
            f"{facts.name} cannot be replaced; change its gradient with insert_before_backward_op"
        )
    for action in recorded:
        if action.type is kind:
            raise ReplaceConflictError(
                f"{type(tool).__name__} wants to replace {facts.name}, which "
                f"{type(action.tool).__name__} replaces already; one op has one replacement: "
                "apply one of the two, or let one use insert_before_op or insert_after_op"
            )


def selected_positions(
    facts: OpFacts, kind: ActionType, select: int | str | Sequence[int | str]
) -> tuple[int, ...]:
    """Return the positions of the op's values that an action selects; ActionError for an absent value.

    select: a position or name, or several; names only of inputs.
    """
    keys = (select,) if isinstance(select, (int, str)) else tuple(select)
    if not keys:  # counters and clocks take no values
        return ()
    takes_inputs = kind in (ActionType.INSERT_BEFORE_OP, ActionType.REPLACE_OP)
    inputs = facts.inputs
    # The number of outputs and gradients is not known before the op has run.
    count = len(inputs) if takes_inputs and inputs is not None else None
    return resolve_positions(facts, keys, kind.value, count)


def resolve_positions(
    facts: OpFacts, keys: tuple[int | str, ...], method: str, count: int | None
) -> tuple[int, ...]:
    """Return the positions of values selected by position or name; negative positions count from the end.

    keys: positions or names.  count: number of values; None where the number is unknown: then names are
    errors, and positions are returned as they are.
    method: name of the calling method, for the ActionError where there is no such value.
    """
    names = list(facts.names)
    positions = []
    for key in keys:
        if isinstance(key, str) and key in names and count is not None:
            key = names.index(key)
        # True would be taken for position 1.
        is_position = isinstance(key, int) and not isinstance(key, bool)
        if not is_position or (count is not None and not -count <= int(key) < count):
            raise _no_such_value(facts, key, method, count)
        position = int(key)
        if position < 0 and count is not None:
            position += count
        positions.append(position)
    return tuple(positions)


def _no_such_value(facts: OpFacts, key: int | str, method: str, count: int | None) -> ActionError:
    """Return the error for a position or name of which the op has no value, with the names that there are."""
    request = f"{method} of {facts.name} was asked for {key!r}"
    if count is None:
        values = {
            "insert_after_op": facts.outputs, "insert_after_backward_op": facts.grad_inputs,
            "insert_before_backward_op": facts.grad_outputs, "replace_backward_op": facts.grad_outputs,
        }.get(method)  # fmt: skip
        number = "" if values is None else f", and it has {_count_of_values(len(values))} here"
        return ActionError(f"{request}; values here have positions, as 0 for the first, and no names{number}")
    names = list(facts.names)
    similar_names = get_close_matches(str(key), names, n=1)
    return ActionError(
        f"{request}; it has {_count_of_values(count)} ({', '.join(names) or 'given by position'})"
        + (f"; did you mean {similar_names[0]!r}?" if similar_names else "")
    )


def _count_of_values(count: int) -> str:
    return f"{count} value{'s' * (count != 1)}"
