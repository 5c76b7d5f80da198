"""Integers of a weight in the form that ONNX stores them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.kit import Unfolding
from amanda.tools.libraries import ml_dtypes
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake import Scale, fake_quantize_fixed
from amanda.tools.quantize._grid import FloatGrid, Grid, QuantizeError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import TensorProto


def element_type(grid: Grid) -> tuple[str, int]:
    """Return the name of the least type of ONNX that holds a grid, and its bits."""
    if isinstance(grid, FloatGrid):
        return {"float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}[grid.dtype], 8
    bits = next(bits for bits in (4, 8, 16) if grid.bits <= bits)
    return f"{'INT' if grid.low < 0 else 'UINT'}{bits}", bits


class StoredWeight(NamedTuple):
    """The integers of a weight, with scales and zero points in the shape that DequantizeLinear reads.

    axis: of the scales; None of one scale.  block: size of groups along the axis, 0 without groups.
    way: from the weight to rows of `codes`, where groups made these; None for codes in the weight's form.
    """

    codes: NDArray[Any]
    scale: NDArray[Any]
    zero_point: NDArray[Any]
    axis: int | None
    block: int
    unfolding: Unfolding | None = None


def stored_weight(value: NDArray[Any], scale: Scale, rounding: Any) -> StoredWeight:
    """Return the numbers of the grid that stand for a weight, as fake quantisation rounds it.

    Raises QuantizeError where scales differ along several axes.
    """
    s, z, grid, axes, groups = scale
    fake = np.asarray(fake_quantize_fixed(value, {None: scale}, rounding))
    if groups is None:
        scale_axes = [axis for axis in axes if value.shape[axis] > 1] or list(axes[:1])
        if len(scale_axes) > 1:
            raise QuantizeError(
                f"a weight of shape {value.shape} has scales along its axes {scale_axes}, and "
                "DequantizeLinear knows those of one axis; let per_channel be False"
            )
        axis = scale_axes[0] if scale_axes else None
        extents = [-1 if i == axis else 1 for i in range(value.ndim)]
        codes = fake / s.reshape(extents if scale_axes else ()) + z.reshape(extents if scale_axes else ())
        return StoredWeight(_codes(codes, grid), s, z, axis, 0)
    rows = groups.split(fake) / s[:, None] + z[:, None]
    unfolding = Unfolding.of(value.shape, groups.layout)
    if groups.are_outputs:
        return StoredWeight(_codes(rows, grid), s, z, 0, 0, unfolding)
    outputs = prod(unfolding.canonical[: unfolding.outputs])
    codes, s, z = (array.reshape(outputs, -1) for array in (rows, s, z))
    if unfolding.order == (1, 0):  # the inputs come first
        return StoredWeight(_codes(codes.T, grid), s.T, z.T, 0, groups.size)
    return StoredWeight(_codes(codes, grid), s, z, 1, groups.size, unfolding)


def _codes(numbers: NDArray[Any], grid: Grid) -> NDArray[Any]:
    return np.ascontiguousarray(numbers if isinstance(grid, FloatGrid) else np.rint(numbers))


def initializer(name: str, array: NDArray[Any], kind: str) -> TensorProto:
    """Return an initializer of numbers that a type of ONNX holds."""
    from onnx import TensorProto

    if kind in ("INT4", "UINT4"):
        flat = np.append(array.astype(np.int8).reshape(-1), np.zeros(array.size % 2, np.int8)).view(np.uint8)
        raw = (flat[::2] & 15) | (flat[1::2] << 4)
    else:
        names = {"FLOAT": "float32", "FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2"}
        dtype = names.get(kind, kind.lower())
        raw = array.astype(getattr(ml_dtypes, dtype) if kind.startswith("FLOAT8") else dtype)
    return TensorProto(
        name=name, data_type=getattr(TensorProto, kind), dims=array.shape, raw_data=raw.tobytes()
    )
