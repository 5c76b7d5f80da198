"""What the rules read of TensorFlow's ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from amanda.tools.effective_path._reading import Move, Norm, Reading, Window, padding_of_same, text


class TensorFlowReading(Reading):
    """An op of TensorFlow."""

    usual = "NHWC"

    def windows(self, axes: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> Iterator[Window]:
        """By `strides` and `dilations` of all axes, and `padding`."""
        attributes, ksize = self.attributes, self.attributes.get("ksize")
        for nth, (axis, size, count) in enumerate(zip(axes, sizes, counts, strict=True)):
            kernel = self.inputs[1].shape[nth] if ksize is None else ksize[axis]
            stride, dilation = attributes["strides"][axis], (attributes.get("dilations") or {axis: 1})[axis]
            before = 0
            if text(attributes["padding"]) == "SAME":
                before = padding_of_same(size, count, kernel, stride, dilation) // 2
            elif attributes.get("explicit_paddings"):
                before = attributes["explicit_paddings"][2 * axis]
            yield Window(kernel, stride, before, dilation)

    def axes(self) -> list[int] | None:
        """The second input."""
        axes: list[int] = np.atleast_1d(self.inputs[1]).tolist()
        return axes

    def norm(self) -> Norm:
        """Of input, scale, offset, mean and variance."""
        _, gamma, _, _, variance = self.inputs
        trains = self.attributes.get("is_training")
        return Norm(gamma, None if trains else variance, self.attributes["epsilon"])

    def axis(self) -> int:
        """An input or, of what is stacked, an attribute."""
        return int(self.inputs[1] if self.kind == "cat" else self.attributes.get("axis", 0))

    def equation(self) -> str:
        """The attribute."""
        return text(self.attributes["equation"])

    def special(self) -> dict[str, Any]:
        """Products of what is turned, and differences."""
        if self.kind == "matmul":
            names = (("transpose_a", "adj_x"), ("transpose_b", "adj_y"))
            return {"turned": tuple(any(bool(self.attributes.get(name)) for name in one) for one in names)}
        return {"signs": (1, -1)} if self.kind == "sub" else {}

    def moves(self) -> Mapping[str, Move]:
        """By inputs that are constants."""
        inputs, outputs, attributes = self.inputs, self.outputs, self.attributes

        def cut(a: Any) -> Any:
            if len(inputs) == 3:  # a Slice, of begin and size
                begin, size = (np.asarray(one).tolist() for one in inputs[1:])
                return a[tuple(slice(b, None if n < 0 else b + n) for b, n in zip(begin, size, strict=True))]
            begin, end, step = (np.asarray(one).tolist() for one in inputs[1:])
            return a[strided(begin, end, step, attributes)]

        def padded(a: Any) -> Any:
            return np.pad(a, np.asarray(inputs[1]).tolist(), constant_values=-1)

        return {
            "permute": lambda a: a.transpose(np.asarray(inputs[1]).tolist()), "getitem": cut,
            **dict.fromkeys(("pad", "Pad", "PadV2"), padded),
            "unbind": lambda a: [np.take(a, i, axis=attributes.get("axis", 0)) for i in range(len(outputs))],
            "expand": lambda a: np.broadcast_to(a, outputs[0].shape),
            "split": lambda a: np.split(a, attributes["num_split"], axis=int(inputs[0])),
        }  # fmt: skip


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
