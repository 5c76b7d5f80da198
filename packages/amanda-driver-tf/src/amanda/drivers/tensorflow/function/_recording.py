"""Notes which forward operation TensorFlow makes gradient operations for, while it makes them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amanda.backend import Attributes
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute
from tensorflow.python.eager import record as tape_record
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import ops

from ..graph import records

_MARK = "_amanda_forward"


class _Current(threading.local):
    """The forward operations whose gradients are being made on this thread, innermost last."""

    def __init__(self) -> None:
        self.ops: list[Any] = []


_current = _Current()


@contextmanager
def _making_gradients_of(op: Any) -> Iterator[None]:
    _current.ops.append(op)
    try:
        yield
    finally:
        _current.ops.pop()


def record_gradients(attributes: Attributes) -> None:
    """Follow the places where gradients are made, until the attributes are restored.

    Call `forget_gradient_function` then.
    """
    _follow_symbolic_gradients(attributes)
    _follow_tapes(attributes)
    _follow_backward_functions(attributes)
    _follow_calls(attributes)


def forget_gradient_function() -> None:
    """Make tapes use the function that is in place now, unless the program has deleted it."""
    if hasattr(backprop, "_gradient_function"):
        pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)


def _follow_symbolic_gradients(attributes: Attributes) -> None:
    enter = ops.Graph._original_op
    create = ops.Graph._create_op_internal

    @functools.wraps(enter)
    @contextmanager
    def original_op(self: Any, op: Any) -> Iterator[None]:
        with _making_gradients_of(op), enter(self, op):
            yield

    @functools.wraps(create)
    def create_op_internal(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(self, *args, **kwargs)
        if _current.ops and _current.ops[-1] is not None:
            records.note(made, _current.ops[-1])
        return made

    attributes.set(ops.Graph, "_original_op", original_op)
    attributes.set(ops.Graph, "_create_op_internal", create_op_internal)


def _follow_tapes(attributes: Attributes) -> None:
    record = execute.record_gradient
    compute = backprop._gradient_function

    @functools.wraps(record)
    def record_gradient(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        first = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else None
        if first is not None and not isinstance(first, ops.EagerTensor) and hasattr(first, "op"):
            attrs = (*(attrs or ()), _MARK, weakref.ref(first.op))
        return record(op_name, inputs, attrs, outputs)

    @functools.wraps(compute)
    def gradient_function(op_name: str, attr_tuple: Any, *rest: Any) -> Any:
        if not attr_tuple or _MARK not in attr_tuple[-2:]:
            return compute(op_name, attr_tuple, *rest)
        with _making_gradients_of(attr_tuple[-1]()):
            return compute(op_name, attr_tuple[:-2], *rest)

    attributes.set(execute, "record_gradient", record_gradient)
    attributes.set(backprop, "_gradient_function", gradient_function)
    forget_gradient_function()


def _follow_backward_functions(attributes: Attributes) -> None:
    """Return what a backward function computes belongs to the operation that made the outputs.

    So it is with custom gradients (an IdentityN), and with called functions on a forward accumulator.
    """
    for name in ("record_operation", "record_operation_backprop_only", "record_operation_forwardprop_only"):
        attributes.set(tape_record, name, _noted(getattr(tape_record, name)))


def _noted(original: Any) -> Any:
    @functools.wraps(original)
    def record_operation(
        op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, *rest: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        first = output_tensors[0] if output_tensors else None
        if first is None or isinstance(first, ops.EagerTensor) or not hasattr(first, "op"):
            return original(op_type, output_tensors, input_tensors, backward_function, *rest, **named)
        maker = weakref.ref(first.op)

        def backward(*gradients: Any) -> Any:
            with _making_gradients_of(maker()):
                return backward_function(*gradients)

        return original(op_type, output_tensors, input_tensors, backward, *rest, **named)

    return record_operation


def _follow_calls(attributes: Attributes) -> None:
    holder = concrete_function._DelayedRewriteGradientFunctions
    rewrite = holder._rewrite_forward_and_call_backward

    @functools.wraps(rewrite)
    def rewrite_forward_and_call_backward(self: Any, op: Any, *doutputs: Any) -> Any:
        with _making_gradients_of(op):
            return rewrite(self, op, *doutputs)

    attributes.set(holder, "_rewrite_forward_and_call_backward", rewrite_forward_and_call_backward)
