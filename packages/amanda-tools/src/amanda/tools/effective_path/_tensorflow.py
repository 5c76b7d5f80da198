"""What the rules read of TensorFlow's ops, in words that are the same for every framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._windows import sliding


def array(tensor: Any) -> NDArray[Any]:
    """A copy of a tensor on the host; of types that numpy lacks, in float32."""
    found = np.array(tensor)
    return found if found.dtype.isbuiltin == 1 else found.astype(np.float32)


def arguments(
    kind: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attributes: Mapping[str, Any],
    layout: str | None,
) -> dict[str, Any]:
    """By the word of an op: `tables` of windows, `axes`, `axis`, `move`, `turned`, `signs`, `equation`."""
    if "pool" in kind or "conv" in kind:
        return {"tables": _tables(inputs, outputs, attributes, layout or "")}
    if kind in ("mean", "sum", "amax"):
        return {"axes": np.atleast_1d(inputs[1]).tolist()}
    if kind == "batch_norm":
        return {"scale": _scale(inputs, attributes, layout or "NHWC")}
    if kind == "cat":
        return {"axis": int(inputs[1])}
    if kind == "stack":
        return {"axis": attributes.get("axis", 0)}
    if kind == "matmul":
        names = (("transpose_a", "adj_x"), ("transpose_b", "adj_y"))
        return {"turned": tuple(any(bool(attributes.get(name)) for name in one) for one in names)}
    if kind == "sub":
        return {"signs": (1, -1)}
    if kind == "einsum":
        return {"equation": _text(attributes["equation"])}
    move = _moves(kind, inputs, outputs, attributes)
    return {} if move is None else {"move": move}


def _tables(
    inputs: Sequence[Any], outputs: Sequence[Any], attributes: Mapping[str, Any], layout: str
) -> list[Any]:
    axes = [i for i, axis in enumerate(layout) if axis not in "NC"]
    window = attributes.get("ksize")
    tables = []
    for nth, axis in enumerate(axes):
        size, count = inputs[0].shape[axis], outputs[0].shape[axis]
        kernel = inputs[1].shape[nth] if window is None else window[axis]
        stride, dilation = (
            attributes["strides"][axis],
            (attributes.get("dilations") or [1] * len(layout))[axis],
        )
        before = 0
        if _text(attributes["padding"]) == "SAME":
            before = max((count - 1) * stride + (kernel - 1) * dilation + 1 - size, 0) // 2
        elif attributes.get("explicit_paddings"):
            before = attributes["explicit_paddings"][2 * axis]
        tables.append(sliding(size, count, kernel, stride, before, dilation))
    return tables


def _scale(inputs: Sequence[Any], attributes: Mapping[str, Any], layout: str) -> NDArray[Any]:
    """By what a batch norm scales each channel."""
    data, gamma, _, _, variance = inputs
    if attributes.get("is_training"):
        variance = data.var(axis=tuple(i for i, axis in enumerate(layout) if axis != "C"))
    scale: NDArray[Any] = gamma / np.sqrt(variance.astype(np.float64) + attributes["epsilon"])
    return scale


def _moves(kind: str, inputs: Sequence[Any], outputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """What an op that moves elements does to an array; None of other ops."""

    def cut(a: Any) -> Any:
        if len(inputs) == 3:  # a Slice, of begin and size
            begin, size = (np.asarray(one).tolist() for one in inputs[1:])
            return a[tuple(slice(b, None if n < 0 else b + n) for b, n in zip(begin, size, strict=True))]
        begin, end, step = (np.asarray(one).tolist() for one in inputs[1:])
        return a[strided(begin, end, step, attributes)]

    def parts(a: Any) -> Any:
        return np.split(a, attributes["num_split"], axis=int(inputs[0]))

    moves = {
        "permute": lambda a: a.transpose(np.asarray(inputs[1]).tolist()), "getitem": cut,
        "pad": lambda a: np.pad(a, np.asarray(inputs[1]).tolist(), constant_values=-1),
        "unbind": lambda a: [np.take(a, i, axis=attributes.get("axis", 0)) for i in range(len(outputs))],
        "expand": lambda a: np.broadcast_to(a, outputs[0].shape),
    }  # fmt: skip
    return parts if kind == "split" else moves.get("pad" if kind in ("Pad", "PadV2") else kind)


_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


def strided(
    begin: Sequence[int], end: Sequence[int], step: Sequence[int], attributes: Mapping[str, Any]
) -> Any:
    """The index of numpy for a StridedSlice."""
    masks = {name: int(attributes.get(f"{name}_mask", 0)) for name in _MASKS}
    index: list[Any] = []
    for i, (first, last, stride) in enumerate(zip(begin, end, step, strict=True)):
        has = {name for name, mask in masks.items() if mask >> i & 1}
        if "ellipsis" in has:
            index.append(...)
        elif "new_axis" in has:
            index.append(None)
        elif "shrink_axis" in has:
            index.append(first)
        else:
            index.append(slice(None if "begin" in has else first, None if "end" in has else last, stride))
    return tuple(index)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
