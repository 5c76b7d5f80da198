"""Recording of the forward operation of each gradient operation, while TensorFlow creates it."""

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


class _DifferentiatedOps(threading.local):
    """The forward operations whose gradients this thread is creating, the innermost last."""

    def __init__(self) -> None:
        self.ops: list[Any] = []


_differentiated = _DifferentiatedOps()


@contextmanager
def _record_gradient_ops_of(op: Any) -> Iterator[None]:
    _differentiated.ops.append(op)
    try:
        yield
    finally:
        _differentiated.ops.pop()


def record_gradients(attributes: Attributes) -> None:
    """Patch the functions that create gradients, until `attributes` are restored.

    Call `forget_gradient_function` then.
    """
    _patch_symbolic_gradients(attributes)
    _patch_tapes(attributes)
    _patch_backward_functions(attributes)
    _patch_function_gradients(attributes)


def forget_gradient_function() -> None:
    """Make tapes call the present `_gradient_function`, unless the program has deleted it."""
    if hasattr(backprop, "_gradient_function"):
        pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)


def _patch_symbolic_gradients(attributes: Attributes) -> None:
    """Patch `Graph._original_op`, within which `tf.gradients` creates ops, and the creation of ops."""
    enter = ops.Graph._original_op
    create = ops.Graph._create_op_internal

    @functools.wraps(enter)
    @contextmanager
    def original_op(self: Any, op: Any) -> Iterator[None]:
        with _record_gradient_ops_of(op), enter(self, op):
            yield

    @functools.wraps(create)
    def create_op_internal(self: Any, *args: Any, **kwargs: Any) -> Any:
        created = create(self, *args, **kwargs)
        if _differentiated.ops and _differentiated.ops[-1] is not None:
            records.record(created, _differentiated.ops[-1])
        return created

    attributes.set(ops.Graph, "_original_op", original_op)
    attributes.set(ops.Graph, "_create_op_internal", create_op_internal)


def _patch_tapes(attributes: Attributes) -> None:
    """Patch the recording of graph ops on tapes, and the gradient function that tapes call for them."""
    record = execute.record_gradient
    compute = backprop._gradient_function

    @functools.wraps(record)
    def record_gradient(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        first = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else None
        if first is not None and not isinstance(first, ops.EagerTensor) and hasattr(first, "op"):
            # A tape passes attributes to the gradient function unread; the stand-in below takes the mark out
            # again.
            attrs = (*(attrs or ()), _MARK, weakref.ref(first.op))
        return record(op_name, inputs, attrs, outputs)

    @functools.wraps(compute)
    def gradient_function(op_name: str, attr_tuple: Any, *positional: Any) -> Any:
        if not attr_tuple or _MARK not in attr_tuple[-2:]:
            return compute(op_name, attr_tuple, *positional)
        with _record_gradient_ops_of(attr_tuple[-1]()):
            return compute(op_name, attr_tuple[:-2], *positional)

    attributes.set(execute, "record_gradient", record_gradient)
    attributes.set(backprop, "_gradient_function", gradient_function)
    forget_gradient_function()


def _patch_backward_functions(attributes: Attributes) -> None:
    """Patch the functions that record a backward function on tapes.

    Custom gradients (an IdentityN) and functions under a forward accumulator are recorded so. The ops of the
    backward function belong to the operation that computed the outputs.
    """
    for name in ("record_operation", "record_operation_backprop_only", "record_operation_forwardprop_only"):
        attributes.set(tape_record, name, _stand_in_for_record_operation(getattr(tape_record, name)))


def _stand_in_for_record_operation(original: Any) -> Any:
    """Stand-in for `record_operation` and its variants: records which op the backward function is of."""

    @functools.wraps(original)
    def record_operation(
        op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, *positional: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        first = output_tensors[0] if output_tensors else None
        if first is None or isinstance(first, ops.EagerTensor) or not hasattr(first, "op"):
            return original(op_type, output_tensors, input_tensors, backward_function, *positional, **named)
        # A strong reference would keep the graph alive as long as the tape's record.
        maker = weakref.ref(first.op)

        def backward(*gradients: Any) -> Any:
            with _record_gradient_ops_of(maker()):
                return backward_function(*gradients)

        return original(op_type, output_tensors, input_tensors, backward, *positional, **named)

    return record_operation


def _patch_function_gradients(attributes: Attributes) -> None:
    """Patch the gradients of calls of functions by `tf.gradients`."""
    holder = concrete_function._DelayedRewriteGradientFunctions
    rewrite = holder._rewrite_forward_and_call_backward

    @functools.wraps(rewrite)
    def rewrite_forward_and_call_backward(self: Any, op: Any, *doutputs: Any) -> Any:
        with _record_gradient_ops_of(op):
            return rewrite(self, op, *doutputs)

    attributes.set(holder, "_rewrite_forward_and_call_backward", rewrite_forward_and_call_backward)
