"""Eager computation of a graph's operation, for the `original` of a replacement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from amanda.errors import RoutineError


def eager_computation(op: tf.Operation) -> Callable[[Sequence[Any]], Any]:
    """Return a function that computes an operation eagerly from its inputs, with its attributes."""
    kind, definition = op.type, op.op_def
    inferred = {
        name
        for argument in definition.input_arg
        for name in (argument.type_attr, argument.number_attr, argument.type_list_attr)
    }
    attributes = {
        attribute.name: op.get_attr(attribute.name)
        for attribute in definition.attr
        if attribute.name not in inferred
    }
    names = [argument.name for argument in definition.input_arg]

    def compute(inputs: Sequence[Any]) -> Any:
        function = getattr(tf.raw_ops, kind, None)
        if function is None or len(inputs) != len(names):
            raise RoutineError(
                f"{kind} cannot be computed by itself: it is no op of tf.raw_ops"
                if function is None
                else f"{kind} takes {len(names)} inputs ({', '.join(names)}), not {len(inputs)}"
            )
        arguments = {**dict(zip(names, inputs, strict=True)), **attributes}
        python_names = _python_names(function, list(arguments))
        return function(**{python_names.get(name, name): value for name, value in arguments.items()})

    return compute


def _python_names(function: Callable[..., Any], names: Sequence[str]) -> dict[str, str]:
    """Return Python's names of the arguments that have other names in TensorFlow's OpDef."""
    parameters = [name for name in inspect.signature(function).parameters if name != "name"]
    renamed = [name for name in names if name not in parameters]
    python_only = [name for name in parameters if name not in names]
    return dict(zip(renamed, python_only, strict=False))
