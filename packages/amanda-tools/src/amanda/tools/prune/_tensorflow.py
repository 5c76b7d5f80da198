"""TensorFlow: masks are computed with arrays, which on the host share the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from amanda import interceptor
from amanda.tools.prune import _numpy
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._numpy import Array

plain, row, lowest_dropped, ranks = _numpy.plain, _numpy.row, _numpy.lowest_dropped, _numpy.ranks
like, numbers, stored = _numpy.like, _numpy.numbers, _numpy.stored


def as_mask(kept: Any, weight: Any) -> Any:
    """A mask of 0 and 1 in the weight's own type, on its device."""
    import tensorflow as tf

    with tf.device(weight.device):
        return tf.cast(tf.constant(np.asarray(kept)), weight.dtype)


def identity(holder: Any) -> Any:
    """What names a variable, from its handle, or in a session's graph the tensor that makes it."""
    op = getattr(holder, "op", None)
    return interceptor.ordinal(holder) if op is None else (interceptor.ordinal(op.graph), op.name)


def part(holder: Any, weight: Any) -> None:
    """Which part of a variable a weight is: all of it."""


def variables(model: Any) -> Iterator[tuple[Any, Callable[[None, Callable[[Array], Array]], None]]]:
    """The identities of a model's or a list's variables, each with what changes its value.

    Raises PruneError where there are none.
    """
    found = next((getattr(model, name) for name in ("weights", "variables") if hasattr(model, name)), model)
    try:
        listed = [_variable(one) for one in found]
    except (TypeError, AttributeError) as error:
        raise PruneError(
            f"{type(model).__name__} has no variables; give a model, a layer, or a list of variables"
        ) from error
    for variable in listed:
        holder = variable.handle if hasattr(variable, "handle") else variable.op.outputs[0]
        yield identity(holder), _changing(variable)


def _variable(given: Any) -> Any:
    """TensorFlow's variable behind one of Keras."""
    value = getattr(given, "value", None)
    return given if value is None or callable(value) else value


def _changing(variable: Any) -> Callable[[None, Callable[[Array], Array]], None]:
    def change(part: None, changed: Callable[[Array], Array]) -> None:
        import tensorflow as tf

        if hasattr(variable, "numpy") and tf.executing_eagerly():
            variable.assign(changed(variable.numpy()))
            return
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise PruneError(
                f"{variable.name} belongs to a session's graph; finalize within `with session.as_default():`"
            )
        variable.load(changed(session.run(variable)), session)

    return change
