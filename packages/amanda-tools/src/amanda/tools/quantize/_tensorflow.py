"""The arithmetic of quantisation on TensorFlow's tensors, and the state of a tool there."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.quantize import _numpy
from amanda.tools.quantize._host import aligned_copy, on_grid


def rint(x: Any) -> Any:
    """To the nearest integer, half to even."""
    return _tf().math.rint(x)


def floor(x: Any) -> Any:
    """To the integer below."""
    return _tf().floor(x)


def absolute(x: Any) -> Any:
    """Magnitudes."""
    return _tf().abs(x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Elements of `x` where the condition holds, else of `y`."""
    return _tf().where(condition, x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of each pair; `y` may be a number."""
    return _tf().minimum(x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of each pair; `y` may be a number."""
    return _tf().maximum(x, y)


def within(value: Any, x: Any, low: float, high: float) -> Any:
    """`value`, and 0 where `x` is not between two bounds."""
    return _tf().where((x <= low) | (x >= high), _tf().zeros_like(value), value)


def total(x: Any, axes: Sequence[int]) -> Any:
    """The sum over axes."""
    return _tf().reduce_sum(x, axis=list(axes))


def extent(x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """The least and the largest elements over axes, outside of tapes; arrays of what is in host memory."""
    if _in_host_memory(x):
        return _numpy.extent(np.asarray(x), axes)
    x = constant(x)
    return _tf().reduce_min(x, axis=list(axes)), _tf().reduce_max(x, axis=list(axes))


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """The same elements in another shape."""
    return _tf().reshape(x, list(shape))


def like(x: Any, value: Any) -> Any:
    """A number, an array or another tensor in the element type of `x`."""
    tf = _tf()
    return tf.cast(value, x.dtype) if tf.is_tensor(value) else tf.constant(value, x.dtype)


def wide(x: Any) -> Any:
    """In float32, or wider as it is."""
    return _tf().cast(x, "float32") if x.dtype.size < 4 else x


def as_array(x: Any) -> NDArray[Any]:
    """Elements as an array of float32 or wider."""
    return np.asarray(wide(x).numpy())


def constant(x: Any) -> Any:
    """The tensor, outside of every tape."""
    return _tf().stop_gradient(x)


def is_plain(x: Any) -> bool:
    """Whether there is anything to quantise in a tensor: it has elements."""
    return all(x.shape)


def has_kernel(x: Any, axes: Sequence[int]) -> bool:
    """Whether `kernel` takes such a tensor: one in host memory."""
    follow = list(axes) == list(range(axes[0], axes[0] + len(axes))) if axes else True
    return follow and _in_host_memory(x) and x.dtype == _tf().float32


def kernel(x: Any, scale: Any, zero_point: Any, low: int, high: int, axes: Sequence[int] = ()) -> Any:
    """Fake quantisation with the straight-through estimator, which tapes know.

    TensorFlow's own rounds otherwise, and its operators one by one take ten times as long.
    """
    tensor, array = _empty(x.shape)
    clipped = on_grid(np.asarray(x), np.asarray(scale), np.asarray(zero_point), low, high, axes, array)
    return _recorded(tensor, x, clipped)


def _recorded(tensor: Any, given: Any, clipped: NDArray[Any]) -> Any:
    """A tensor whose gradient passes to what it was made of where nothing was clipped."""
    from tensorflow.python.eager import record

    record.record_operation("FakeQuantize", [tensor], [given], lambda entering: [_passing(entering, clipped)])
    return tensor


def _passing(gradient: Any, clipped: NDArray[Any]) -> Any:
    if not clipped.size:
        return gradient
    gradient = _tf().convert_to_tensor(gradient)
    tensor, array = _empty(gradient.shape)
    np.copyto(array, np.asarray(gradient))
    array.reshape(-1)[clipped] *= 0
    return _recorded(tensor, gradient, clipped)


def _empty(shape: Any) -> tuple[Any, NDArray[Any]]:
    """A tensor in host memory, and an array in the same memory to write what the tensor is to hold.

    TensorFlow's allocator has memory left of the last step, which NumPy would take anew from the system.
    """
    with _tf().device("CPU:0"):
        tensor = _tf().raw_ops.Empty(shape=_constant_shape(tuple(shape)), dtype="float32")
    array = np.asarray(tensor)
    memory = (ctypes.c_float * array.size).from_address(array.ctypes.data)
    return tensor, np.frombuffer(memoryview(memory), np.float32).reshape(array.shape)


@functools.lru_cache(4096)
def _constant_shape(shape: tuple[int, ...]) -> Any:
    return _tf().constant(shape, "int32", (len(shape),))


def _in_host_memory(x: Any) -> bool:
    return isinstance(x, _eager_tensor()) and x.device.endswith("CPU:0") and _tf().executing_eagerly()


@functools.cache
def _eager_tensor() -> Any:
    from tensorflow.python.framework.ops import EagerTensor

    return EagerTensor


@functools.cache
def _variable() -> Any:
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    return ResourceVariable


# ---- state ----


def made(value: Any, reference: Any, trained: bool) -> Any:
    """A number or array as a variable of the tool, in float32."""
    tf = _tf()
    with tf.init_scope():
        return tf.Variable(np.asarray(value, np.float32), trainable=trained, dtype=tf.float32)


def renewed(former: Any, value: Any) -> Any:
    """A variable with other values, or these where it is not like them."""
    tf = _tf()
    with tf.init_scope():
        if former.shape != value.shape or not tf.executing_eagerly():
            return value
        former.assign(value)
    return former


def assign(state: Any, value: Any) -> None:
    """Write new values into state."""
    array = np.asarray(value, np.float32).reshape(state.shape)
    if type(state) is _variable() and _tf().executing_eagerly():  # a hot path
        held = _tf().experimental.dlpack.from_dlpack(aligned_copy(array).__dlpack__())
        _tf().raw_ops.AssignVariableOp(resource=state.handle, value=held)
    else:
        state.assign(array, read_value=False)


def read(state: Any) -> Any:
    """State as a tensor to compute with."""
    if type(state) is _variable() and not state.trainable:  # a hot path; tapes hear of those that are
        return _tf().raw_ops.ReadVariableOp(resource=state.handle, dtype=state.dtype)
    return _tf().convert_to_tensor(state)


def with_gradient(
    forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
    collect: Callable[..., None] | None = None,
) -> Any:  # fmt: skip
    """`forward(*tensors)`, whose gradients are `backward(gradient, *tensors)`.

    collect: is given the gradients of all but the first tensor, for in a graph no tape leads to state.
    """
    from tensorflow.python.eager import record

    @_tf().custom_gradient  # type: ignore[untyped-decorator]
    def computed(*given: Any) -> Any:
        def gradients(entering: Any) -> Any:
            with amanda.disabled():
                found = backward(entering, *given)
            if collect is not None:
                collect(*found[1:])
            return found

        with record.stop_recording():
            return forward(*given), gradients

    return computed(*tensors)


# ---- ops ----


def describe(context: amanda.OpContext) -> None:
    """Write `arithmetic`, `operands`, positions of the inputs that may be quantised, and `recompute`."""
    if "operands" in context:
        return
    alone = context["type"] in ("batch_norm", "embedding")
    context["arithmetic"] = sys.modules[__name__]
    context["operands"] = [0] if alone else list(range(len(context.get_inputs())))
    context["recompute"] = _recompute(context)


def _recompute(context: amanda.OpContext) -> Callable[[Sequence[Any]], Any] | None:
    """The op as a function of its inputs; None where TensorFlow has none of its name."""
    from tensorflow.python.framework import op_def_registry

    kind, found = context.get_op_type(), context.get_attrs()
    definition = op_def_registry.get(kind)
    raw = getattr(_tf().raw_ops, kind, None)
    if definition is None or raw is None or definition.is_stateful:
        return None
    inputs = definition.input_arg
    inferred = {name for one in inputs for name in (one.type_attr, one.number_attr, one.type_list_attr)}
    attributes = {one.name: found[one.name] for one in definition.attr
                  if one.name in found and one.name not in inferred}  # fmt: skip

    def recompute(values: Sequence[Any]) -> Any:
        return raw(**{one.name: value for one, value in zip(inputs, values, strict=True)}, **attributes)

    return recompute


def _tf() -> Any:
    import tensorflow

    return tensorflow
