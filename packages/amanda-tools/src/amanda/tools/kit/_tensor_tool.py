"""Base for tools that observe the tensors of ops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import amanda
from amanda.action import Executions, Observed
from amanda.options import PositiveInt, checked
from amanda.tools.kit._inputs import leaves, remarks_on_packed_inputs, unread_sentence
from amanda.tools.kit._tensors import tensors_of
from amanda.tools.mapping import UNINITIALISED, StandardMapping, weight_gradient

NUMBERS = ("float", "bfloat", "int", "uint", "bool", "complex", "half", "quint", "qint")
"""Beginnings of the names of element types that hold numbers."""

Dtype = Callable[[Any], str | None]
"""Gives the name of a tensor's element type, None of any other value: `dtype` of StandardMapping."""


class OpTensor(NamedTuple):
    """One tensor that an op reads or gives.

    role: "input", "weight", "output", "gradient" or "weight gradient".  position: among the inputs, outputs
    or gradients.  flat_index: the position after the lists among the values are flattened.
    dtype: name of the element type.  slice: index of the weight that the op reads among those in one array,
    "[1]"; "" elsewhere.
    """

    role: str
    position: int
    flat_index: int
    tensor: Any
    dtype: str
    slice: str = ""

    def unread(self, reason: str, kind: str, where: str) -> str:
        """Return a sentence for a result on a tensor that cannot be read.

        kind: the op's type.  where: its module, or the line that calls it.
        """
        role = "input" if self.role in ("", "weight") else self.role
        return unread_sentence(f"{role.capitalize()} {self.position}", reason, kind, where)


def op_tensors(
    values: Sequence[Any], dtype: Dtype, role: str = "", kinds: tuple[str, ...] = NUMBERS, first: int = 0,
    leave: Leave | None = None,
) -> Iterator[OpTensor]:  # fmt: skip
    """Yield the tensors among inputs, outputs or gradients of an op that can be read, also those in lists.

    dtype: what StandardMapping writes.  kinds: what the name of the element type begins with.  first:
    position of the first value.  leave: called with a tensor that cannot be read, and why.
    """
    flat_index = 0
    for position, value in enumerate(values, first):
        for tensor in leaves(value) if isinstance(value, (list, tuple)) else (value,):
            name = dtype(tensor)
            if name is not None and (name.startswith(kinds) or name.endswith("]")):
                one = OpTensor(role, position, flat_index, tensor, name)
                reason = tensors_of(tensor).unread(tensor)
                if reason is None:
                    yield one
                elif leave is not None:
                    leave(one, reason)
            flat_index += 1


Leave = Callable[[OpTensor, str], None]
"""Takes a tensor that cannot be read, and the reason."""


@dataclass(slots=True)
class OpRecord:
    """One op, forward or backward; seen: how many executions had tensors of a role."""

    phase: str
    type: str
    module: str
    source: str
    seen: dict[str, int] = field(default_factory=dict, init=False)


Role = Literal["input", "weight", "output", "gradient"]
"""The role of a tensor at its op."""
RecordT = TypeVar("RecordT", bound=OpRecord)
Key = tuple[int, int | None]
"""Ids of a forward op and of its backward op."""
_SLICE = "amanda.tools.kit: slice of a stack of weights"


class TensorTool(amanda.Tool, Generic[RecordT]):
    """Base for tools that observe tensors of ops and change none.

    roles: the tensors to observe: "input" (with the weight), "weight", "output", "gradient" (with that of
    the weight).  every: observe the first execution of an op and each `every`-th after it.
    executions: the most executions of an op to observe, None for all.

    Raises OptionError where `every` is not a number from 1 on.
    """

    by_slice: ClassVar[bool] = False
    """True to count executions for each weight of an op that reads one array slice by slice."""

    @checked
    def __init__(
        self,
        roles: Collection[Role],
        every: PositiveInt = 1,
        executions: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        self._roles: frozenset[str] = frozenset(roles)
        self._every: int = every
        self._executions: int | None = executions
        self._records: dict[Key, RecordT] = {}
        self._left: dict[str, None] = {}
        self.depends_on(StandardMapping())
        if self.by_slice:
            self.add_inst_for_op(self._follow_slices)
        if self._roles - {"gradient"}:
            self.add_inst_for_op(self._forward)
        if "gradient" in self._roles:
            self.add_inst_for_op(self._backward, backward=True)

    @abstractmethod
    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> RecordT:
        """Return a new record of an op, at its first analysis; kind: the op's type."""

    @abstractmethod
    def observe(self, record: RecordT, tensors: Iterator[OpTensor], execution: int) -> None:
        """Observe the inputs, the outputs or the gradients of an op at one of its executions."""

    def observe_all(self, observed: Iterable[tuple[RecordT, Iterator[OpTensor], int]]) -> None:
        """Do what `observe` does for executions of many ops, in order."""
        for record, tensors, execution in observed:
            self.observe(record, tensors, execution)

    @property
    def remarks(self) -> list[str]:
        """Sentences on tensors that cannot be read, for the `remarks` of a result."""
        return list(self._left)

    def clear(self) -> None:
        """Reset the counts of executions; analysed ops stay analysed."""
        for record in self._records.values():
            record.seen.clear()

    def _forward(self, context: amanda.OpContext) -> None:
        record, weight = self._record(context, context["phase"], context["type"]), context["weight_index"]
        given: dict[str, Any] = {"record": record, "dtype": context["dtype"]}
        see = self._see_slice if _SLICE in context else self._see
        self._left.update(dict.fromkeys(remarks_on_packed_inputs(context)))
        if "input" in self._roles:
            context.insert_before_op(
                see, role="input", is_weights=lambda position, _: position == weight, **given
            )
        elif "weight" in self._roles and weight is not None:
            context.insert_before_op(see, inputs=[weight], role="weight", first=weight, **given)
        if "output" in self._roles and context["type"] not in UNINITIALISED:
            context.insert_after_op(see, role="output", **given)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind != "accumulate_grad":
            see = self._see_slice if _SLICE in context else self._see
            context.insert_after_backward_op(
                see, record=self._record(context, "backward", kind), role="gradient",
                dtype=context["dtype"], is_weights=weight_gradient(context),
            )  # fmt: skip

    def _follow_slices(self, context: amanda.OpContext) -> None:
        weight = context["weight_index"]
        holder = None if weight is None else context.get_variable(weight)
        if getattr(holder, "parts", tuple)():
            context[_SLICE] = holder
            context.insert_before_op(_note_slice, inputs=[weight], holder=holder)

    def _record(self, context: amanda.OpContext, phase: str, kind: str) -> RecordT:
        key = context.get_op_id(), context.get_backward_op_id()
        if key not in self._records:
            self._records[key] = self.op_record(context, phase, kind)
        return self._records[key]

    @amanda.observer
    def _see(
        self, *values: Any, record: RecordT, role: str, dtype: Dtype, first: int = 0,
        is_weights: Callable[[int, Any], bool] | None = None,
    ) -> None:  # fmt: skip
        execution = self._due(record, role)
        if execution is not None:
            leave = partial(self._leave, record)
            self.observe(record, _tensors(values, role, dtype, first, is_weights, leave), execution)

    @amanda.observer
    def _see_slice(
        self, *values: Any, record: RecordT, role: str, dtype: Dtype, run: dict[str, Any], first: int = 0,
        is_weights: Callable[[int, Any], bool] | None = None,
    ) -> None:  # fmt: skip
        part: str = run.get(_SLICE, "")
        execution = self._due(record, f"{role} {part}")
        if execution is not None:
            tensors = _tensors(values, role, dtype, first, is_weights, partial(self._leave, record))
            self.observe(record, (one._replace(slice=part) for one in tensors), execution)

    def _leave(self, record: OpRecord, tensor: OpTensor, reason: str) -> None:
        self._left[tensor.unread(reason, record.type, record.module or record.source)] = None

    @amanda.gathered(_see)
    def _see_all(self, executions: Executions) -> None:
        places = executions.prepared(_places)
        due = [self._due(one.record, one.role) for one in places]
        if any(one is not None for one in due):
            seen = zip(places, executions.values(), due, strict=True)
            self.observe_all(
                [(one.record, one.tensors(values), i) for one, values, i in seen if i is not None]
            )

    def _due(self, record: RecordT, role: str) -> int | None:
        """Count an execution; return its number, None if it is not one of those to observe."""
        seen = record.seen.get(role, 0)
        record.seen[role] = seen + 1
        taken, between = divmod(seen, self._every)
        if between or (self._executions is not None and taken >= self._executions):
            return None
        return seen


@amanda.observer
def _note_slice(value: Any, holder: Any, run: dict[str, Any]) -> None:
    current = holder.current()
    run[_SLICE] = "" if current is None else current.path.removeprefix(holder.path)


class _Place:
    """One observer in a graph, where the element types of what it is given stay as they are."""

    def __init__(
        self, record: Any, role: str, dtype: Dtype, first: int = 0,
        is_weights: Callable[[int, Any], bool] | None = None,
    ) -> None:  # fmt: skip
        self.record, self.role = record, role
        self._dtype, self._first, self._is_weights = dtype, first, is_weights
        self._layout: list[tuple[int, int, str]] | None = None  # positions, flat indices, element types

    def tensors(self, values: Sequence[Any]) -> Iterator[OpTensor]:
        """Return the tensors among the values of an execution."""
        layout, role, first, is_weights = self._layout, self.role, self._first, self._is_weights
        if layout is None:
            found = list(op_tensors(values, self._dtype, role, first=first))
            if not any(isinstance(one, (list, tuple)) for one in values):
                self._layout = [(one.position, one.flat_index, one.dtype) for one in found]
        else:  # a hot path
            found = [OpTensor(role, i, flat, values[i - first], dtype) for i, flat, dtype in layout]
        return iter(found) if is_weights is None else _weights_told(iter(found), is_weights)


def _places(executions: Sequence[Observed]) -> list[_Place]:
    """Return the places of executions."""
    return [_Place(**one.kwargs) for one in executions]


def _tensors(
    values: Sequence[Any], role: str, dtype: Dtype, first: int = 0,
    is_weights: Callable[[int, Any], bool] | None = None, leave: Leave | None = None,
) -> Iterator[OpTensor]:  # fmt: skip
    tensors = op_tensors(values, dtype, role, first=first, leave=leave)
    return tensors if is_weights is None else _weights_told(tensors, is_weights)


def _weights_told(tensors: Iterator[OpTensor], is_weights: Callable[[int, Any], bool]) -> Iterator[OpTensor]:
    for one in tensors:
        if is_weights(one.position, one.tensor):
            one = one._replace(role="weight" if one.role == "input" else f"weight {one.role}")
        yield one
