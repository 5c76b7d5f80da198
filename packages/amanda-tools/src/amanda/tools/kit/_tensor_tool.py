"""Base for tools that observe the tensors of ops; inputs of an op: leaves, parameters, and packed ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import amanda
from amanda.action import Executions, Observed, all_samples
from amanda.errors import ToolError
from amanda.options import PositiveInt, checked
from amanda.tools.kit._tensors import tensors_of
from amanda.tools.mapping import UNINITIALISED, StandardMapping, weight_gradient


def leaves(values: Iterable[Any], structures: bool = False) -> list[Any]:
    """Return values, and for each list or tuple among them its leaves.

    Args:
        values: Values of any types.
        structures: True for the leaves of mappings and dataclasses too, such as models return.

    >>> leaves([1, [2, (3,)], "four"])
    [1, 2, 3, 'four']
    """
    flat: list[Any] = []  # a generator takes three times as long
    for value in values:
        nested = _members(value) if structures else value
        if isinstance(nested, (list, tuple)):
            flat += leaves(nested, structures)
        else:
            flat.append(nested)
    return flat


def _members(value: Any) -> Any:
    """Return the values of a mapping or of a dataclass's fields as a list; any other value as it is."""
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return value


def torch_tensors(values: Iterable[Any], structures: bool = False) -> list[Any]:
    """Return the tensors of PyTorch among values, those in lists too.

    Args:
        values: Values of any types.
        structures: True for those in mappings and dataclasses too, such as models return.
    """
    import torch

    return [value for value in leaves(values, structures) if isinstance(value, torch.Tensor)]


def parameter_inputs(context: amanda.OpContext) -> tuple[int, ...]:
    """Return positions of the inputs that are parameters, views of one, or values of a variable; no lists."""
    return tuple(_parameters(context))


def _parameters(context: amanda.OpContext) -> dict[int, Any]:
    variable_or_parameter = {
        i: context.get_variable(i)
        for i, value in enumerate(context.get_inputs())
        if not isinstance(value, (list, tuple))
    }
    parameters = {i: x for i, x in variable_or_parameter.items() if x is not None}
    return {i: x for i, x in parameters.items() if tensors_of(x).is_parameter(x)}


def parameter_paths(context: amanda.OpContext) -> dict[int, str]:
    """Return the paths in the model of the inputs that are parameters with a path, by position."""
    paths = {i: context.get_variable_path(variable) for i, variable in _parameters(context).items()}
    return {i: path for i, path in paths.items() if path}


def remarks_on_packed_inputs(context: amanda.OpContext) -> Iterator[str]:
    """Yield a sentence for a result on each input of an op that is packed into other tensors.

    Call it in a forward analysis routine of a tool that depends on StandardMapping, whose `dtype` names the
    class of such a tensor.
    """
    for position, value in enumerate(context.get_inputs()):
        name = None if isinstance(value, (list, tuple)) else context["dtype"](value)
        if name is not None and name.endswith("]") and hasattr(type(value), "__tensor_flatten__"):
            where = context.get_scope() or context.get_source()
            yield unread_sentence(f"Input {position}", f"it is packed, {name}", context["type"], where)


def unread_sentence(role: str, reason: str, kind: str, where: str) -> str:
    """Return a sentence as `OpTensor.unread` does; role: "Input 0"."""
    return f"{role} of {kind} of {where}{_NOT_READ}{reason}."


_NOT_READ = " is not read: "
_NAMED_UNREAD = 3
"""How many tensors that are not read for the same reason have a sentence each; more share a sentence."""


def folded_unread(sentences: Iterable[str]) -> list[str]:
    """Return sentences of `unread_sentence`, with one for the many tensors that share a reason.

    >>> folded_unread(f"Output 0 of add of {i} is not read: it has no elements." for i in range(5))
    ['5 tensors are not read: it has no elements, such as output 0 of add of 0.']
    """
    by_reason: dict[str, list[str]] = {}
    for sentence in sentences:
        by_reason.setdefault(sentence.partition(_NOT_READ)[2], []).append(sentence)
    folded: list[str] = []
    for reason, group in by_reason.items():
        if reason and len(group) > _NAMED_UNREAD:
            example = group[0].partition(_NOT_READ)[0]
            example = example[0].lower() + example[1:]
            group = [f"{len(group):,} tensors are not read: {reason[:-1]}, such as {example}."]
        folded += group
    return folded


NUMBERS = ("float", "bfloat", "int", "uint", "bool", "complex", "half", "quint", "qint")
"""Beginnings of the names of element types that hold numbers."""

Dtype = Callable[[Any], str | None]
"""Gives the name of a tensor's element type, None of any other value: `dtype` of StandardMapping."""


class OpTensor(NamedTuple):
    """One tensor that an op reads or gives.

    role: "input", "weight", "output", "gradient" or "weight gradient".  position: among the inputs, outputs
    or gradients.  flat_index: the position after the lists among the values are flattened.
    dtype: name of the element type.  slice: index of the weight that the op reads among those in one array,
    "[1]"; "" elsewhere.  batches: number of axes in front that are the batches of a vmap.
    """

    role: str
    position: int
    flat_index: int
    tensor: Any
    dtype: str
    slice: str = ""
    batches: int = 0

    def unread(self, reason: str, kind: str, where: str) -> str:
        """Return a sentence for a result on a tensor that cannot be read.

        Args:
            reason: As `Tensors.unread` returns it.
            kind: The op's type.
            where: The op's module, or the line that calls it.
        """
        role = "input" if self.role in ("", "weight") else self.role
        return unread_sentence(f"{role.capitalize()} {self.position}", reason, kind, where)


def op_tensors(
    values: Sequence[Any], dtype: Dtype, role: str = "", kinds: tuple[str, ...] = NUMBERS, first: int = 0,
    leave: Leave | None = None, batches: Sequence[int] = (),
) -> Iterator[OpTensor]:  # fmt: skip
    """Yield the tensors among inputs, outputs or gradients of an op that can be read, also those in lists.

    Args:
        values: Values as routines get them.
        dtype: Function that names element types, which StandardMapping writes.
        role: Of all tensors, as `OpTensor` has it.
        kinds: Beginnings of the names of element types to yield.
        first: Position of the first value.
        leave: Called with a tensor that cannot be read, and why; None to pass over it.
        batches: Numbers of batches by flat index, as an observer of all samples gets them; () without any.
    """
    flat_index = 0
    for position, value in enumerate(values, first):
        # A tuple of one instead of a list: most inputs are tensors, and this runs for each.
        for tensor in leaves(value) if isinstance(value, (list, tuple)) else (value,):
            name = dtype(tensor)
            if name is not None and (name.startswith(kinds) or name.endswith("]")):
                op_tensor = OpTensor(role, position, flat_index, tensor, name)
                if batches:
                    op_tensor = op_tensor._replace(batches=batches[flat_index])
                reason = tensors_of(tensor).unread(tensor)
                if reason is None:
                    yield op_tensor
                elif leave is not None:
                    leave(op_tensor, reason)
            flat_index += 1


Leave = Callable[[OpTensor, str], None]
"""Takes a tensor that cannot be read, and the reason."""


@dataclass(slots=True)
class OpRecord:
    """One op, forward or backward; executions_by_role: how many had tensors of a role."""

    phase: str
    type: str
    module: str
    source: str
    executions_by_role: dict[str, int] = field(default_factory=dict, init=False)


Role = Literal["input", "weight", "output", "gradient"]
"""The role of a tensor at its op."""
RecordT = TypeVar("RecordT", bound=OpRecord)
Key = tuple[int, int | None]
"""Ids of a forward op and of its backward op."""
_SLICE = "amanda.tools.kit: slice of a stack of weights"


class TensorTool(amanda.Tool, Generic[RecordT]):
    """Base for tools that observe tensors of ops and change none.

    Args:
        roles: Tensors to observe; "input" includes the weight, "gradient" that of the weight.
        every: Observe the first execution of an op and each `every`-th after it.
        executions: The most executions of an op to observe; None for all.

    Raises:
        OptionError: Where `every` is not a number from 1 on.
        ToolError: For a subclass without `op_record` or `observe`.
    """

    by_slice: ClassVar[bool] = False
    """True to count executions for each weight of an op that reads one array slice by slice."""

    @checked
    def __init__(
        self, roles: Collection[Role], every: PositiveInt = 1, executions: PositiveInt | None = None
    ) -> None:
        super().__init__()
        for name in ("op_record", "observe"):
            if hasattr(getattr(self, name), "__isabstractmethod__"):
                raise ToolError(f"{type(self).__name__} has no method {name}, which a TensorTool needs")
        self._roles: frozenset[str] = frozenset(roles)
        self._every: int = every
        self._executions: int | None = executions
        self._records: dict[Key, RecordT] = {}
        self._unread: dict[str, None] = {}
        self.depends_on(StandardMapping())
        # First, so that the note on the slice is there when the observers are inserted.
        if self.by_slice:
            self.add_inst_for_op(self._follow_slices)
        if self._roles - {"gradient"}:
            self.add_inst_for_op(self._insert_observers)
        if "gradient" in self._roles:
            self.add_inst_for_op(self._insert_backward_observer, backward=True)

    @abstractmethod
    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> RecordT:
        """Return a new record of an op, at its first analysis.

        Args:
            context: With the keys of StandardMapping.
            phase: Phase of the op; "backward" of a backward op.
            kind: Type of the op, or of the backward op.
        """

    @abstractmethod
    def observe(self, record: RecordT, tensors: Iterator[OpTensor], execution: int) -> None:
        """Observe the inputs, the outputs or the gradients of an op at one of its executions.

        Args:
            record: What `op_record` returned.
            tensors: Tensors that can be read, to iterate over once.
            execution: Number of the execution, from 0 on.
        """

    def observe_all(self, observed: Iterable[tuple[RecordT, Iterator[OpTensor], int]]) -> None:
        """Observe executions of many ops, in order."""
        for record, tensors, execution in observed:
            self.observe(record, tensors, execution)

    @property
    def remarks(self) -> list[str]:
        """Sentences on tensors that cannot be read, for the `remarks` of a result."""
        return folded_unread(self._unread)

    def clear(self) -> None:
        """Reset the counts of executions; analysed ops stay analysed."""
        for record in self._records.values():
            record.executions_by_role.clear()

    def unmatched(self) -> list[str]:
        """Return what any tool returns; raise ToolError if a subclass has not called the constructor."""
        if "_roles" not in vars(self):
            raise ToolError(f"{type(self).__name__}.__init__ does not call super().__init__(roles)")
        return super().unmatched()

    def _insert_observers(self, context: amanda.OpContext) -> None:
        """Insert observers of the inputs, or the weight alone, and of the outputs, by the tool's roles."""
        record, weight = self._record(context, context["phase"], context["type"]), context["weight_index"]
        options: dict[str, Any] = {"record": record, "dtype": context["dtype"]}
        observer = self._observe_slice if _SLICE in context else self._observe_execution
        self._unread.update(dict.fromkeys(remarks_on_packed_inputs(context)))
        if "input" in self._roles:
            context.insert_before_op(
                observer, role="input", is_weights=lambda position, _: position == weight, **options
            )
        elif "weight" in self._roles and weight is not None:
            context.insert_before_op(observer, inputs=[weight], role="weight", first=weight, **options)
        # Uninitialised memory would be reported as the statistics of an output.
        if "output" in self._roles and context["type"] not in UNINITIALISED:
            context.insert_after_op(observer, role="output", **options)

    def _insert_backward_observer(self, context: amanda.OpContext) -> None:
        """Insert the observer of the gradients that leave a backward op, unless it accumulates one."""
        backward_type = context["backward_type"]
        # Its gradients are those of the op before it, which are observed there.
        if backward_type != "accumulate_grad":
            observer = self._observe_slice if _SLICE in context else self._observe_execution
            context.insert_after_backward_op(
                observer, record=self._record(context, "backward", backward_type), role="gradient",
                dtype=context["dtype"],
                is_weights=None if context["weight_grad_index"] is None else weight_gradient(context),
            )  # fmt: skip

    def _follow_slices(self, context: amanda.OpContext) -> None:
        """Where an op reads one weight of an array of several, have each execution note which one."""
        weight = context["weight_index"]
        holder = None if weight is None else context.get_variable(weight)
        if getattr(holder, "parts", tuple)():
            context[_SLICE] = holder
            context.insert_before_op(_note_slice, inputs=[weight], holder=holder)

    def _record(self, context: amanda.OpContext, phase: str, kind: str) -> RecordT:
        """Return the record of an op, a new one at its first analysis.  kind: the op's type."""
        key = context.get_op_id(), context.get_backward_op_id()
        if key not in self._records:
            self._records[key] = self.op_record(context, phase, kind)
        return self._records[key]

    @amanda.observer
    @all_samples
    def _observe_execution(
        self, *values: Any, record: RecordT, role: str, dtype: Dtype, first: int = 0,
        is_weights: Callable[[int, Any], bool] | None = None, batches: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Count an execution, and observe its tensors if it is due.  first: position of the first value."""
        execution = self._count_execution(record, role)
        if execution is not None:  # it is due
            tensors = self._tensors_of_execution(values, record, role, dtype, first, is_weights, batches)
            self.observe(record, tensors, execution)

    def _tensors_of_execution(
        self, values: Sequence[Any], record: RecordT, role: str, dtype: Dtype, first: int = 0,
        is_weights: Callable[[int, Any], bool] | None = None, batches: Sequence[int] = (),
    ) -> Iterator[OpTensor]:  # fmt: skip
        """Return tensors among values, weights under the weight's role; note those that cannot be read."""
        leave = partial(self._note_unread, record)
        tensors = op_tensors(values, dtype, role, first=first, leave=leave, batches=batches)
        return _with_weight_roles(tensors, is_weights)

    @amanda.observer
    @all_samples
    def _observe_slice(
        self, *values: Any, record: RecordT, role: str, dtype: Dtype, run: dict[str, Any], first: int = 0,
        is_weights: Callable[[int, Any], bool] | None = None, batches: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """As `_observe_execution`, counted for each weight apart of those that one array holds."""
        slice_name: str = run.get(_SLICE, "")
        execution = self._count_execution(record, f"{role} {slice_name}")
        if execution is not None:  # it is due
            tensors = self._tensors_of_execution(values, record, role, dtype, first, is_weights, batches)
            self.observe(record, (tensor._replace(slice=slice_name) for tensor in tensors), execution)

    def _note_unread(self, record: OpRecord, tensor: OpTensor, reason: str) -> None:
        self._unread[tensor.unread(reason, record.type, record.module or record.source)] = None

    @amanda.gathered(_observe_execution)
    def _observe_executions(self, executions: Executions) -> None:
        """Count a batch of executions in a graph, and observe those that are due, all at once."""
        # Counted before the values are asked for: a batch where none is due costs no tensors.
        numbers = self._count_executions(executions)
        if any(number is not None for number in numbers):
            observed = zip(executions.prepared(_options), executions.values(), numbers, strict=True)
            self.observe_all([
                (options["record"], self._tensors_of_execution(values, **options), number)
                for options, values, number in observed if number is not None
            ])  # fmt: skip

    def _count_executions(self, executions: Executions) -> list[int | None]:
        """Count each execution of a batch; return their numbers, None of those that are not due."""
        options = executions.prepared(_options)
        return [self._count_execution(option["record"], option["role"]) for option in options]

    def _tensors_of_batch(self, executions: Executions) -> Iterator[tuple[int, int, int, Any, OpTensor]]:
        """Yield position, fixed length or -1, number of the execution, options and tensor, of each tensor."""
        for i, (execution, positions) in enumerate(zip(executions, executions.positions(), strict=True)):
            options = execution.kwargs
            for tensor in self._tensors_of_execution(execution.values, **options):
                # A gradient of another size may be that of a weight no more.
                is_fixed = options.get("is_weights") is not None
                length = prod(tensors_of(tensor.tensor).extents(tensor.tensor)) if is_fixed else -1
                yield positions[tensor.flat_index], length, i, options, tensor

    def _count_execution(self, record: RecordT, role: str) -> int | None:
        """Count an execution; return its number if it is due by `every` and `executions`, else None."""
        executions = record.executions_by_role.get(role, 0)
        record.executions_by_role[role] = executions + 1
        observed, remainder = divmod(executions, self._every)
        if remainder or (self._executions is not None and observed >= self._executions):
            return None
        return executions


@amanda.observer
def _note_slice(value: Any, holder: Any, run: dict[str, Any]) -> None:
    """Note the index of the weight that the execution reads; "" where none is read alone."""
    current = holder.current()
    run[_SLICE] = "" if current is None else current.path.removeprefix(holder.path)


def _options(executions: Sequence[Observed]) -> list[Mapping[str, Any]]:
    return [execution.kwargs for execution in executions]


def _with_weight_roles(
    tensors: Iterator[OpTensor], is_weights: Callable[[int, Any], bool] | None
) -> Iterator[OpTensor]:
    """Return tensors; those for which `is_weights` is True get the role "weight" or "weight gradient"."""
    if is_weights is None:
        return tensors
    return (
        tensor._replace(role="weight" if tensor.role == "input" else f"weight {tensor.role}")
        if is_weights(tensor.position, tensor.tensor) else tensor for tensor in tensors
    )  # fmt: skip
