"""Calls of ops, on TensorFlow's fast path or through `execute`, and the variables among their arguments."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from amanda import interceptor
from amanda.backend import Call
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import core
from tensorflow.python.framework import ops

from .._operation import TensorFlowOperation
from ._schema import Schema, flatten
from ._state import MARK, TapeMark, local

Execute = Callable[[tuple[Any, ...]], Any]

UNSTOPPABLE = frozenset({"EagerPyFunc"})
"""Ops that record on an inner tape while they run, so that the outer tape cannot be stopped around them."""


class EagerCall(Call):
    """A call of an op, with inputs in the order of the op's schema.

    identities: variables among the arguments, which the op reads or writes.
    attrs: names and values of attributes, in turn.
    """

    __slots__ = ("attrs", "identities", "schema")

    schema: Schema
    attrs: tuple[Any, ...]
    identities: tuple[Any, ...]

    def __init__(self, schema: Schema, identities: tuple[Any, ...]) -> None:
        self.schema = schema
        self.identities = identities
        self.op = schema.op
        self.names: Sequence[str] = schema.names
        self.written_positions: Sequence[int] = schema.written
        # No op returns an input: tensors are immutable, and a write into a variable returns nothing.
        self.target_positions = ()

    def attributes(self) -> dict[str, Any]:
        """Return the op's attributes by name, including types and numbers of tensors."""
        attributes = self.schema.with_defaults(self.attrs)
        return {**attributes, **self.schema.infer_attributes(self.inputs, attributes)}

    def variable_positions(self) -> Sequence[int]:
        """Return the positions of the inputs that were read from a variable."""
        return tuple(
            [i for i, value in enumerate(self.inputs) if getattr(value, "_id", None) in variables.reads_by_id]
        )

    def op_type(self) -> str:
        """Return TensorFlow's type of the op."""
        return self.schema.type

    def in_form_of_result(self, result: Any) -> Any:
        """Return a replacement's result as tensors: a list for several outputs, None for none."""
        if isinstance(result, (list, tuple)):
            return [_as_tensor(value) for value in result]
        return None if result is None else _as_tensor(result)

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op; if tools may have routines for its backward ops, record it on the tapes with a mark.

        Inputs that are not the call's become tensors. Ops in `UNSTOPPABLE` get no mark.
        """
        # TensorFlow converts an input that is not a tensor by calling the op a second time, which tools would
        # see as another op.
        if inputs is not self.inputs:
            inputs = [
                _as_tensor(value, original) for value, original in zip(inputs, self.inputs, strict=True)
            ]
        marking = local.marking  # None without such tools
        if marking is None or self.schema.type in UNSTOPPABLE:
            return self.run(inputs)
        local.marking = None  # an op that this op calls gets its own marks
        try:
            result, output_tensors = self.run_unrecorded(inputs)
        finally:
            local.marking = marking
        attributes = dict(zip(self.attrs[::2], self.attrs[1::2], strict=True))
        # Gradient functions read types and list lengths from the attributes, which the fast path infers
        # natively.
        inferred_attributes = self.schema.infer_attributes(inputs, attributes)
        attrs = self.attrs + tuple(
            entry for name_and_value in inferred_attributes.items() for entry in name_and_value
        )
        record_on_tapes(self.schema.type, flatten(inputs), attrs, output_tensors, marking.mark())
        return result

    def invoke_for_replacement(self, inputs: Sequence[Any]) -> Any:
        """Run the op for a replacement; return a single output without a list around it."""
        values, _ = self.outputs(self.invoke(list(inputs)))
        return values[0] if len(values) == 1 else values

    def backward_op(self) -> TensorFlowOperation:
        """Return the op as a backward op with its attributes: a context has those of the forward op."""
        return TensorFlowOperation(self.schema.type, attributes=self.schema.with_defaults(self.attrs))

    def outputs(self, result: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return a result as a list of outputs, and a function that restores the result's form."""
        return self.schema.split_outputs(result, self.attributes)

    def flatten_result(self, result: Any) -> list[Any]:
        """Return the tensors of a result."""
        if result is None:
            return []
        return flatten(result) if isinstance(result, (list, tuple)) else [result]

    def restore_result(self, result: Any, tensors: list[Any]) -> Any:
        """Return tensors in the form of a result."""
        if not isinstance(result, (list, tuple)):
            return tensors[0] if tensors else None
        return with_structure_of(result, iter(tensors))

    def group_inputs(self, tensors: list[Any]) -> list[Any]:
        """Return tensors in the form of the op's inputs."""
        inputs: list[Any] = with_structure_of(self.inputs, iter(tensors))
        return inputs

    @abstractmethod
    def run(self, inputs: list[Any]) -> Any:
        """Run the op as TensorFlow would."""

    @abstractmethod
    def run_unrecorded(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Run the op without a tape; return the result in its form, and flat."""


class FastCall(EagerCall):
    """A call of `TFE_Py_FastPathExecute`.

    args: context, type and name, then the inputs, then names and values of attributes in turn.
    """

    __slots__ = ("_context_type_name", "_execute")

    def __init__(
        self, schema: Schema, execute: Execute, args: tuple[Any, ...], identities: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(schema, identities)
        self._execute = execute
        self._context_type_name = args[:3]
        self.inputs = list(args[3 : 3 + schema.input_count])
        self.attrs = args[3 + schema.input_count :]

    def run(self, inputs: list[Any]) -> Any:
        """Run the op, which TensorFlow's fast path records; convert `attrs` if the fast path needs that."""
        try:
            return self._execute((*self._context_type_name, *inputs, *self.attrs))
        except core._FallbackException:
            # An attribute needs conversion, such as "float32" to a type. TensorFlow's Python code would
            # convert it and call `execute`, which the driver would take for another call of the op.
            self.attrs = self.schema.convert_attributes(self.attrs)
            return self._execute((*self._context_type_name, *inputs, *self.attrs))

    def run_unrecorded(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Run the op while recording on tapes is stopped; return its result, and the result's tensors."""
        if pywrap_tfe.TFE_Py_TapeSetIsStopped():
            result = self.run(inputs)
        else:
            # The fast path records the op by itself; recording is stopped to record it with the mark instead.
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
            try:
                result = self.run(inputs)
            finally:
                pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        if result is None:
            return None, []
        return result, flatten(result) if isinstance(result, list) else [result]


class SlowCall(EagerCall):
    """A call of `execute.execute`, whose caller would record it on the tapes."""

    __slots__ = ("_ctx", "_execute", "_name", "_output_count", "_type")

    def __init__(
        self, schema: Schema, execute: Execute, args: tuple[Any, ...], identities: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(schema, identities)
        self._execute = execute
        self._type, self._output_count, tensors, attrs, self._ctx, self._name = args
        self.attrs = tuple(attrs) if attrs else ()
        attributes = dict(zip(self.attrs[::2], self.attrs[1::2], strict=True))
        self.inputs = schema.group_inputs(tensors, attributes)

    def in_form_of_result(self, result: Any) -> Any:
        """Return a replacement's result as a flat list of tensors, which the caller unpacks.

        Keeps the caller from recording this op, since the replacement's ops record themselves.
        """
        local.op_is_recorded = True
        tensors = super().in_form_of_result(result)
        return [] if tensors is None else flatten([tensors])

    def outputs(self, result: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return a flat result as a list of outputs, and a function that makes a list of outputs flat."""
        if not isinstance(result, list):
            result = flatten([result])
        return self.schema.group_outputs(result, self.attributes), flatten

    def run(self, inputs: list[Any]) -> Any:
        """Run the op and record it on the tapes, without a mark."""
        result, output_tensors = self.run_unrecorded(inputs)
        if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            record_on_tapes(self.schema.type, flatten(inputs), self.attrs, output_tensors, mark=None)
        return result

    def run_unrecorded(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Run the op without recording it; the caller of `execute` does not record it either."""
        tensors = flatten(inputs)
        result = self._execute((self._type, self._output_count, tensors, self.attrs, self._ctx, self._name))
        local.op_is_recorded = True
        return result, list(result)


def _as_tensor(value: Any, original: Any = None) -> Any:
    """Convert a routine's result to a tensor; of the dtype of `original` if the result does not have one."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value
    if isinstance(value, (list, tuple)) and isinstance(original, (list, tuple)):
        return [_as_tensor(element, original[0] if original else None) for element in value]
    return tf.convert_to_tensor(value, dtype_hint=getattr(original, "dtype", None))


def with_structure_of(structure: Any, tensors: Iterator[Any]) -> Any:
    """Return the next tensors in the nested lists of `structure`; its tuples become lists."""
    if isinstance(structure, (list, tuple)):
        return [with_structure_of(element, tensors) for element in structure]
    return next(tensors)


def record_on_tapes(
    type: str, inputs: list[Any], attrs: tuple[Any, ...], outputs: list[Any], mark: TapeMark | None
) -> None:
    """Record an op on the tapes, with or without a mark, by which backward passes find its execution.

    The outputs get the mark, too.
    """
    if mark is not None:
        # A tape passes attributes to the gradient function unread, so the mark lives and dies with the tape's
        # record.
        attrs = (*attrs, MARK, mark)
        mark.record_tensors(inputs, outputs)
    pywrap_tfe.TFE_Py_RecordGradient(type, inputs, attrs, outputs, ops.get_name_scope())


READS = frozenset({"ReadVariableOp", "Identity", "Cast", "Reshape", "Transpose"})
"""Ops whose result is the value of a variable, cast or rearranged, if their first input is."""


class Variable:
    """A variable among the arguments of a call."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, handle: Any, forget: Callable[[Any], None]) -> None:
        # An eager handle is freed with its variable; the id of a freed handle is not used again.
        self._handle = weakref.ref(handle, forget)

    @property
    def handle(self) -> Any:
        """The variable's handle while it lives, else None."""
        return self._handle()


class VariableTable:
    """The variables that ops have used; makes `Variable` a type whose objects enter ids.

    reads_by_id: for a living tensor, a weak reference to it, and the variable that it was read from.
    """

    def __init__(self) -> None:
        self._variable_by_handle_id: dict[int, Variable] = {}
        self.reads_by_id: dict[int, tuple[Any, Variable]] = {}
        interceptor.add_identity_type(Variable)

    def variable_of(self, tensor: Any) -> Variable | None:
        """Return the variable that a tensor is the handle of or was read from; None for other tensors.

        A handle's variable is created at its first use, and dropped with the handle.
        """
        tensor_id = tensor._id
        if tensor_id in self.reads_by_id:
            _, variable = self.reads_by_id[tensor_id]
            return variable
        if tensor._datatype_enum() != _RESOURCE:
            return None
        if tensor_id not in self._variable_by_handle_id:
            forget = partial(self._forget_handle, tensor_id)  # called when the handle dies
            self._variable_by_handle_id[tensor_id] = Variable(tensor, forget)
        return self._variable_by_handle_id[tensor_id]

    def _forget_handle(self, handle_id: int, _: Any) -> None:
        self._variable_by_handle_id.pop(handle_id, None)

    def record_read(self, tensor: Any, variable: Variable) -> None:
        """Record the variable that a tensor was read from, until the tensor dies."""
        tensor_id, reads_by_id = tensor._id, self.reads_by_id
        reads_by_id[tensor_id] = weakref.ref(tensor, lambda _: reads_by_id.pop(tensor_id, None)), variable


_RESOURCE = 20  # DT_RESOURCE
variables = VariableTable()
