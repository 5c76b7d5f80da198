"""Operations of the kit on tensors of TensorFlow: eager ones, and symbols of graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import amanda
from amanda.tools.kit._tensors import Array, RequiredNames, Save, Tensors

_REQUIRED = RequiredNames(
    "amanda.tools.kit", "tensorflow",
    "tensorflow.python.eager.record:record_operation", "tensorflow.python.eager.record:stop_recording",
    "tensorflow.python.framework.ops:EagerTensor._datatype_enum",
    "tensorflow.python.framework.ops:EagerTensor._handle_data",
    "tensorflow.python.framework.ops:EagerTensor._numpy",
    "tensorflow.python.framework.ops:EagerTensor._numpy_internal",
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable",
)  # fmt: skip

# Numbers of the element types that NumPy has too: floats, integers, bool and complex.
_NUMPY = frozenset({1, 2, 3, 4, 5, 6, 8, 9, 10, 17, 18, 19, 22, 23})
# Alignment, in elements, of memory that frameworks take as it is, without a check.
_ALIGNED = 16


class TensorFlowTensorLibrary(Tensors):
    """Tensors of TensorFlow; arrays to compute with share the memory of tensors on the host."""

    def __init__(self) -> None:
        _REQUIRED.check()
        from tensorflow.python.framework.ops import EagerTensor
        from tensorflow.python.ops.resource_variable_ops import ResourceVariable

        self._eager_tensor, self._variable = EagerTensor, ResourceVariable

    def library(self, *values: Any) -> Any:
        """Return TensorFlow, which has some functions under NumPy's names; methods call the others."""
        return tf

    def plain(self, x: Any) -> Array:
        array = np.asarray(x)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def to_numpy(self, x: Any) -> NDArray[Any]:
        return np.asarray((self.wide(x) if x.dtype.is_floating else x).numpy())

    def copy(self, array: Any) -> Array:
        return np.array(array)

    def at(self, x: Any, positions: Sequence[int]) -> Any:
        return tf.gather(tf.reshape(x, [-1]), np.array(positions, np.int64))

    def stored_values(self, x: Any, widen: bool = False) -> Any:
        if x.dtype.is_complex:
            return tf.abs(tf.cast(x, tf.complex128) if widen else x)
        # bfloat16 and float8 have kernels of few functions.
        is_wide = not widen or x.dtype in (tf.float16, tf.float32, tf.float64)
        return x if is_wide else tf.cast(x, tf.float32)

    def blocks(self, numbers: Any) -> Iterator[Any]:
        """Yield flat pieces in float64; of what is on the host, arrays of NumPy."""
        if "CPU" in numbers.device:
            yield from super().blocks(numbers.numpy())
            return
        flat = tf.reshape(numbers, [-1])
        for start in range(0, int(flat.shape[0]), self.device_block):
            yield tf.cast(flat[start : start + self.device_block], "float64")

    def leading_bits(self, block: Any, bits: int) -> tuple[Any, int]:
        integers = tf.bitcast(tf.abs(block), tf.int64)
        return tf.bitwise.right_shift(integers, tf.constant(52 - bits, tf.int64)), 1023 << bits

    def counts(self, indices: Any, total: int) -> Any:
        return tf.math.bincount(indices, minlength=total, maxlength=total, dtype="int64")

    def total(self, numbers: Any) -> Any:
        return tf.reduce_sum(self.wide(numbers))

    def with_bytes(self, x: Any, positions: NDArray[np.int64], rows: NDArray[np.uint8]) -> Any:
        """Return a copy, on the same device, with other bytes in the elements at positions."""
        with tf.device(x.device):
            return super().with_bytes(x, positions, rows)

    def memory(self, x: Any) -> tuple[Hashable, Save] | None:
        """Return a key of the variable that an eager handle leads to, and a function that saves its value."""
        # Only the handle knows the element type of the variable that it leads to.
        handle_types = getattr(getattr(x, "_handle_data", None), "shape_and_type", None)
        if not handle_types or not hasattr(x, "numpy"):
            return None
        dtype, raw_ops = tf.dtypes.as_dtype(handle_types[0].dtype), tf.raw_ops

        def save() -> Callable[[], None]:
            value = raw_ops.ReadVariableOp(resource=x, dtype=dtype)
            return lambda: raw_ops.AssignVariableOp(resource=x, value=value)

        return id(x), save

    def cast(self, value: Any, like: Any) -> Any:
        """Return a value as a tensor in the element type of another, a constant on its device."""
        if tf.is_tensor(value):
            return tf.cast(value, like.dtype)
        array = np.asarray(value)
        # TensorFlow would put the constant on the first GPU.
        with tf.device(like.device):
            return tf.cast(tf.constant(array), like.dtype)

    def detach(self, x: Any) -> Any:
        return tf.stop_gradient(x)

    def wide(self, x: Any) -> Any:
        return tf.cast(x, "float32") if x.dtype.size < 4 else x

    def ranks(self, values: Any) -> Any:
        return tf.argsort(tf.argsort(values, stable=True))

    def round(self, x: Any) -> Any:
        return tf.math.rint(x)

    def within(self, value: Any, x: Any, low: float, high: float) -> Any:
        # where, not a product: 0 times NaN would stay NaN.
        return tf.where((x <= low) | (x >= high), tf.zeros_like(value), value)

    def sum(self, x: Any, axes: Sequence[int]) -> Any:
        return tf.reduce_sum(x, axis=list(axes))

    def extent(self, x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
        """Return the least and the largest elements over axes; arrays of a tensor in host memory."""
        if self.is_in_host_memory(x):
            array = np.asarray(x)
            return np.min(array, axis=tuple(axes)), np.max(array, axis=tuple(axes))
        x = self.detach(x)
        return tf.reduce_min(x, axis=list(axes)), tf.reduce_max(x, axis=list(axes))

    def is_dense(self, x: Any) -> bool:
        return all(x.shape)

    def shared(self, x: Any) -> NDArray[Any] | None:
        """Return an array that shares the memory of an eager tensor on the host; a hot path."""
        # _datatype_enum and _numpy_internal are private, and faster than dtype and numpy(), which check more.
        if type(x) is not self._eager_tensor or x._datatype_enum() not in _NUMPY:
            return None
        # Reading the name of a device makes a string each time, so without other devices it is not asked.
        if not _has_only_cpus() and "CPU" not in x.device:
            return None
        array = x._numpy_internal()
        return array if type(array) is np.ndarray else np.asarray(array)

    def buffers(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return eager tensors on the host, which export their memory; None for others; a hot path."""
        eager, only_cpus = self._eager_tensor, _has_only_cpus()
        return tuple([x if type(x) is eager and (only_cpus or "CPU" in x.device) else None for x in values])

    def is_in_host_memory(self, x: Any) -> bool:
        return isinstance(x, self._eager_tensor) and x.device.endswith("CPU:0") and tf.executing_eagerly()

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
        collect: Callable[..., None] | None = None,
    ) -> Any:  # fmt: skip
        """Return what `forward` gives, with `backward` for its gradients, which `collect` gets too."""
        from tensorflow.python.eager import record

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def computed(*values: Any) -> Any:
            """Return the result of `forward`, and the function of its gradients."""

            def gradients(output_gradient: Any) -> Any:
                """Return the gradients of all tensors, and hand those after the first to `collect`."""
                with amanda.disabled():
                    grads = backward(output_gradient, *values)
                # In a graph no tape leads to variables of a tool, so their gradients are handed over.
                if collect is not None:
                    collect(*grads[1:])
                return grads

            # The tape must not see the ops of the routine, whose gradient is given.
            with record.stop_recording():
                return forward(*values), gradients

        return computed(*tensors)

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Any:
        """Return a number or an array as a variable of the tool; in a session a variable as it is."""
        with tf.init_scope():
            if isinstance(value, tf.Variable) and not tf.executing_eagerly():
                return value
            return tf.Variable(np.asarray(value, dtype), trainable=trained, dtype=dtype)

    def update(self, former: Any, value: Any) -> Any:
        """Write values into a variable and return it; return the values if they do not fit, or in a graph."""
        with tf.init_scope():
            if (former.shape, former.dtype) != (value.shape, value.dtype) or not tf.executing_eagerly():
                return value
            former.assign(value)
        return former

    def assign(self, state: Any, value: Any) -> None:
        """Put an array into a variable, in its shape, without a copy of the array where that is possible."""
        array = np.asarray(value, np.float32).reshape(state.shape)
        if type(state) is self._variable and tf.executing_eagerly():  # a hot path
            # DLPack shares memory that is aligned, where a conversion would copy the array.
            tensor = tf.experimental.dlpack.from_dlpack(_aligned_copy(array).__dlpack__())
            tf.raw_ops.AssignVariableOp(resource=state.handle, value=tensor)
        else:
            state.assign(array, read_value=False)

    def read(self, state: Any) -> Any:
        # A hot path; reads of trainable variables have to be recorded by tapes.
        if type(state) is self._variable and not state.trainable:
            return tf.raw_ops.ReadVariableOp(resource=state.handle, dtype=state.dtype)
        return tf.convert_to_tensor(state)


def _aligned_copy(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy whose memory a framework takes as it is."""
    memory = np.empty(array.size + _ALIGNED, np.float32)
    offset = -(memory.ctypes.data // memory.itemsize) % _ALIGNED
    copy = memory[offset : offset + array.size].reshape(array.shape)
    np.copyto(copy, array)
    return copy


@cache
def _has_only_cpus() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())
