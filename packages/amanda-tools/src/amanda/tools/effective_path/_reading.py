"""What rules read of an op beside its tensors, in words that are the same for every framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.effective_path._windows import Tables, adaptive, sliding
from amanda.tools.kit import tensors_of, windows_of
from amanda.tools.mapping import local

Move = Callable[[NDArray[Any]], Any]
"""Does to an array what an op that moves elements does to its input."""

_TURNED = (("transA", "transpose_a", "adj_x"), ("transB", "transpose_b", "adj_y"))


def array(tensor: Any) -> NDArray[Any] | None:
    """Return a copy of a tensor on the host, of types that NumPy lacks in float32; None for no array."""
    if getattr(tensor, "is_nested", False) or getattr(tensor, "is_meta", False):
        return None
    found = np.array(tensors_of(tensor).to_numpy(local(tensor)))
    return found if found.dtype.isbuiltin == 1 else found.astype(np.float32)


@dataclass(frozen=True)
class Reading:
    """One execution of an op, as its framework has it.

    kind: the word by whose rule it is read.  inputs, outputs: arrays, and values that are no tensors.
    layout, weight_layout: as StandardMapping has them.  moves: of the framework; gives the moves by word.
    """

    kind: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attributes: Mapping[str, Any]
    layout: str | None
    weight_layout: str | None
    moves: Callable[[Reading], Mapping[str, Move]]

    def arguments(self) -> dict[str, Any]:
        """Return what the rule of the op's word takes: `tables` of windows, `axes`, `scale`, `move`, ..."""
        kind, attributes = self.kind, self.attributes
        if "pool" in kind or kind.startswith(("conv", "depthwise_conv")):
            return {"tables": self._tables()}
        if kind in ("mean", "sum", "amax"):
            return {"axes": self._axes()}
        if kind == "batch_norm":
            return {"scale": self._scale()}
        if kind in ("cat", "stack"):
            return {"axis": int(self.given("dim", "axis", at=1 if kind == "cat" else None, default=0))}
        if kind == "einsum":
            values = (attributes.get("equation"), *self.inputs, *attributes.values())
            return {"equation": next(text(one) for one in values if isinstance(one, (str, bytes)))}
        if kind == "matmul":
            return {"turned": tuple(any(bool(attributes.get(one)) for one in names) for names in _TURNED)}
        if kind in ("addmm", "baddbmm"):
            return {"factors": ((1, 0), (2, 0))}
        if kind in ("add", "sub", "rsub"):
            second = attributes.get("alpha", 1)
            return {"signs": {"add": (1, second), "sub": (1, -second), "rsub": (-second, 1)}[kind]}
        if kind == "scaled_dot_product_attention":
            mask = next((one for one in self.inputs[3:] if isinstance(one, np.ndarray)), None)
            return {"mask": mask, "causal": attributes.get("is_causal"), "scale": attributes.get("scale")}
        move = self.moves(self).get(kind)
        return {} if move is None else {"move": move}

    def given(self, *names: str, at: int | None = None, default: Any = None) -> Any:
        """Return the first attribute of these names, else what is given as an input that is no list."""
        found = next((self.attributes[one] for one in names if self.attributes.get(one) is not None), None)
        if found is None and at is not None and at < len(self.inputs):
            found = None if isinstance(self.inputs[at], (list, tuple)) else self.inputs[at]
        return default if found is None else found

    def integers(self, *names: str, at: int | None = None) -> list[int]:
        """Return the same as a list; an empty one where nothing is given."""
        return [int(one) for one in np.atleast_1d(self.given(*names, at=at, default=()))]

    def _axes(self) -> list[int] | None:
        """Return the axes of a reduction; None for all, which no axes are too, but in TensorFlow."""
        axes = self.integers("dim", "axes", at=1)
        return axes if axes or "keep_dims" in self.attributes else None

    def _tables(self) -> Tables:
        layout = self.layout or ""
        axes = [i for i, axis in enumerate(layout) if axis not in "NC"]
        extents = [(self.inputs[0].shape[i], self.outputs[0].shape[i]) for i in axes]
        if self.kind.startswith("adaptive"):
            return [adaptive(*one) for one in extents]
        kernel = []
        if self.weight_layout:
            sizes = dict(zip(self.weight_layout, self.inputs[1].shape, strict=True))
            kernel = [sizes[layout[i]] for i in axes]
        windows = windows_of(self.attributes, layout, kernel)
        return [sliding(*one, window) for one, window in zip(extents, windows, strict=True)]

    def _scale(self) -> NDArray[Any]:
        """Return by what a batch norm scales each channel; in training the variance is that of the batch."""
        _, gamma, _, _, variance = self.inputs[:5]
        if variance is None or self.given("training", "is_training", "training_mode"):
            data = self.inputs[0]
            usual = "NHWC" if "is_training" in self.attributes else "NC"
            channel = (self.layout or usual).index("C")
            variance = data.var(axis=tuple(axis for axis in range(data.ndim) if axis != channel))
        epsilon = self.given("eps", "epsilon", default=1e-5)
        scale: NDArray[Any] = (1 if gamma is None else gamma) / np.sqrt(variance.astype(np.float64) + epsilon)
        return scale


def text(value: Any) -> str:
    """Text that may be kept as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
