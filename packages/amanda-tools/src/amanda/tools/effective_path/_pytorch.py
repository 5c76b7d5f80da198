"""What the rules read of PyTorch's ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._reading import Move, Norm, Reading, Window
from amanda.tools.mapping import local


class TorchReading(Reading):
    """An op of PyTorch."""

    @staticmethod
    def array(tensor: Any) -> NDArray[Any] | None:
        """A copy of a tensor on the host, of types that numpy lacks in float32; None of what is no array."""
        import torch

        if tensor.is_nested or tensor.is_meta:
            return None
        tensor = local(tensor)
        tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        tensor = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float()
        return np.array(tensor.clone().numpy())

    def windows(self, axes: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> Iterable[Window]:
        """By `stride`, `padding` and `dilation`, each a number or one for each axis."""
        attributes = self.attributes
        convolves = self.kind.startswith("conv")
        kernel = self.inputs[1].shape[2:] if convolves else _each(attributes["kernel_size"], axes)
        dilation = _each(attributes.get("dilation", 1), axes)
        stride = _each(attributes.get("stride") or kernel, axes)
        padding = attributes.get("padding", 0)
        if isinstance(padding, str):
            padding = [
                d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
            ]
        return map(Window, kernel, stride, _each(padding, axes), dilation)

    def axes(self) -> list[int] | None:
        """`dim`, where () is all."""
        axes = self.attributes.get("dim")
        return None if axes is None or axes == () else np.atleast_1d(axes).tolist()

    def norm(self) -> Norm:
        """Of input, weight, bias, mean and variance."""
        gamma, _, _, variance = self.inputs[1:5]
        trains = self.attributes.get("training")
        return Norm(gamma, None if trains else variance, self.attributes.get("eps", 1e-5))

    def axis(self) -> int:
        """`dim`."""
        return int(self.attributes.get("dim", 0))

    def equation(self) -> str:
        """The one that is text."""
        return next(one for one in (*self.inputs, *self.attributes.values()) if isinstance(one, str))

    def special(self) -> dict[str, Any]:
        """Products that are added to, sums with `alpha`, and attention."""
        kind, attributes = self.kind, self.attributes
        if kind in ("addmm", "baddbmm"):
            return {"factors": ((1, 0), (2, 0))}
        if kind in ("add", "sub", "rsub"):
            second = attributes.get("alpha", 1)
            return {"signs": {"add": (1, second), "sub": (1, -second), "rsub": (-second, 1)}[kind]}
        if kind == "scaled_dot_product_attention":
            mask = next((one for one in self.inputs[3:] if isinstance(one, np.ndarray)), None)
            return {"mask": mask, "causal": attributes.get("is_causal"), "scale": attributes.get("scale")}
        return {}

    def moves(self) -> Mapping[str, Move]:
        """By the arguments of the function."""
        inputs, outputs, attributes = self.inputs, self.outputs, self.attributes
        shape = outputs[0].shape if outputs and hasattr(outputs[0], "shape") else ()
        dim = attributes.get("dim", 0)

        def parts(a: Any) -> Any:
            ends = np.cumsum([one.shape[dim] for one in outputs])[:-1]
            return np.split(a, ends, axis=dim)

        def padded(a: Any) -> Any:
            widths = attributes["pad"]
            if attributes.get("mode", "constant") != "constant" or min(widths) < 0:
                raise NotImplementedError(f"pad {attributes}")
            pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)][::-1]
            return np.pad(a, [(0, 0)] * (a.ndim - len(pairs)) + pairs, constant_values=-1)

        return {
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


def _each(value: Any, axes: Sequence[int]) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * len(axes) if len(values) == 1 else values


def _indexed(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return tuple(map(_indexed, index))
    return TorchReading.array(index) if hasattr(index, "detach") else index
