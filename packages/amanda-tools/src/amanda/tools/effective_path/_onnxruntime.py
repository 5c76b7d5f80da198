"""What the rules read of ONNX' nodes, in words that are the same for every framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.effective_path._windows import adaptive, sliding

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


def array(tensor: Any) -> NDArray[Any]:
    """A copy of an array; of types that numpy lacks, in float32."""
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
    if "pool" in kind or kind.startswith("conv"):
        return {"tables": _tables(kind, inputs, outputs, attributes, layout or "")}
    if kind in ("mean", "sum", "amax"):
        return {"axes": _integers(_at(inputs, 1, attributes.get("axes")))}
    if kind == "batch_norm":
        return {"scale": _scale(inputs, attributes)}
    if kind == "cat":
        return {"axis": attributes["axis"]}
    if kind == "matmul":
        return {"turned": tuple(bool(attributes.get(name)) for name in ("transA", "transB"))}
    if kind == "sub":
        return {"signs": (1, -1)}
    if kind == "einsum":
        return {"equation": _text(attributes["equation"])}
    if kind == "scaled_dot_product_attention":
        mask, causal = _at(inputs, 3), bool(attributes.get("is_causal"))
        return {"mask": mask, "causal": causal, "scale": attributes.get("scale")}
    move = _moves(kind, inputs, outputs, attributes)
    return {} if move is None else {"move": move}


def _tables(
    kind: str, inputs: Sequence[Any], outputs: Sequence[Any], attributes: Mapping[str, Any], layout: str
) -> list[Any]:
    axes = [i for i, axis in enumerate(layout) if axis not in "NC"]
    sizes, counts = ([one.shape[i] for i in axes] for one in (inputs[0], outputs[0]))
    if kind.startswith("adaptive"):
        return [adaptive(size, count) for size, count in zip(sizes, counts, strict=True)]
    kernel = inputs[1].shape[2:] if kind.startswith("conv") else attributes["kernel_shape"]
    ones = [1] * len(axes)
    stride, dilation = (attributes.get(name) or ones for name in ("strides", "dilations"))
    before = list(attributes.get("pads") or [0] * len(axes))[: len(axes)]
    if (automatic := _text(attributes.get("auto_pad", ""))).startswith("SAME"):
        each = zip(sizes, counts, kernel, stride, dilation, strict=True)
        total = [max((n - 1) * s + (k - 1) * d + 1 - size, 0) for size, n, k, s, d in each]
        before = [one // 2 if automatic == "SAME_UPPER" else one - one // 2 for one in total]
    return [sliding(*one) for one in zip(sizes, counts, kernel, stride, before, dilation, strict=True)]


def _scale(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """By what a batch norm scales each channel."""
    data, gamma, _, _, variance = inputs[:5]
    if attributes.get("training_mode"):
        variance = data.var(axis=tuple(axis for axis in range(data.ndim) if axis != 1))
    scale: NDArray[Any] = gamma / np.sqrt(variance.astype(np.float64) + attributes.get("epsilon", 1e-5))
    return scale


def _moves(kind: str, inputs: Sequence[Any], outputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """What an op that moves elements does to an array; None of other ops."""

    def cut(a: Any) -> Any:
        begin, end = (
            _integers(_at(inputs, i, attributes.get(name))) or [] for i, name in ((1, "starts"), (2, "ends"))
        )
        axes = _integers(_at(inputs, 3, attributes.get("axes"))) or range(len(begin))
        index = [slice(None)] * a.ndim
        for axis, first, last, step in zip(
            axes, begin, end, _integers(_at(inputs, 4)) or [1] * len(begin), strict=True
        ):
            index[axis] = _slice(first, last, step, a.shape[axis])
        return a[tuple(index)]

    def padded(a: Any) -> Any:
        widths = _integers(_at(inputs, 1, attributes.get("pads"))) or []
        if _text(attributes.get("mode", "constant")) != "constant" or min(widths, default=0) < 0:
            raise NotImplementedError(f"Pad {dict(attributes)}")
        pairs, count = [(0, 0)] * a.ndim, len(widths) // 2
        for i, axis in enumerate(_integers(_at(inputs, 3)) or range(count)):
            pairs[axis] = (widths[i], widths[i + count])
        return np.pad(a, pairs, constant_values=-1)

    def parts(a: Any) -> Any:
        made = outputs[0] if isinstance(outputs[0], list) else outputs
        axis = attributes.get("axis", 0)
        return np.split(a, np.cumsum([one.shape[axis] for one in made])[:-1], axis=axis)

    moves = {
        "permute": lambda a: a.transpose(attributes.get("perm")), "getitem": cut, "pad": padded,
        "split": parts, "expand": lambda a: np.broadcast_to(a, outputs[0].shape),
    }  # fmt: skip
    return moves.get(kind)


def _slice(first: int, last: int, step: int, size: int) -> slice:
    """Bounds as ONNX clips them: what lies ahead of the first element is no count from the end."""
    first, last = (one + size if one < 0 else one for one in (first, last))
    return slice(max(first, 0), last if last >= 0 else None if step < 0 else 0, step)


def _at(inputs: Sequence[Any], index: int, otherwise: Any = None) -> Any:
    """An input that may be left out, in older models for an attribute."""
    given = inputs[index] if index < len(inputs) else None
    return otherwise if given is None else given


def _integers(value: Any) -> list[int] | None:
    found = None if value is None else [int(one) for one in np.atleast_1d(value)]
    return found or None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
