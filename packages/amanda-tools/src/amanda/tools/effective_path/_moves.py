"""Moves: what ops that move elements do to an array, by word, for each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._reading import Move, Reading, array, text


def of_torch(op: Reading) -> Mapping[str, Move]:
    """Return the moves of PyTorch, by the arguments of the function."""
    attributes, dim = op.attributes, op.attributes.get("dim", 0)

    def padded(a: Any) -> Any:
        widths = attributes["pad"]
        pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)][::-1]
        return _padded(a, [(0, 0)] * (a.ndim - len(pairs)) + pairs, attributes)

    return {
        "permute": lambda a: a.transpose(attributes.get("dims")),
        "transpose": lambda a: a.swapaxes(attributes.get("dim0", 0), attributes.get("dim1", -1)),
        "getitem": lambda a: a[_indexed(attributes["index"])],
        "select": lambda a: np.take(a, attributes["index"], axis=dim),
        "narrow": lambda a: np.take(a, attributes["start"] + np.arange(attributes["length"]), axis=dim),
        "flip": lambda a: np.flip(a, attributes.get("dims")), "pad": padded,
        "index_select": lambda a: np.take(a, op.inputs[2], axis=dim),
        "repeat": lambda a: np.tile(a, attributes["repeats"]),
        "roll": lambda a: np.roll(a, attributes["shifts"], attributes.get("dims") or None),
        "unbind": lambda a: [np.take(a, i, axis=dim) for i in range(a.shape[dim])],
        **dict.fromkeys(("expand", "expand_as"), lambda a: np.broadcast_to(a, op.outputs[0].shape)),
        **dict.fromkeys(
            ("split", "split_with_sizes", "tensor_split", "chunk"), lambda a: _split(a, op.outputs, dim)
        ),
    }  # fmt: skip


def of_tensorflow(op: Reading) -> Mapping[str, Move]:
    """Return the moves of TensorFlow, by inputs that are constants."""
    attributes, axis = op.attributes, op.attributes.get("axis", 0)

    def cut(a: Any) -> Any:
        begin, end, *step = (op.integers(at=i) for i in range(1, len(op.inputs)))
        if step:
            return a[_strided(begin, end, step[0], attributes)]
        return a[tuple(slice(b, None if n < 0 else b + n) for b, n in zip(begin, end, strict=True))]

    return {
        "permute": lambda a: a.transpose(op.integers(at=1)), "getitem": cut,
        "unbind": lambda a: [np.take(a, i, axis=axis) for i in range(len(op.outputs))],
        "expand": lambda a: np.broadcast_to(a, op.outputs[0].shape),
        "split": lambda a: np.split(a, attributes["num_split"], axis=int(op.inputs[0])),
        **dict.fromkeys(("pad", "Pad", "PadV2"), lambda a: _padded(a, op.inputs[1].tolist(), {})),
    }  # fmt: skip


def of_onnx(op: Reading) -> Mapping[str, Move]:
    """Return the moves of ONNX, by inputs that are constants, in older models by attributes."""
    attributes = op.attributes

    def cut(a: Any) -> Any:
        begin, end = op.integers("starts", at=1), op.integers("ends", at=2)
        axes = op.integers("axes", at=3) or range(len(begin))
        index = [slice(None)] * a.ndim
        for axis, first, last, step in zip(
            axes, begin, end, op.integers(at=4) or [1] * len(begin), strict=True
        ):
            index[axis] = _slice(first, last, step, a.shape[axis])
        return a[tuple(index)]

    def padded(a: Any) -> Any:
        widths = op.integers("pads", at=1)
        pairs, count = [(0, 0)] * a.ndim, len(widths) // 2
        for i, axis in enumerate(op.integers(at=3) or range(count)):
            pairs[axis] = (widths[i], widths[i + count])
        return _padded(a, pairs, attributes)

    parts = op.outputs[0] if op.outputs and isinstance(op.outputs[0], list) else op.outputs
    return {
        "permute": lambda a: a.transpose(attributes.get("perm")), "getitem": cut, "pad": padded,
        "split": lambda a: _split(a, parts, attributes.get("axis", 0)),
        "expand": lambda a: np.broadcast_to(a, op.outputs[0].shape),
    }  # fmt: skip


def _split(a: NDArray[Any], parts: Sequence[NDArray[Any]], axis: int) -> list[NDArray[Any]]:
    return np.split(a, np.cumsum([one.shape[axis] for one in parts])[:-1], axis=axis)


def _padded(a: NDArray[Any], pairs: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> NDArray[Any]:
    mode = text(attributes.get("mode", "constant"))
    if mode != "constant" or min(map(min, pairs), default=0) < 0:
        raise NotImplementedError(f"a pad in mode {mode} by {pairs}")
    return np.pad(a, pairs, constant_values=-1)


def _indexed(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return tuple(map(_indexed, index))
    return array(index) if hasattr(index, "detach") else index


def _slice(first: int, last: int, step: int, size: int) -> slice:
    """Bounds as ONNX clips them: what lies ahead of the first element is no count from the end."""
    first, last = (one + size if one < 0 else one for one in (first, last))
    return slice(max(first, 0), last if last >= 0 else None if step < 0 else 0, step)


def _strided(
    begin: Sequence[int], end: Sequence[int], step: Sequence[int], attributes: Mapping[str, Any]
) -> Any:
    """Return the index of NumPy for a StridedSlice."""
    index: list[Any] = []
    for i, (first, last, stride) in enumerate(zip(begin, end, step, strict=True)):

        def has(mask: str, i: int = i) -> bool:
            return bool(int(attributes.get(f"{mask}_mask", 0)) >> i & 1)

        if has("ellipsis"):
            index.append(...)
        elif has("new_axis"):
            index.append(None)
        elif has("shrink_axis"):
            index.append(first)
        else:
            index.append(slice(None if has("begin") else first, None if has("end") else last, stride))
    return tuple(index)
