"""Constants in another form: what nodes that only move data make of them; without a copy where possible."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from ._symbols import Array, Symbol


def formed(node: NodeProto, inputs: Sequence[Symbol | None]) -> Array | None:
    """Return what a node makes of a constant; None for a node that computes, and of what is not constant."""
    form = FORMS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if form is None or any(one is None or one.constant is None for one in inputs) or not inputs:
        return None
    arrays = [one.constant for one in inputs if one is not None]
    if arrays[0] is None or arrays[0].dtype.type.__module__ != "numpy":
        return None
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    made = np.asarray(form(*arrays, **attributes))
    made.flags.writeable = False
    return made


def _transposed(array: Any, perm: Any = None) -> Any:
    return array.transpose(perm)


def _reshaped(array: Any, shape: Any, allowzero: int = 0) -> Any:
    extents = [
        array.shape[i] if extent == 0 and not allowzero else int(extent) for i, extent in enumerate(shape)
    ]
    return array.reshape(extents)


def _flattened(array: Any, axis: int = 1) -> Any:
    first = array.shape[: axis if axis >= 0 else array.ndim + axis]
    return array.reshape(prod(first), prod(array.shape[len(first) :]))


def _squeezed(array: Any, axes: Any = None) -> Any:
    return array.squeeze(None if axes is None else tuple(int(axis) for axis in axes))


def _unsqueezed(array: Any, axes: Any = ()) -> Any:
    return np.expand_dims(array, tuple(int(axis) for axis in axes))


FORMS: dict[str, Any] = {
    "Identity": lambda array: array.view(),
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Flatten": _flattened,
    "Squeeze": _squeezed,
    "Unsqueeze": _unsqueezed,
}
"""For each type that only moves data, the function of its first input."""

_TYPES = frozenset({"Cast", "CastLike", "DequantizeLinear"})


def is_plain(node: NodeProto) -> bool:
    """Return True for a node that gives its first input in another form or type."""
    return node.domain in ("", "ai.onnx") and (node.op_type in FORMS or node.op_type in _TYPES)
