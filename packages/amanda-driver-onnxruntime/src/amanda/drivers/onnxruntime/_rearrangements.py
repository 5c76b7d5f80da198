"""Nodes that only rearrange their input, computed on constants; without a copy where possible."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from ._symbols import Array, Symbol


def rearrange_constant(node: NodeProto, inputs: Sequence[Symbol | None]) -> Array | None:
    """Return the result of a node that only rearranges a constant; None for other nodes and inputs."""
    rearrange = REARRANGEMENTS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rearrange is None or any(symbol is None or symbol.constant is None for symbol in inputs) or not inputs:
        return None
    arrays = [symbol.constant for symbol in inputs if symbol is not None]
    if arrays[0] is None or arrays[0].dtype.type.__module__ != "numpy":
        return None
    attributes = {symbol.name: onnx.helper.get_attribute_value(symbol) for symbol in node.attribute}
    array = np.asarray(rearrange(*arrays, **attributes))
    # The result may be a view of a weight.
    array.flags.writeable = False
    return array


def _transpose(array: Any, perm: Any = None) -> Any:
    return array.transpose(perm)


def _reshape(array: Any, shape: Any, allowzero: int = 0) -> Any:
    extents = [
        # An extent of 0 keeps the input's extent, unless `allowzero` is set.
        array.shape[i] if extent == 0 and not allowzero else int(extent)
        for i, extent in enumerate(shape)
    ]
    return array.reshape(extents)


def _flatten(array: Any, axis: int = 1) -> Any:
    first = array.shape[: axis if axis >= 0 else array.ndim + axis]
    return array.reshape(prod(first), prod(array.shape[len(first) :]))


def _squeeze(array: Any, axes: Any = None) -> Any:
    return array.squeeze(None if axes is None else tuple(int(axis) for axis in axes))


def _unsqueeze(array: Any, axes: Any = ()) -> Any:
    return np.expand_dims(array, tuple(int(axis) for axis in axes))


REARRANGEMENTS: dict[str, Any] = {
    "Identity": lambda array: array.view(),
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}
"""For each op type that only rearranges elements, a function of its inputs and attributes."""

_CASTS = frozenset({"Cast", "CastLike", "DequantizeLinear"})


def keeps_elements(node: NodeProto) -> bool:
    """Return True for a node that rearranges or casts its first input."""
    return node.domain in ("", "ai.onnx") and (node.op_type in REARRANGEMENTS or node.op_type in _CASTS)
