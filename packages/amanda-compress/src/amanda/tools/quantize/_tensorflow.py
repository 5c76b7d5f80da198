"""TensorFlow: a kernel for fake quantisation, recorded on tapes, and ops of eager mode as functions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import amanda
from amanda.tools.kit import RequiredNames, tensors_of
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda.tools.quantize._fake_quantize import Grid


_TENSORFLOW_NAMES = RequiredNames(
    "amanda.tools.quantize",
    "tensorflow",
    "tensorflow.python.eager.record:record_operation",
    "tensorflow.python.framework.op_def_registry:get",
)

Floats: TypeAlias = "NDArray[np.float32]"

_PIECE = 65_536
"""Elements of a piece that stays in the cache."""


def tensorflow_kernel(x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int]) -> Any:
    """Return fake-quantised values with the straight-through gradient, recorded on tapes.

    TensorFlow's own kernel rounds differently, and single operators take ten times as long.
    Returns None for a tensor that is not float32 in host memory, for axes that are not adjacent, and
    for a floating grid.
    """
    # Adjacent axes reshape to one without a copy.
    are_adjacent = not axes or list(axes) == list(range(axes[0], axes[0] + len(axes)))
    if grid.dtype or not (are_adjacent and tensors_of(x).is_in_host_memory(x) and x.dtype == _tf().float32):
        return None
    tensor, array = _new_tensor_and_array(x.shape)
    clipped_positions = _quantise_into(
        np.asarray(x), np.asarray(scale), np.asarray(zero_point), grid, axes, array
    )
    return _record_on_tape(tensor, x, clipped_positions)


def _quantise_into(
    x: Floats, scale: Floats, zero_point: Floats, grid: Grid, axes: Sequence[int], target: Floats
) -> NDArray[np.intp]:
    """Write the quantised array piece by piece; return the flat positions of clipped values, and of NaN.

    x, target: contiguous.  axes: of the channels, adjacent.
    """
    first, end = (axes[0], axes[-1] + 1) if axes else (x.ndim, x.ndim)
    qparam_shape = x.shape[first:end] + (1,) * (x.ndim - end)
    rows, target_rows = x, target
    # Pieces are cut along the first axis: of channels, which a piece then has a part of, or of all that lies
    # in front of the channels.
    rows_are_channels = bool(axes) and first == 0
    if not rows_are_channels:
        rows, target_rows = x.reshape(-1, *x.shape[first:]), target.reshape(-1, *x.shape[first:])
        qparam_shape = (1, *qparam_shape)
    scales = np.asarray(scale, np.float32).reshape(qparam_shape)
    zero_points = np.asarray(zero_point, np.float32).reshape(qparam_shape)
    inverse_scales, row_size = np.float32(1) / scales, prod(rows.shape[1:])
    # All passes over a piece find it in the cache, where passes over the whole array would go to memory.
    rows_per_piece = max(1, _PIECE // row_size)
    clipped_positions = []
    for start in range(0, len(rows), rows_per_piece):
        piece, out = rows[start : start + rows_per_piece], target_rows[start : start + rows_per_piece]
        channels = slice(start, start + rows_per_piece) if len(scales) > 1 else slice(None)
        np.multiply(piece, inverse_scales[channels], out=out)
        np.rint(out, out=out)
        np.add(out, zero_points[channels], out=out)
        clamped = np.clip(out, np.float32(grid.low), np.float32(grid.high))
        is_clipped = clamped != out
        # Most pieces clip nothing, and positions are fewer bytes than a mask.
        if is_clipped.any():
            clipped_positions.append(np.flatnonzero(is_clipped) + start * row_size)
        np.subtract(clamped, zero_points[channels], out=clamped)
        np.multiply(clamped, scales[channels], out=out)
    return np.concatenate(clipped_positions) if clipped_positions else np.empty(0, np.intp)


def _record_on_tape(tensor: Any, source: Any, clipped_positions: NDArray[Any]) -> Any:
    """Return a tensor, recorded on tapes: its gradient passes to `source` where no value was clipped."""
    _TENSORFLOW_NAMES.check()
    from tensorflow.python.eager import record

    record.record_operation(
        "FakeQuantize",
        [tensor],
        [source],
        lambda gradient: [_mask_clipped_gradient(gradient, clipped_positions)],
    )
    return tensor


def _mask_clipped_gradient(gradient: Any, clipped_positions: NDArray[Any]) -> Any:
    """Return the gradient where values were not clipped, else 0, recorded for a further derivative."""
    if not clipped_positions.size:
        return gradient
    gradient = _tf().convert_to_tensor(gradient)
    tensor, array = _new_tensor_and_array(gradient.shape)
    np.copyto(array, np.asarray(gradient))
    # Times 0 keeps NaN.
    array.reshape(-1)[clipped_positions] *= 0
    return _record_on_tape(tensor, gradient, clipped_positions)


def _new_tensor_and_array(shape: Any) -> tuple[Any, NDArray[Any]]:
    """Return a tensor in host memory, and an array in the same memory to write its values through.

    TensorFlow's allocator reuses memory of the last step; NumPy would request new memory from the system.
    """
    with _tf().device("CPU:0"):
        tensor = _tf().raw_ops.Empty(shape=_constant_shape(tuple(shape)), dtype="float32")
    array = np.asarray(tensor)
    # NumPy's view of an eager tensor is read-only; the tensor is new, and nothing else reads it yet.
    memory = (ctypes.c_float * array.size).from_address(array.ctypes.data)
    return tensor, np.frombuffer(memoryview(memory), np.float32).reshape(array.shape)


@functools.lru_cache(4096)
def _constant_shape(shape: tuple[int, ...]) -> Any:
    # Cached: each constant is an op of TensorFlow to run.
    return _tf().constant(shape, "int32", (len(shape),))


def write_recompute(context: amanda.OpContext) -> None:
    """Write `recompute` into a context, the op as a function: eager TensorFlow lacks `get_computation`."""
    context["recompute"] = _op_as_function(context)


def _op_as_function(context: amanda.OpContext) -> Callable[[Sequence[Any]], Any] | None:
    """Return the op as a function of its inputs; None for a stateful op, and without a raw op of its name."""
    _TENSORFLOW_NAMES.check()
    from tensorflow.python.framework import op_def_registry

    kind, values_by_name = context.get_op_type(), context.get_attrs()
    definition = op_def_registry.get(kind)
    raw = getattr(_tf().raw_ops, kind, None)
    # A stateful op, such as dropout's random numbers, computes something else a second time.
    if definition is None or raw is None or definition.is_stateful:
        return None
    inputs = definition.input_arg
    # Raw ops infer these attributes from their inputs, and take no argument for them.
    inferred_names = {
        name
        for argument in inputs
        for name in (argument.type_attr, argument.number_attr, argument.type_list_attr)
    }
    attributes = {
        attribute.name: values_by_name[attribute.name]
        for attribute in definition.attr
        if attribute.name in values_by_name and attribute.name not in inferred_names
    }

    def recompute(values: Sequence[Any]) -> Any:
        values_of_inputs = {argument.name: value for argument, value in zip(inputs, values, strict=True)}
        return raw(**values_of_inputs, **attributes)

    return recompute


def _tf() -> Any:
    import tensorflow

    return tensorflow
