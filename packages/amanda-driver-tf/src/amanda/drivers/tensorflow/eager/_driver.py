"""The driver of eager mode, and its stand-ins for TensorFlow's fast path and for `execute`."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial, wraps
from typing import Any

import numpy as np

import tensorflow as tf
from amanda import interceptor
from amanda.backend import Call, EagerDriver, OpFacts, Patches, SelfTestProgram, Trace
from amanda.interceptor import Detour, Site
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, core, execute
from tensorflow.python.framework import ops
from tensorflow.python.framework.ops import EagerTensor

from .._layers import enclose_modules, layer_name_paths, module_path
from .._requirements import NEWEST_TESTED, PRIVATE_NAMES, eager_self_test
from .._tensors import EagerTensorOps, allow_tapes_in_routines
from ._calls import READS, EagerCall, FastCall, SlowCall, Variable, variables
from ._schema import Schema, Schemas, flatten
from ._state import UNMARKED, Marking, TapeMark, local
from ._tape import Tape
from ._unseen_ops import DATASET_FUNCTIONS_REPORT, Datasets


class TensorFlowEagerDriver(EagerTensorOps, EagerDriver):
    """Instruments TensorFlow's eager ops: patches the functions that call ops, and describes their calls."""

    api = 2
    framework = "tensorflow"
    packages = ("keras", "tf_keras")
    modes = ("eager",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES["eager"]
    identity_types = (Variable,)

    def __init__(self) -> None:
        self._datasets = Datasets()
        self._attached = False

    @cached_property
    def _tape(self) -> Tape:
        return Tape(self)

    @cached_property
    def _interception(self) -> "Interception":
        return Interception(self, self._tape.run_in_backward_pass)

    def attach(self) -> None:
        """Patch the functions by which Python calls ops, tapes, dataset iterators, and calls of modules."""
        self._attached = True
        self._interception.patch(self.patches)
        self._tape.patch(self.patches)
        allow_tapes_in_routines(self.patches)
        self._datasets.patch(self.patches)
        enclose_modules(self.patches)

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        super().detach()
        if self._attached:
            # Native code holds the stand-ins of the tapes until TensorFlow's functions are registered again.
            self._tape.register()
            self._attached = False

    def self_test_program(self) -> SelfTestProgram | None:
        """Return a program of one op and its gradient; None where eager mode has been switched off."""
        return eager_self_test()

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call with its inputs in the order of the op's schema."""
        # A site's target is a partial of one of two functions, which tell the forms of a call apart.
        call_class = SlowCall if site.target.func is call_execute else FastCall
        return call_class(site.op, site.invoke, args, kwargs.get("variables", ()))

    def uninstrumented_reason(self, site: Site) -> tuple[str, str] | None:
        """Return the part of a call that cannot be instrumented, and the reason; None if there is none."""
        if site.op.has_functions and "Dataset" in site.op.type:
            return DATASET_FUNCTIONS_REPORT
        if site.op.has_functions:
            return f"the functions of {site.op.type}", "TensorFlow's native code runs them as they are"
        return None

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op: its layer (among `subjects`) or name scope, and its variables."""
        facts = super().describe(call, subjects)
        facts.scope = module_path(subjects) if subjects else str(ops.get_name_scope())
        facts.scope_aliases = layer_name_paths(subjects)
        facts.variable_of = _variable_handle_of  # called by tools, with an input
        return facts

    def identity_values(self, call: Call) -> list[Any]:
        """Return the variables among a call's arguments."""
        return list(call.identities) if isinstance(call, EagerCall) else []

    def flatten_with_unreturned(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return a call's outputs by the op's schema, where a list of tensors is one; see `flatten`."""
        assert isinstance(call, EagerCall)
        return call.outputs(outputs)

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which of the input tensors a tape watches, as bits behind a 1; None if it watches none."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            return None
        tensors = [value for value in flatten(inputs) if value.__class__ is EagerTensor]
        if not pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop(tensors):
            return None
        # A leading 1 keeps leading zeros apart.
        bits = 1
        for tensor in tensors:
            bits = bits << 1 | pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([tensor])
        return bits

    def capture_backward_ops(self) -> Marking:
        """Return a context in which the ops that a tape records are marked."""
        return Marking()

    def attach_trace(self, trace: Trace, marking: Marking, values: list[Any]) -> None:
        """Store the trace in the marks."""
        for mark in marking.marks:
            mark.trace = trace

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` instead of `original`; its gradient belongs to the op that computed `original`."""
        replacement = super().straight_through(original, value)
        # The backward pass finds the op that computed a tensor by the tensor's id.
        maker = TapeMark.by_output_id.get(getattr(original, "_id", -1))
        if maker is not None and replacement is not original:
            TapeMark.by_output_id[replacement._id] = maker
        return replacement


def _variable_handle_of(value: Any) -> Any:
    """Return the handle of the variable that a tensor is the handle of or was read from, if any."""
    variable = variables.variable_of(value) if isinstance(value, EagerTensor) else None
    return None if variable is None else variable.handle


RunInBackwardPass = Callable[[Any, Any], Any]

NUMBERS = frozenset({int, float, bool, list, tuple, np.ndarray})
"""Types of values that the driver converts to tensors; TensorFlow converts the others."""

_FUNCTION_PREFIX = "__"
"""Prefix of the names of traced functions, which no type of op has."""


class OpDetours:
    """The schema of a type of op, and the detours of its calls; a call of a function has neither.

    A detour runs a call with the routines at its op.
    input_count: number of inputs.
    takes_plain_tensors: True if each input is a tensor, none a list or a variable.
    run_fast: detour of fast calls without variables.  run_with_variables: of those with variables.
    run_execute: detour of calls through `execute`.
    """

    __slots__ = (
        "input_count", "run_execute", "run_fast", "run_with_variables", "schema", "takes_plain_tensors",
    )  # fmt: skip

    def __init__(self, type: str, schema: Schema | None, interception: "Interception") -> None:
        self.schema = schema
        self.input_count = schema.input_count if schema is not None else 0
        self.takes_plain_tensors = schema is not None and not (
            schema.takes_variable or schema.has_functions or any(schema.lists)
        )
        if schema is not None:
            # Each op type has a site of its own, which needs a callable of its own.
            self.run_fast = interception.detour(type, partial(interception.fast_path), schema)
            self.run_with_variables = interception.detour(
                type, partial(_call_fast_path, interception.fast_path), schema
            )
            self.run_execute = interception.detour(type, partial(call_execute, interception.execute), schema)


class DetoursByType(dict[str, OpDetours]):
    """Detours by type of op, made at the first call of each type."""

    def __init__(self, interception: "Interception") -> None:
        self._interception = interception
        self._schemas = Schemas()

    def __missing__(self, type: str) -> OpDetours:
        """Return new detours of a type of op; not kept for a function's name, as functions come and go."""
        detours = OpDetours(type, self._schemas[type], self._interception)
        if type in self._schemas:
            self[type] = detours
        return detours


class Interception:
    """Stand-ins for the fast path and for `execute` while the driver is attached.

    driver: receives the calls.  run_in_backward_pass: runs a call within a backward pass.
    """

    def __init__(self, driver: EagerDriver, run_in_backward_pass: RunInBackwardPass) -> None:
        self._driver = driver
        self._run_in_backward_pass = run_in_backward_pass
        self.fast_path = pywrap_tfe.TFE_Py_FastPathExecute
        self.execute = execute.quick_execute
        self._detours_by_type = DetoursByType(self)

    def patch(self, patches: Patches) -> None:
        """Put the stand-ins into TensorFlow's modules until `patches` are restored.

        They call the functions that are there now, also those that the program has put there.
        """
        present_quick_execute, present_execute = execute.quick_execute, execute.execute
        # The stand-ins call what is there now; but a wrapper by the program around a stand-in of an earlier
        # scope would then call itself.
        if not patches.wraps_earlier_stand_in(pywrap_tfe, "TFE_Py_FastPathExecute"):
            self._use_functions(fast_path=pywrap_tfe.TFE_Py_FastPathExecute, execute=self.execute)
        if not patches.wraps_earlier_stand_in(execute, "quick_execute"):
            self._use_functions(fast_path=self.fast_path, execute=present_quick_execute)
        patches.set(pywrap_tfe, "TFE_Py_FastPathExecute", self._stand_in_for_fast_path())
        patches.set(execute, "quick_execute", self._stand_in_for_execute())
        if present_execute is present_quick_execute:
            patches.set(execute, "execute", self._stand_in_for_execute())
        # `execute_with_callbacks` calls `quick_execute`, so its ops are seen there already. A function of the
        # program's gets a stand-in of its own, which calls that function.
        elif present_execute is not execute.execute_with_callbacks:
            interception = Interception(self._driver, self._run_in_backward_pass)
            interception._use_functions(fast_path=self.fast_path, execute=present_execute)
            patches.set(execute, "execute", interception._stand_in_for_execute())
        patches.set(execute, "record_gradient", _stand_in_for_record_gradient(execute.record_gradient))

    def _use_functions(self, fast_path: Callable[..., Any], execute: Callable[..., Any]) -> None:
        """Call these functions from now on, by new detours; a program may have set others between scopes."""
        if fast_path is not self.fast_path or execute is not self.execute:
            self.fast_path, self.execute = fast_path, execute
            self._detours_by_type = DetoursByType(self)

    def detour(self, type: str, target: Callable[..., Any], schema: Schema) -> Detour:
        """Return a detour of the calls of an op."""
        return Detour(self._driver.site(target, schema, type))

    def call_fast_path(self, args: tuple[Any, ...]) -> Any:
        """Call TensorFlow's fast path."""
        return self.fast_path(*args)

    def call_execute(self, args: tuple[Any, ...]) -> Any:
        """Call TensorFlow's `execute`."""
        return self.execute(*args)

    def _stand_in_for_fast_path(self) -> Callable[..., Any]:
        """Stand-in for `TFE_Py_FastPathExecute`; a hot path.

        A call with plain tensors outside of a backward pass goes straight to its detour.
        """
        detours_by_type, original = self._detours_by_type, self.fast_path
        convert_and_run, reads_by_id = self._convert_and_run, variables.reads_by_id

        def fast_path(ctx: Any, type: str, name: str | None, *args: Any) -> Any:
            """Run the op by its detour; backward ops of an op that no scope has seen, as without tools."""
            gradient_call = local.gradient_call
            if gradient_call is UNMARKED:
                return original(ctx, type, name, *args)
            detours = detours_by_type[type]
            if (
                detours.takes_plain_tensors
                and gradient_call is None
                and local.backward_pass is None
                and local.marking is None  # else the op gets a mark
            ):
                for value in args[: detours.input_count]:
                    if value.__class__ is not EagerTensor or value._id in reads_by_id:
                        break
                else:
                    return detours.run_fast(ctx, type, name, *args)
            return convert_and_run(detours, ctx, type, name, args)

        return fast_path

    def _convert_and_run(
        self, detours: OpDetours, ctx: Any, type: str, name: str | None, args: tuple[Any, ...]
    ) -> Any:
        """Run a fast call with variables, numbers or lists among its inputs, or in a backward pass.

        The result of a read of a variable is recorded as the value of that variable. Ops of a replacement get
        marks. Outside of scopes, and for a call of a function, TensorFlow's fast path is called.
        """
        activation, schema = interceptor.active(), detours.schema
        if schema is None or (activation is None and local.marking is None):
            return self.fast_path(ctx, type, name, *args)
        argument_variables: list[Variable] = []
        inputs = self._convert_inputs(schema, args[: detours.input_count], argument_variables)
        args = (ctx, type, name, *inputs, *args[detours.input_count :])
        if activation is None:  # a replacement computes: its ops get the marks of the op
            return FastCall(schema, self.call_fast_path, args).invoke(inputs)
        if local.backward_pass is not None:
            return self._run_in_backward_pass(activation.state, FastCall(schema, self.call_fast_path, args))
        if not argument_variables:
            return detours.run_fast(*args)
        result = detours.run_with_variables(*args, variables=tuple(argument_variables))
        # The tensor stands for the variable in later ops, so that their ids and weights are found.
        if type in READS and variables.variable_of(inputs[0]) is not None:
            variables.record_read(result, argument_variables[0])
        return result

    def _convert_inputs(
        self, schema: Schema, values: tuple[Any, ...], argument_variables: list[Variable]
    ) -> list[Any]:
        """Return a call's inputs as tensors, and append the variables among them to `argument_variables`.

        Raises _FallbackException where only TensorFlow can convert an input: it then calls `execute` with the
        converted inputs.
        """
        inputs: list[Any] = list(values)
        has_other_values = False
        for i, value in enumerate(values):
            if schema.lists[i]:
                if not isinstance(value, (list, tuple, EagerTensor)):
                    raise core._FallbackException
                # A tensor stands for the list of its parts, as on the fast path.
                inputs[i] = [_as_tensor(element, argument_variables) for element in value]
            elif value.__class__ is EagerTensor or isinstance(value, tf.Variable):
                inputs[i] = _as_tensor(value, argument_variables)
            else:
                has_other_values = True
        # Numbers come last: their dtype may be that of a tensor among the inputs.
        if has_other_values:
            for i, value in enumerate(inputs):
                if value.__class__ is not EagerTensor and not schema.lists[i]:
                    inputs[i] = _number_as_tensor(value, schema.number_dtype_enum(i, inputs))
        return inputs

    def _stand_in_for_execute(self) -> Callable[..., Any]:
        """Stand-in for `quick_execute`: brings ops to the driver, and leaves calls of functions alone."""

        def quick_execute(
            op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: str | None = None
        ) -> Any:
            """Run an op by the driver; set `local.recorded_outputs` if the driver has recorded the op.

            Calls TensorFlow for functions, inputs of other types, outside of scopes and in unmarked passes.
            """
            activation = interceptor.active()
            type = op_name if isinstance(op_name, str) else op_name.decode()
            is_instrumented = activation is not None or local.marking is not None
            is_op = is_instrumented and not type.startswith(_FUNCTION_PREFIX)
            schema = self._detours_by_type[type].schema if is_op else None
            args = (op_name, num_outputs, inputs, attrs, ctx, name)
            if (
                schema is None
                or local.gradient_call is UNMARKED
                or (inputs and not all(value.__class__ is EagerTensor for value in inputs))
            ):
                return self.execute(*args)
            outer_op_is_recorded = local.op_is_recorded
            local.op_is_recorded = False
            if activation is None:  # a replacement computes: its ops get the marks of the op
                call = SlowCall(schema, self.call_execute, args)
                result = call.invoke(call.inputs)
            else:
                result = self._run_executed_op(activation, type, schema, args)
            is_recorded = local.op_is_recorded  # set by the call
            # This may be an op of a routine, around which another op is running.
            local.op_is_recorded = outer_op_is_recorded
            # The caller of `execute` would record the op a second time.
            if is_recorded:
                local.recorded_outputs = None if pywrap_tfe.TFE_Py_TapeSetIsEmpty() else result
            return result

        return quick_execute

    def _run_executed_op(self, activation: Any, type: str, schema: Schema, args: tuple[Any, ...]) -> Any:
        """Run a call of `execute` by its detour, or as a backward op; record the variable that it reads."""
        _, _, tensors, *_ = args
        if local.backward_pass is not None:
            return self._run_in_backward_pass(activation.state, SlowCall(schema, self.call_execute, args))
        argument_variables = [
            variable for tensor in tensors if (variable := variables.variable_of(tensor)) is not None
        ]
        if not argument_variables:
            return self._detours_by_type[type].run_execute(*args)
        result = self._detours_by_type[type].run_execute(*args, variables=tuple(argument_variables))
        if type in READS and variables.variable_of(tensors[0]) is not None:
            tensor_read = result[0]
            variables.record_read(tensor_read, argument_variables[0])
        return result


def _stand_in_for_record_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `execute.record_gradient`: skips ops that the driver has recorded itself."""

    @wraps(original)
    def record_gradient(op_name: Any, inputs: Any, attrs: Any, outputs: Any) -> None:
        """Record an op on the tapes, unless these are the outputs that `execute` has recorded last."""
        # Reset at once: they are the outputs of the last op alone.
        recorded_outputs, local.recorded_outputs = local.recorded_outputs, None
        is_recorded = recorded_outputs is not None and outputs is recorded_outputs
        if not is_recorded:
            original(op_name, inputs, attrs, outputs)

    return record_gradient


def _call_fast_path(fast_path: Callable[..., Any], *args: Any, variables: Any = ()) -> Any:
    """Call the fast path; the detour of the call reads the keyword `variables`."""
    return fast_path(*args)


def call_execute(execute: Callable[..., Any], *args: Any, variables: Any = ()) -> Any:
    """Call `execute`; the detour of the call reads the keyword `variables`."""
    return execute(*args)


def _as_tensor(value: Any, argument_variables: list[Variable]) -> Any:
    """Return a tensor as it is, and a `tf.Variable` as its value, which is read; append the variable, if any.

    Raises _FallbackException for other values.
    """
    if value.__class__ is EagerTensor:
        if (variable := variables.variable_of(value)) is not None:
            argument_variables.append(variable)
        return value
    if isinstance(value, tf.Variable):
        return _as_tensor(value.value(), argument_variables)  # one ReadVariableOp, as the fast path does
    raise core._FallbackException


def _number_as_tensor(value: Any, dtype_enum: int) -> Any:
    """Convert a number, list or array to a tensor of a dtype, as TensorFlow's fast path does.

    Raises _FallbackException for dtype 0, for other values, and where the conversion fails.
    """
    if not dtype_enum or value.__class__ not in NUMBERS:
        raise core._FallbackException
    try:
        if value.__class__ is np.ndarray:
            value = value.copy()  # or the tensor would share its memory
        runtime = context.context()
        runtime.ensure_initialized()  # else it crashes, if this is the first op of the process
        return EagerTensor(value, runtime.device_name, dtype_enum)
    except (TypeError, ValueError):
        # TensorFlow converts the value by its own rules, or raises its own error.
        raise core._FallbackException from None
