"""Interception of ops: TensorFlow's fast path, and `execute` once it has converted the inputs."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

import tensorflow as tf
from amanda import interceptor
from amanda.backend import Attributes, EagerDriver
from amanda.interceptor import Detour
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, core, execute
from tensorflow.python.framework.ops import EagerTensor

from ._calls import FastCall, SlowCall
from ._schema import Schema, Schemas
from ._state import NOBODY, local
from ._variables import READS, Variable, variables

Backward = Callable[[Any, Any], Any]


NUMBERS = frozenset({int, float, bool, list, tuple, np.ndarray})
"""Types of values that are made tensors here; others are TensorFlow's to convert."""

_FUNCTION = "__"
"""Beginning of the names of traced functions; no type of op begins so."""


class Entry:
    """One type of op: its schema and the detours of its calls."""

    __slots__ = ("count", "fast", "quick", "schema", "slow", "told")

    def __init__(self, type: str, schema: Schema | None, interception: "Interception") -> None:
        self.schema = schema
        self.count = schema.count if schema is not None else 0
        self.quick = schema is not None and not (
            schema.takes_variable or schema.has_functions or any(schema.lists)
        )
        if schema is not None:
            self.fast = interception.detour(type, partial(interception.fast_path), schema)
            self.told = interception.detour(type, partial(_told, interception.fast_path), schema)
            self.slow = interception.detour(type, partial(executed, interception.execute), schema)


class Entries(dict[str, Entry]):
    """Entries by type of op."""

    def __init__(self, interception: "Interception") -> None:
        self._interception = interception
        self._schemas = Schemas()

    def __missing__(self, type: str) -> Entry:
        entry = Entry(type, self._schemas[type], self._interception)
        if type in self._schemas:
            self[type] = entry
        return entry


class Interception:
    """Stand-ins for the fast path and for `execute` while the driver is attached.

    driver: whom calls are brought to.  backward: runs a call within a backward pass.
    """

    def __init__(self, driver: EagerDriver, backward: Backward) -> None:
        self._driver = driver
        self._backward = backward
        self.fast_path = pywrap_tfe.TFE_Py_FastPathExecute
        self.execute = execute.quick_execute
        self._entries = Entries(self)

    def enter(self, attributes: Attributes) -> None:
        """Take the places until `attributes` are restored."""
        quick, other = execute.quick_execute, execute.execute
        if not attributes.serves_again(pywrap_tfe, "TFE_Py_FastPathExecute"):
            self._follow(pywrap_tfe.TFE_Py_FastPathExecute, self.execute)
        if not attributes.serves_again(execute, "quick_execute"):
            self._follow(self.fast_path, quick)
        attributes.set(pywrap_tfe, "TFE_Py_FastPathExecute", self._stand_in_for_fast_path())
        attributes.set(execute, "quick_execute", self._stand_in_for_execute())
        if other is quick:
            attributes.set(execute, "execute", self._stand_in_for_execute())
        elif other is not execute.execute_with_callbacks:  # which calls the one above
            patched = Interception(self._driver, self._backward)
            patched._follow(self.fast_path, other)
            attributes.set(execute, "execute", patched._stand_in_for_execute())
        attributes.set(execute, "record_gradient", _stand_in_for_record(execute.record_gradient))

    def _follow(self, fast_path: Callable[..., Any], execute: Callable[..., Any]) -> None:
        """Call these from now on; a program may have set others since the last scope."""
        if fast_path is not self.fast_path or execute is not self.execute:
            self.fast_path, self.execute = fast_path, execute
            self._entries = Entries(self)

    def detour(self, type: str, target: Callable[..., Any], schema: Schema) -> Detour:
        """A detour of calls of one op."""
        return Detour(self._driver.site(target, schema, type))

    def run_fast(self, args: tuple[Any, ...]) -> Any:
        """TensorFlow's own fast path."""
        return self.fast_path(*args)

    def run_slow(self, args: tuple[Any, ...]) -> Any:
        """TensorFlow's own `execute`."""
        return self.execute(*args)

    def _stand_in_for_fast_path(self) -> Callable[..., Any]:
        entries, special, original = self._entries, self._special, self.fast_path
        read = variables.read

        def fast_path(ctx: Any, type: str, name: str | None, *args: Any) -> Any:
            frame = local.frame
            if frame is NOBODY:
                return original(ctx, type, name, *args)
            entry = entries[type]
            if entry.quick and frame is None and local.under_way is None and local.made is None:
                for value in args[: entry.count]:
                    if value.__class__ is not EagerTensor or value._id in read:
                        break
                else:
                    return entry.fast(ctx, type, name, *args)
            return special(entry, ctx, type, name, args)

        return fast_path

    def _special(self, entry: Entry, ctx: Any, type: str, name: str | None, args: tuple[Any, ...]) -> Any:
        activation, schema = interceptor.active(), entry.schema
        if schema is None or (activation is None and local.made is None):
            return self.fast_path(ctx, type, name, *args)
        met: list[Variable] = []
        inputs = self._inputs(schema, args[: entry.count], met)
        args = (ctx, type, name, *inputs, *args[entry.count :])
        if activation is None:  # a replacement computes
            return FastCall(schema, self.run_fast, args).invoke(inputs)
        if local.under_way is not None:
            return self._backward(activation.state, FastCall(schema, self.run_fast, args))
        if not met:
            return entry.fast(*args)
        result = entry.told(*args, variables=tuple(met))
        if type in READS and variables.known(inputs[0]) is not None:
            variables.know(result, met[0])
        return result

    def _inputs(self, schema: Schema, given: tuple[Any, ...], met: list[Variable]) -> list[Any]:
        """Tensors for the inputs that a call was given.

        Raises _FallbackException where TensorFlow has to say which: it calls `execute` with what it made.
        """
        inputs: list[Any] = list(given)
        numbers = False
        for i, value in enumerate(given):
            if schema.lists[i]:
                if not isinstance(value, (list, tuple, EagerTensor)):
                    raise core._FallbackException
                inputs[i] = [_read(one, met) for one in value]  # of a tensor its parts, as the fast path does
            elif value.__class__ is EagerTensor or isinstance(value, tf.Variable):
                inputs[i] = _read(value, met)
            else:
                numbers = True
        if numbers:
            for i, value in enumerate(inputs):
                if value.__class__ is not EagerTensor and not schema.lists[i]:
                    inputs[i] = _converted(value, schema.type_of(i, inputs))
        return inputs

    def _stand_in_for_execute(self) -> Callable[..., Any]:
        def quick_execute(
            op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: str | None = None
        ) -> Any:
            activation = interceptor.active()
            type = op_name if isinstance(op_name, str) else op_name.decode()
            seen = (activation is not None or local.made is not None) and not type.startswith(_FUNCTION)
            schema = self._entries[type].schema if seen else None
            args = (op_name, num_outputs, inputs, attrs, ctx, name)
            if (
                schema is None
                or local.frame is NOBODY
                or (inputs and not all(one.__class__ is EagerTensor for one in inputs))
            ):
                return self.execute(*args)
            outer, local.recorded = local.recorded, False
            if activation is None:
                call = SlowCall(schema, self.run_slow, args)
                result = call.invoke(call.inputs)
            else:
                result = self._executed_op(activation, type, schema, args)
            recorded, local.recorded = local.recorded, outer  # this may be a routine's op, within another
            if recorded:
                local.result = None if pywrap_tfe.TFE_Py_TapeSetIsEmpty() else result
            return result

        return quick_execute

    def _executed_op(self, activation: Any, type: str, schema: Schema, args: tuple[Any, ...]) -> Any:
        if local.under_way is not None:
            return self._backward(activation.state, SlowCall(schema, self.run_slow, args))
        met = [known for one in args[2] if (known := variables.known(one)) is not None]
        if not met:
            return self._entries[type].slow(*args)
        result = self._entries[type].slow(*args, variables=tuple(met))
        if type in READS and variables.known(args[2][0]) is not None:
            variables.know(result[0], met[0])
        return result


def _stand_in_for_record(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def record_gradient(op_name: Any, inputs: Any, attrs: Any, outputs: Any) -> None:
        own, local.result = local.result, None
        if own is None or outputs is not own:  # or it has been recorded
            original(op_name, inputs, attrs, outputs)

    return record_gradient


def _told(fast_path: Callable[..., Any], *args: Any, variables: Any = ()) -> Any:
    return fast_path(*args)


def executed(execute: Callable[..., Any], *args: Any, variables: Any = ()) -> Any:
    """A call of `execute`, whose detour is told of variables."""
    return execute(*args)


def _read(value: Any, met: list[Variable]) -> Any:
    """A tensor, or what a variable holds; the variable is met."""
    if value.__class__ is EagerTensor:
        if (known := variables.known(value)) is not None:
            met.append(known)
        return value
    if isinstance(value, tf.Variable):
        return _read(value.value(), met)  # one ReadVariableOp, as the fast path does
    raise core._FallbackException


def _converted(value: Any, type: int) -> Any:
    if not type or value.__class__ not in NUMBERS:
        raise core._FallbackException
    try:
        if value.__class__ is np.ndarray:
            value = value.copy()  # or the tensor would share its memory
        runtime = context.context()
        runtime.ensure_initialized()  # a process whose first op this is would crash
        return EagerTensor(value, runtime.device_name, type)
    except (TypeError, ValueError):
        raise core._FallbackException from None
