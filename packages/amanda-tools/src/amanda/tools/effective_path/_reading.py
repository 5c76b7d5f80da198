"""What the rules read of an op, in words that are the same for every framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._windows import Tables, adaptive, sliding

Move = Callable[[NDArray[Any]], Any]
"""Does to an array what an op that moves elements does to its input."""


class Window(NamedTuple):
    """How a kernel slides along one spatial axis; before: how far it begins outside of the data."""

    kernel: int
    stride: int
    before: int
    dilation: int


class Norm(NamedTuple):
    """A batch norm: its weight, if it has one, and the variance, None for that of the batch."""

    gamma: NDArray[Any] | None
    variance: NDArray[Any] | None
    epsilon: float


@dataclass(frozen=True)
class Reading(ABC):
    """One execution of an op, as its framework has it.

    kind: the word by whose rule it is read.  inputs, outputs: arrays, and values that are no tensors.
    layout: of the data, such as "NCHW", by default `usual`.
    """

    kind: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attributes: Mapping[str, Any]
    layout: str | None

    usual: ClassVar[str] = "NC"

    @staticmethod
    def array(tensor: Any) -> NDArray[Any] | None:
        """A copy of a tensor on the host, of types that numpy lacks in float32; None of what is no array."""
        found = np.array(tensor)
        return found if found.dtype.isbuiltin == 1 else found.astype(np.float32)

    def arguments(self) -> dict[str, Any]:
        """`tables` of windows, `axes`, `axis`, `scale`, `equation`, `move` or what is `special`."""
        kind = self.kind
        if "pool" in kind or kind.startswith(("conv", "depthwise_conv")):
            return {"tables": self._tables()}
        if kind in ("mean", "sum", "amax"):
            return {"axes": self.axes()}
        if kind == "batch_norm":
            return {"scale": self._scale()}
        if kind in ("cat", "stack"):
            return {"axis": self.axis()}
        if kind == "einsum":
            return {"equation": self.equation()}
        if special := self.special():
            return special
        move = self.moves().get(kind)
        return {} if move is None else {"move": move}

    @abstractmethod
    def windows(self, axes: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> Iterable[Window]:
        """Of a convolution or pooling: how it slides along spatial axes of these input and output sizes."""

    @abstractmethod
    def axes(self) -> list[int] | None:
        """Of a reduction: its axes; None for all."""

    @abstractmethod
    def norm(self) -> Norm:
        """Of a batch norm."""

    @abstractmethod
    def axis(self) -> int:
        """Along which inputs are joined."""

    @abstractmethod
    def equation(self) -> str:
        """Of an einsum."""

    @abstractmethod
    def special(self) -> dict[str, Any]:
        """Return options for rules of products, sums and attention: `turned`, `factors`, `signs`, ..."""

    @abstractmethod
    def moves(self) -> Mapping[str, Move]:
        """By word, what an op that moves elements does to an array."""

    def _tables(self) -> Tables:
        axes = [i for i, axis in enumerate(self.layout or "") if axis not in "NC"]
        sizes, counts = ([one.shape[i] for i in axes] for one in (self.inputs[0], self.outputs[0]))
        extents = list(zip(sizes, counts, strict=True))
        if self.kind.startswith("adaptive"):
            return [adaptive(*one) for one in extents]
        windows = self.windows(axes, sizes, counts)
        return [sliding(*one, *window) for one, window in zip(extents, windows, strict=True)]

    def _scale(self) -> NDArray[Any]:
        """By what a batch norm scales each channel."""
        gamma, variance, epsilon = self.norm()
        if variance is None:
            data, channel = self.inputs[0], (self.layout or self.usual).index("C")
            variance = data.var(axis=tuple(axis for axis in range(data.ndim) if axis != channel))
        scale: NDArray[Any] = (1 if gamma is None else gamma) / np.sqrt(variance.astype(np.float64) + epsilon)
        return scale


def padding_of_same(size: int, count: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the padding of an axis at both ends together, where a framework pads by itself."""
    return max((count - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)


def text(value: Any) -> str:
    """Text that may be kept as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
