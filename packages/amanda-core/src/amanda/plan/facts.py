"""Facts of an op: a driver's description, which contexts show to tools."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from amanda.interceptor.opid import digest, mix
from amanda.namespace import Namespace
from amanda.plan.notes import add_note, describe
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action

ErrorT = TypeVar("ErrorT", bound=BaseException)


@dataclass(slots=True)
class OpFacts:
    """Facts of one execution of an op, from its driver; the contexts of all tools read them.

    graph: an object that the ops of one graph share; None where there is no graph.
    read_variables: returns names of the variables that an op of a graph reads, the same names in each graph.
    original: returns a function that computes the op of a graph and keeps nothing of the graph alive.
    variable_of: returns the variable that holds an input's value.  path_of: its path in the model.
    part_of: names the part of a variable that a value is, "" for all of it.
    device_of: names the device of a value, "" where the device is unknown.
    aliases: other paths of the module of `scope`.  input_shapes: shapes of the inputs of an eager op.
    reads_shapes: whether an analysis routine has read the shapes.
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
    replaceable: bool = True
    dropped: bool = False
    read_value: Callable[[Any], Any] = field(default=lambda value: value)
    op_type: str = ""
    parameters: Sequence[int] = ()
    graph: Hashable = None
    read_variables: Callable[[], Hashable] = field(default=lambda: None)
    original: Callable[[], Callable[[Sequence[Any]], Any]] | None = None
    variable_of: Callable[[Any], Any] = field(default=lambda value: None)
    path_of: Callable[[Any], str | None] = field(default=lambda variable: None)
    part_of: Callable[[Any, Any], str] = field(default=lambda value, variable: "")
    device_of: Callable[[Any], str] = field(default=lambda value: "")
    compute: Callable[[Sequence[Any]], Any] | None = None
    backward_order: int = 0
    aliases: Sequence[str] = ()
    input_shapes: Sequence[Any] = ()
    reads_shapes: bool = False

    def drop_values(self) -> None:
        """Drop every tensor, so that a context that lives on keeps no tensor alive."""
        self.inputs = self.outputs = self.grad_outputs = self.grad_inputs = self.attributes = None
        self.original = None
        self.dropped = True

    def first_path(self) -> str | None:
        """Return the first path in the model of a variable that the op reads; None where none has a path."""
        variables = map(self.variable_of, spread(self.inputs or ()))
        paths = (self.path_of(variable) for variable in variables if variable is not None)
        return next(filter(None, paths), None)

    def part_read(self, variable: Any) -> str:
        """Name the part of a variable that the op reads; "" for all of it, and where it reads several."""
        values = [value for value in spread(self.inputs or ()) if self.variable_of(value) is variable]
        return self.part_of(values[0], variable) if len(values) == 1 else ""

    def backward_id(self, name: str, place: int) -> int:
        """Return the id of a backward op of this op: by its name, and its place among the backward ops."""
        return mix(mix(self.op_id, _digest_of(name)), place) or 1

    def at_backward(self, op: Any, op_id: int, replaceable: bool, order: int = 1) -> OpFacts:
        """Return facts of a backward op of this op."""
        facts = OpFacts(*_fields_of(self))  # takes a fifth of the time of `dataclasses.replace`
        facts.backward_op, facts.backward_op_id, facts.backward_order = op, op_id, order
        facts.replaceable = replaceable
        facts.grad_outputs = facts.grad_inputs = facts.original = None
        facts.dropped = False
        return facts

    def explain(self, error: ErrorT, action: Action) -> ErrorT:
        """Add a note to an error with the op and the tool's routine that raised it; return the error."""
        add_note(error, describe(self, action.tool, str(action)))
        return error

    @property
    def name(self) -> str:
        """Name of the op that runs, for messages."""
        op = self.op if self.backward_op is None else self.backward_op
        return str(getattr(op, "__name__", op))


_digest_of: Callable[[str], int] = lru_cache(maxsize=4096)(digest)
_fields_of = attrgetter(*(fact.name for fact in fields(OpFacts)))
