"""What the rules read of PyTorch's ops, in words that are the same for every framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._windows import adaptive, sliding
from amanda.tools.mapping import local


def array(tensor: Any) -> NDArray[Any] | None:
    """A copy of a tensor on the host, of types that numpy lacks in float32; None of one that is no array."""
    import torch

    if tensor.is_nested or tensor.is_meta:
        return None
    tensor = local(tensor)
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    tensor = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    return np.array(tensor.clone().numpy())


def arguments(
    kind: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attributes: Mapping[str, Any],
    layout: str | None,
) -> dict[str, Any]:
    """By the word of an op: `tables` of windows, `axes`, `move`, `factors`, `signs` and their like."""
    if "pool" in kind or kind.startswith("conv"):
        return {"tables": _tables(kind, inputs, outputs, attributes, layout or "")}
    if kind in ("mean", "sum", "amax"):
        axes = attributes.get("dim")
        return {"axes": None if axes is None or axes == () else np.atleast_1d(axes).tolist()}
    if kind == "batch_norm":
        return {"scale": _scale(inputs, attributes)}
    if kind in ("cat", "stack"):
        return {"axis": attributes.get("dim", 0)}
    if kind in ("addmm", "baddbmm"):
        return {"factors": ((1, 0), (2, 0))}
    if kind in ("add", "sub", "rsub"):
        second = attributes.get("alpha", 1)
        return {"signs": {"add": (1, second), "sub": (1, -second), "rsub": (-second, 1)}[kind]}
    if kind == "scaled_dot_product_attention":
        mask = next((one for one in inputs[3:] if isinstance(one, np.ndarray)), None)
        return {"mask": mask, "causal": attributes.get("is_causal"), "scale": attributes.get("scale")}
    if kind == "einsum":
        return {"equation": next(one for one in (*inputs, *attributes.values()) if isinstance(one, str))}
    move = _moves(kind, inputs, outputs, attributes)
    return {} if move is None else {"move": move}


def _tables(
    kind: str, inputs: Sequence[Any], outputs: Sequence[Any], attributes: Mapping[str, Any], layout: str
) -> list[Any]:
    axes = [i for i, axis in enumerate(layout) if axis not in "NC"]
    sizes, counts = ([one.shape[i] for i in axes] for one in (inputs[0], outputs[0]))
    if kind.startswith("adaptive"):
        return [adaptive(size, count) for size, count in zip(sizes, counts, strict=True)]
    kernel = inputs[1].shape[2:] if kind.startswith("conv") else _each(attributes["kernel_size"], axes)
    dilation = _each(attributes.get("dilation", 1), axes)
    stride = _each(attributes.get("stride") or kernel, axes)
    padding = attributes.get("padding", 0)
    if isinstance(padding, str):
        padding = [
            d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
    each = zip(sizes, counts, kernel, stride, _each(padding, axes), dilation, strict=True)
    return [sliding(*one) for one in each]


def _scale(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """By what a batch norm scales each channel."""
    data, gamma, _, _, variance = inputs[:5]
    if attributes.get("training") or variance is None:
        variance = data.var(axis=tuple(axis for axis in range(data.ndim) if axis != 1))
    scale: NDArray[Any] = 1 / np.sqrt(variance.astype(np.float64) + attributes.get("eps", 1e-5))
    return scale if gamma is None else scale * gamma


def _each(value: Any, axes: Sequence[int]) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * len(axes) if len(values) == 1 else values


def _moves(kind: str, inputs: Sequence[Any], outputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """What an op that moves elements does to an array; None of other ops."""
    shape = outputs[0].shape if outputs and hasattr(outputs[0], "shape") else ()
    dim = attributes.get("dim", 0)

    def parts(indices: Any) -> Any:
        ends = np.cumsum([one.shape[dim] for one in outputs])[:-1]
        return np.split(indices, ends, axis=dim)

    def padded(indices: Any) -> Any:
        widths = attributes["pad"]
        if attributes.get("mode", "constant") != "constant" or min(widths) < 0:
            raise NotImplementedError(f"pad {attributes}")
        pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)][::-1]
        return np.pad(indices, [(0, 0)] * (indices.ndim - len(pairs)) + pairs, constant_values=-1)

    moves = {
        "permute": lambda a: a.transpose(attributes.get("dims")),
        "transpose": lambda a: a.swapaxes(attributes.get("dim0", 0), attributes.get("dim1", -1)),
        "getitem": lambda a: a[_indexed(attributes["index"])],
        "select": lambda a: np.take(a, attributes["index"], axis=dim),
        "narrow": lambda a: np.take(
            a, range(int(attributes["start"]), int(attributes["start"]) + attributes["length"]), axis=dim
        ),
        "expand": lambda a: np.broadcast_to(a, shape), "expand_as": lambda a: np.broadcast_to(a, shape),
        "flip": lambda a: np.flip(a, attributes.get("dims")),
        **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk"), parts), "pad": padded,
        "index_select": lambda a: np.take(a, inputs[2], axis=dim),
        "repeat": lambda a: np.tile(a, attributes["repeats"]),
        "roll": lambda a: np.roll(a, attributes["shifts"], attributes.get("dims") or None),
        "unbind": lambda a: [np.take(a, i, axis=dim) for i in range(a.shape[dim])],
    }  # fmt: skip
    return moves.get(kind)


def _indexed(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return tuple(map(_indexed, index))
    return array(index) if hasattr(index, "detach") else index
