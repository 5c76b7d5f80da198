"""Eager computation of a graph's operation, for a routine that stands in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from amanda.errors import RoutineError


def original(op: tf.Operation) -> Callable[[Sequence[Any]], Any]:
    """A function of an operation's inputs, in their order; its attributes are those that it has now."""
    kind, definition = op.type, op.op_def
    inferred = {
        name
        for argument in definition.input_arg
        for name in (argument.type_attr, argument.number_attr, argument.type_list_attr)
    }
    attributes = {one.name: op.get_attr(one.name) for one in definition.attr if one.name not in inferred}
    names = [argument.name for argument in definition.input_arg]

    def compute(inputs: Sequence[Any]) -> Any:
        function = getattr(tf.raw_ops, kind, None)
        if function is None or len(inputs) != len(names):
            raise RoutineError(
                f"{kind} cannot be computed by itself: it is no op of tf.raw_ops"
                if function is None
                else f"{kind} takes {len(names)} inputs ({', '.join(names)}), not {len(inputs)}"
            )
        given = {**dict(zip(names, inputs, strict=True)), **attributes}
        renamed = _renamed(function, list(given))
        return function(**{renamed.get(name, name): value for name, value in given.items()})

    return compute


def _renamed(function: Callable[..., Any], names: Sequence[str]) -> dict[str, str]:
    """Return what Python calls arguments that have another name in TensorFlow's definition of the op."""
    parameters = [name for name in inspect.signature(function).parameters if name != "name"]
    ours = [name for name in names if name not in parameters]
    theirs = [name for name in parameters if name not in names]
    return dict(zip(ours, theirs, strict=False))
