"""TensorFlow: masks are computed with arrays, which on the host share the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from amanda import interceptor
from amanda.tools.prune import _numpy
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._numpy import Array

Part = tuple[Sequence[int], Sequence[int], Sequence[int]] | None
"""The order of a variable's axes, the shape that it is given then, and its own; None for it as it is."""

_FORMING = frozenset({"Reshape", "Transpose"})
_PASSING = _FORMING | {"Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Switch"}

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


def held(holder: Any, weight: Any) -> tuple[Any, Part] | None:
    """What names the variable that a weight was read of, and in which form; None where that is not known."""
    is_symbol = getattr(weight, "op", None) is not None
    form = _form_in_graph(weight) if is_symbol else _form_of_value(holder, weight)
    return None if form is NotImplemented else (identity(holder), form)


def _form_in_graph(weight: Any) -> Any:
    """What the operations between a variable and its symbol come to."""
    import tensorflow as tf

    steps, tensor = [], weight
    while tensor.op.type in _PASSING:
        if tensor.op.type in _FORMING:
            given = tf.get_static_value(tensor.op.inputs[1])
            steps.append((tensor.op.type, tensor.shape.as_list() if given is None else given))
            start = tensor.op.inputs[0].shape
        tensor = tensor.op.inputs[0]
    if not steps:
        return None
    numbered = np.arange(start.num_elements()).reshape(start)
    made = numbered
    for kind, form in reversed(steps):
        made = made.reshape(form) if kind == "Reshape" else made.transpose(form)
    return _form(numbered, made)


def _form_of_value(holder: Any, weight: Any) -> Any:
    """What turns the present value of a variable into that of a weight."""
    import tensorflow as tf

    dtype = holder._handle_data.shape_and_type[0].dtype
    value = tf.cast(tf.raw_ops.ReadVariableOp(resource=holder, dtype=dtype), weight.dtype)
    return _form(value.numpy(), weight.numpy())


def _form(value: Array, wanted: Array) -> Any:
    """The order of axes in which a value reshaped is what is wanted; None where it is that already."""
    if value.shape == wanted.shape and np.array_equal(value, wanted):
        return None
    for axes in permutations(range(value.ndim)):
        if np.array_equal(value.transpose(axes).reshape(wanted.shape), wanted):
            return axes, wanted.shape, value.shape
    return NotImplemented


def overlaps(part: Part, other: Part, whole: Any) -> bool:
    """Whether two forms of a variable have elements in common: they have all."""
    return True


def covers(part: Part, other: Part, whole: Any) -> bool:
    """Whether a form of a variable has every element of another: each has all."""
    return True


def carried(pieces: Sequence[tuple[Array, Part]], part: Part, whole: Any, fill: Any) -> Array:
    """What a form of a variable has of values in another form of it."""
    ((values, form),) = pieces
    return _formed(_restored(values, form), part)


def _formed(value: Array, part: Part) -> Array:
    return value if part is None else value.transpose(part[0]).reshape(part[1])


def _restored(value: Array, part: Part) -> Array:
    if part is None:
        return value
    axes, _, extents = part
    turned: Array = value.reshape([extents[axis] for axis in axes]).transpose(np.argsort(axes))
    return turned


def variables(model: Any) -> Iterator[tuple[Any, Callable[[Part, Callable[[Array], Array]], None]]]:
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
        yield identity(_holder(variable)), _changing(variable)


def _holder(variable: Any) -> Any:
    return variable.handle if hasattr(variable, "handle") else variable.op.outputs[0]


def _variable(given: Any) -> Any:
    """TensorFlow's variable behind one of Keras."""
    value = getattr(given, "value", None)
    return given if value is None or callable(value) else value


def _changing(variable: Any) -> Callable[[Part, Callable[[Array], Array]], None]:
    def change(part: Part, changed: Callable[[Array], Array]) -> None:
        import tensorflow as tf

        def turned(value: Array) -> Array:
            if part is None:
                return changed(value)
            return _restored(changed(_formed(value, part)), part)

        if getattr(_holder(variable), "op", None) is None:
            variable.assign(turned(variable.numpy()))
            return
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise PruneError(
                f"{variable.name} belongs to a session's graph; finalize within `with session.as_default():`"
            )
        assign = variable.initializer  # as Variable.load does, which wants its graph to be the default
        session.run(assign, {assign.inputs[1]: turned(session.run(variable))})

    return change
