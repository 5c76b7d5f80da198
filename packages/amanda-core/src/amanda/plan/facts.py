"""Facts of an op, as a driver brings them."""

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
    """Facts of one execution of an op, as a driver brings them; the contexts of all tools read them.

    graph: what the ops of one graph share; None where there is no graph.  read_variables: names the
    variables that an op of a graph reads, the same ones in each graph.  original: makes what computes the op
    of a graph, which keeps nothing of the graph.  variable_of: what holds an input's value; path_of: where in
    the model that is; part_of: names the part of a variable that a value is, "" for all of it.
    device_of: names the device of a value, "" where that is not known.
    aliases: other paths of the module of `scope`.  input_shapes: of an op that runs as it is called.
    reads_shapes: whether an analysis routine has asked for them.
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
        """Drop every tensor; a context that lives on knows the op alone."""
        self.inputs = self.outputs = self.grad_outputs = self.grad_inputs = self.attributes = None
        self.original = None
        self.dropped = True

    def first_path(self) -> str | None:
        """Return the path of the first variable that the op reads and whose place in the model is known."""
        held = map(self.variable_of, spread(self.inputs or ()))
        return next((path for path in (self.path_of(one) for one in held if one is not None) if path), None)

    def part_read(self, variable: Any) -> str:
        """Name the part of a variable that the op reads; "" for all of it, and where it reads several."""
        read = [one for one in spread(self.inputs or ()) if self.variable_of(one) is variable]
        return self.part_of(read[0], variable) if len(read) == 1 else ""

    def backward_id(self, name: str, place: int) -> int:
        """Return the id of a backward op of this op: by its name, and its place among the backward ops."""
        return mix(mix(self.op_id, _digest_of(name)), place) or 1

    def at_backward(self, op: Any, op_id: int, replaceable: bool, order: int = 1) -> OpFacts:
        """Return facts of a backward op of this op."""
        facts = OpFacts(*_fields_of(self))  # a fifth of what `dataclasses.replace` takes
        facts.backward_op, facts.backward_op_id, facts.backward_order = op, op_id, order
        facts.replaceable = replaceable
        facts.grad_outputs = facts.grad_inputs = facts.original = None
        facts.dropped = False
        return facts

    def explain(self, error: ErrorT, action: Action) -> ErrorT:
        """Note on an error at which op, and by which routine of which tool, it came about; return it."""
        add_note(error, describe(self, action.tool, str(action)))
        return error

    @property
    def name(self) -> str:
        """Name of the op that runs, for messages."""
        op = self.op if self.backward_op is None else self.backward_op
        return str(getattr(op, "__name__", op))


_digest_of: Callable[[str], int] = lru_cache(maxsize=4096)(digest)
_fields_of = attrgetter(*(one.name for one in fields(OpFacts)))
