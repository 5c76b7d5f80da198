"""Padding of convolutions of PyTorch that leaves the output its shape with a window of another size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import amanda
from amanda import interceptor
from amanda.tools.kit import RequiredNames

_REQUIRED = RequiredNames(
    "amanda.tools.search", "torch", *(f"torch:nn.Conv{axes}d._conv_forward" for axes in (1, 2, 3))
)


def padded(padding: Any, dilation: Any, change: Sequence[int]) -> list[int]:
    """Return the padding of each axis.  change: of the sizes of the window."""
    pads = list(padding) if isinstance(padding, (list, tuple)) else [padding]
    pads *= len(change) // len(pads)
    return [pad + more for pad, more in zip(pads, _more(dilation, change), strict=True)]


def _more(dilation: Any, change: Sequence[int]) -> list[int]:
    """Return by how much the padding of each axis grows at each side."""
    steps = list(dilation) if isinstance(dilation, (list, tuple)) else [dilation]
    steps *= len(change) // len(steps)
    return [step * size // 2 for step, size in zip(steps, change, strict=True)]


@dataclass(frozen=True)
class Edges:
    """Padding by a module of torch.nn, ahead of its convolution, with values of the input.

    mode: "reflect", "replicate" or "circular".  pads: before and after each axis, the last axis first.
    """

    mode: str
    pads: tuple[int, ...]

    @classmethod
    def of(cls, context: amanda.OpContext) -> Edges | None:
        """Return the padding at an op; None where no module of torch.nn pads."""
        _REQUIRED.check()
        from torch import nn

        modules = [one for one in interceptor.subjects() if isinstance(one, nn.Module)]
        module: Any = modules[-1] if modules else None
        forwards = [kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]
        if getattr(type(module), "_conv_forward", None) not in forwards or module.padding_mode == "zeros":
            return None
        return cls(module.padding_mode, tuple(module._reversed_padding_repeated_twice))

    def _changed_pads(self, dilation: Any, change: Sequence[int]) -> list[int]:
        more = [one for one in reversed(_more(dilation, change)) for _ in range(2)]
        return [pad + one for pad, one in zip(self.pads, more, strict=True)]

    def refusal(self, shape: Sequence[int], dilation: Any, change: Sequence[int]) -> str:
        """Return why an input of this shape, with its padding, cannot be padded for another window, or ""."""
        pads = self._changed_pads(dilation, change)
        if min(pads) < 0:
            return f"its padding is {list(self.pads)}: a smaller window would give more"
        most = [
            size - before - after - (self.mode == "reflect")
            for size, before, after in zip(reversed(shape), self.pads[::2], self.pads[1::2], strict=False)
            for _ in range(2)
        ]
        is_wide = self.mode != "replicate" and any(pad > bound for pad, bound in zip(pads, most, strict=True))
        return f"the input is smaller than its {self.mode} padding would be" if is_wide else ""

    def changed(self, x: Any, dilation: Any, change: Sequence[int]) -> Any:
        """Return a padded input with the padding for another window."""
        from torch.nn.functional import pad

        if not any(change):
            return x
        inner = pad(x, [-size for size in self.pads])
        return pad(inner, self._changed_pads(dilation, change), mode=self.mode)
