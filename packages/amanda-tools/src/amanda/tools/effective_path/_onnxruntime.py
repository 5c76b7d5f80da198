"""What the rules read of ONNX' nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import amanda
from amanda.tools.effective_path._reading import Move, Norm, Reading, Window, padding_of_same, text

_OTHERWISE = ("FusedConv", "MultiHeadAttention", "SkipLayerNormalization")


def word(context: amanda.OpContext) -> str:
    """The word by whose rule a node is read; its own type where it computes more than that, or integers."""
    name, attributes = context.get_op_type(), context.get_attrs()
    otherwise = name in _OTHERWISE or name.startswith("QLinear") or name.endswith("Integer")
    if name == "Gemm":
        otherwise = bool(attributes.get("transA"))
    if name == "Attention":
        extents = context["shape"](context.get_inputs()[0])
        otherwise = extents is None or len(extents) != 4 or len(context.get_inputs()) > 4
    return name if otherwise else str(context["type"])


class OnnxReading(Reading):
    """A node of an ONNX graph."""

    def windows(self, axes: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> Iterable[Window]:
        """By `strides`, `pads` and `dilations` of the spatial axes, or `auto_pad`."""
        attributes, ones = self.attributes, [1] * len(axes)
        kernel = self.inputs[1].shape[2:] if self.kind.startswith("conv") else attributes["kernel_shape"]
        stride, dilation = (attributes.get(name) or ones for name in ("strides", "dilations"))
        before = list(attributes.get("pads") or [0] * len(axes))[: len(axes)]
        if (automatic := text(attributes.get("auto_pad", ""))).startswith("SAME"):
            total = map(padding_of_same, sizes, counts, kernel, stride, dilation)
            before = [one // 2 if automatic == "SAME_UPPER" else one - one // 2 for one in total]
        return map(Window, kernel, stride, before, dilation)

    def axes(self) -> list[int] | None:
        """The second input, in older models an attribute."""
        return _integers(self._at(1, "axes"))

    def norm(self) -> Norm:
        """Of input, scale, bias, mean and variance."""
        gamma, _, _, variance = self.inputs[1:5]
        trains = self.attributes.get("training_mode")
        return Norm(gamma, None if trains else variance, self.attributes.get("epsilon", 1e-5))

    def axis(self) -> int:
        """The attribute."""
        return int(self.attributes.get("axis", 0))

    def equation(self) -> str:
        """The attribute."""
        return text(self.attributes["equation"])

    def special(self) -> dict[str, Any]:
        """Products of what is turned, differences, and attention."""
        kind, attributes = self.kind, self.attributes
        if kind == "matmul":
            return {"turned": tuple(bool(attributes.get(name)) for name in ("transA", "transB"))}
        if kind == "sub":
            return {"signs": (1, -1)}
        if kind == "scaled_dot_product_attention":
            mask, causal = self._at(3), bool(attributes.get("is_causal"))
            return {"mask": mask, "causal": causal, "scale": attributes.get("scale")}
        return {}

    def moves(self) -> Mapping[str, Move]:
        """By inputs that are constants, in older models by attributes."""
        outputs, attributes = self.outputs, self.attributes

        def cut(a: Any) -> Any:
            begin, end = (_integers(self._at(i, name)) or [] for i, name in ((1, "starts"), (2, "ends")))
            axes = _integers(self._at(3, "axes")) or range(len(begin))
            steps = _integers(self._at(4)) or [1] * len(begin)
            index = [slice(None)] * a.ndim
            for axis, first, last, step in zip(axes, begin, end, steps, strict=True):
                index[axis] = _slice(first, last, step, a.shape[axis])
            return a[tuple(index)]

        def padded(a: Any) -> Any:
            widths = _integers(self._at(1, "pads")) or []
            if text(attributes.get("mode", "constant")) != "constant" or min(widths, default=0) < 0:
                raise NotImplementedError(f"Pad {dict(attributes)}")
            pairs, count = [(0, 0)] * a.ndim, len(widths) // 2
            for i, axis in enumerate(_integers(self._at(3)) or range(count)):
                pairs[axis] = (widths[i], widths[i + count])
            return np.pad(a, pairs, constant_values=-1)

        def parts(a: Any) -> Any:
            made = outputs[0] if isinstance(outputs[0], list) else outputs
            axis = attributes.get("axis", 0)
            return np.split(a, np.cumsum([one.shape[axis] for one in made])[:-1], axis=axis)

        return {
            "permute": lambda a: a.transpose(attributes.get("perm")), "getitem": cut, "pad": padded,
            "split": parts, "expand": lambda a: np.broadcast_to(a, outputs[0].shape),
        }  # fmt: skip

    def _at(self, index: int, attribute: str = "") -> Any:
        """An input that may be left out, in older models for an attribute."""
        given = self.inputs[index] if index < len(self.inputs) else None
        return self.attributes.get(attribute) if given is None else given


def _slice(first: int, last: int, step: int, size: int) -> slice:
    """Bounds as ONNX clips them: what lies ahead of the first element is no count from the end."""
    first, last = (one + size if one < 0 else one for one in (first, last))
    return slice(max(first, 0), last if last >= 0 else None if step < 0 else 0, step)


def _integers(value: Any) -> list[int] | None:
    found = None if value is None else [int(one) for one in np.atleast_1d(value)]
    return found or None
