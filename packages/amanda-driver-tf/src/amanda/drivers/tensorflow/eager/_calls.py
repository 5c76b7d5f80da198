"""Calls of ops as the tools see them, by the two ways in which Python makes them."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from amanda.backend import Call
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import core
from tensorflow.python.framework import ops

from .._operation import Operation
from ._schema import Schema, flattened
from ._state import MARK, Mark, local
from ._variables import variables

Execute = Callable[[tuple[Any, ...]], Any]

UNSTOPPABLE = frozenset({"EagerPyFunc"})
"""Ops that keep a tape of their own while they run."""


class EagerCall(Call):
    """One call: inputs in the order of the op's schema.

    identities: variables that the call was given, which are read or written.
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
        self.mutable: Sequence[int] = schema.written
        self.targets = ()

    def attributes(self) -> dict[str, Any]:
        """The op's attributes by name, types and numbers of tensors included."""
        given = self.schema.completed(self.attrs)
        return {**given, **self.schema.inferred(self.inputs, given)}

    def parameters(self) -> Sequence[int]:
        """Positions of the inputs that were read of a variable."""
        return tuple([i for i, one in enumerate(self.inputs) if getattr(one, "_id", None) in variables.read])

    def op_type(self) -> str:
        """TensorFlow's type of the op."""
        return self.schema.type

    def formed(self, result: Any) -> Any:
        """A replacement's result as tensors: a list where the op has several outputs."""
        if isinstance(result, (list, tuple)):
            return [_tensor(one) for one in result]
        return None if result is None else _tensor(result)

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op; marked on the tapes where its backward ops are wanted."""
        if inputs is not self.inputs:  # or TensorFlow would convert them, and call the op anew
            inputs = [_tensor(one, known) for one, known in zip(inputs, self.inputs, strict=True)]
        made = local.made
        if made is None or self.schema.type in UNSTOPPABLE:
            return self.run(inputs)
        local.made = None  # what the op calls in turn is an op of its own
        try:
            result, results = self.run_unrecorded(inputs)
        finally:
            local.made = made
        given = dict(zip(self.attrs[::2], self.attrs[1::2], strict=True))
        inferred = self.schema.inferred(inputs, given)
        attrs = self.attrs + tuple(one for pair in inferred.items() for one in pair)
        record(self.schema.type, flattened(inputs), attrs, results, made.mark())
        return result

    def compute(self, inputs: Sequence[Any]) -> Any:
        """The same for a replacement: a single output as itself."""
        values, _ = self.outputs(self.invoke(list(inputs)))
        return values[0] if len(values) == 1 else values

    def backward_op(self) -> Operation:
        """The op as a backward op, which tells its attributes itself: a context's are the forward op's."""
        return Operation(self.schema.type, attributes=self.schema.completed(self.attrs))

    def outputs(self, result: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """A result as a list of outputs, and how to put such a list back into its form."""
        return self.schema.output_form(result, self.attributes)

    def flat(self, result: Any) -> list[Any]:
        """The tensors of a result."""
        return [] if result is None else flattened(result) if isinstance(result, (list, tuple)) else [result]

    def unflat(self, result: Any, tensors: list[Any]) -> Any:
        """Tensors in the form of a result."""
        if not isinstance(result, (list, tuple)):
            return tensors[0] if tensors else None
        return like(result, iter(tensors))

    def regrouped(self, tensors: list[Any]) -> list[Any]:
        """Tensors as the op's inputs."""
        inputs: list[Any] = like(self.inputs, iter(tensors))
        return inputs

    @abstractmethod
    def run(self, inputs: list[Any]) -> Any:
        """Run the op as TensorFlow would."""

    @abstractmethod
    def run_unrecorded(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Run the op without a tape; the result in its form, and flat."""


class FastCall(EagerCall):
    """A call of `TFE_Py_FastPathExecute`."""

    __slots__ = ("_execute", "_head")

    def __init__(
        self, schema: Schema, execute: Execute, args: tuple[Any, ...], identities: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(schema, identities)
        self._execute = execute
        self._head = args[:3]
        self.inputs = list(args[3 : 3 + schema.count])
        self.attrs = args[3 + schema.count :]

    def run(self, inputs: list[Any]) -> Any:
        """Run the op, which records itself."""
        try:
            return self._execute((*self._head, *inputs, *self.attrs))
        except core._FallbackException:  # an attribute is not of its type: Python would call the op anew
            self.attrs = self.schema.converted(self.attrs)
            return self._execute((*self._head, *inputs, *self.attrs))

    def run_unrecorded(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Run the op where no tape hears."""
        if pywrap_tfe.TFE_Py_TapeSetIsStopped():
            result = self.run(inputs)
        else:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
            try:
                result = self.run(inputs)
            finally:
                pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        if result is None:
            return None, []
        return result, flattened(result) if isinstance(result, list) else [result]


class SlowCall(EagerCall):
    """A call of `execute.execute`, whose caller would record it on the tapes."""

    __slots__ = ("_ctx", "_execute", "_name", "_outputs", "_type")

    def __init__(
        self, schema: Schema, execute: Execute, args: tuple[Any, ...], identities: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(schema, identities)
        self._execute = execute
        self._type, self._outputs, tensors, attrs, self._ctx, self._name = args
        self.attrs = tuple(attrs) if attrs else ()
        given = dict(zip(self.attrs[::2], self.attrs[1::2], strict=True))
        self.inputs = schema.grouped_inputs(tensors, given)

    def formed(self, result: Any) -> Any:
        """The same as a flat list, which the caller unpacks."""
        local.recorded = True  # a replacement's ops record themselves
        formed = super().formed(result)
        return [] if formed is None else flattened([formed])

    def outputs(self, result: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The same for a result that is a flat list."""
        if not isinstance(result, list):
            result = flattened([result])
        return self.schema.grouped_outputs(result, self.attributes), flattened

    def run(self, inputs: list[Any]) -> Any:
        """Run the op and record it."""
        result, results = self.run_unrecorded(inputs)
        if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            record(self.schema.type, flattened(inputs), self.attrs, results, None)
        return result

    def run_unrecorded(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Run the op, which nothing records."""
        tensors = flattened(inputs)
        result = self._execute((self._type, self._outputs, tensors, self.attrs, self._ctx, self._name))
        local.recorded = True
        return result, list(result)


def _tensor(value: Any, known: Any = None) -> Any:
    """A tensor for what a routine gave back; of the type of a known one where it tells none itself."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value
    if isinstance(value, (list, tuple)) and isinstance(known, (list, tuple)):
        return [_tensor(one, known[0] if known else None) for one in value]
    return tf.convert_to_tensor(value, dtype_hint=getattr(known, "dtype", None))


def like(form: Any, tensors: Iterator[Any]) -> Any:
    """The next tensors in the form of nested lists."""
    if isinstance(form, (list, tuple)):
        return [like(one, tensors) for one in form]
    return next(tensors)


def record(
    type: str, inputs: list[Any], attrs: tuple[Any, ...], outputs: list[Any], mark: Mark | None
) -> None:
    """Record an op on the tapes, with a mark that its backward ops are found by."""
    if mark is not None:
        attrs = (*attrs, MARK, mark)
        mark.know(inputs, outputs)
    pywrap_tfe.TFE_Py_RecordGradient(type, inputs, attrs, outputs, ops.get_name_scope())
