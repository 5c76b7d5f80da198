"""Rows of a parameter, such as the experts of a mixture, which the data select for one op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

from amanda.tools.mapping import Origin
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._weight import Weight

if TYPE_CHECKING:
    from torch import Tensor


class Selected:
    """What one execution of an op reads of a parameter's rows, which are weights each."""

    def __init__(self, rows: Reading, origin: Origin) -> None:
        self._rows, self._origin = rows, origin
        self.within = rows.within

    def value_of(self, weight: Weight, value: Any) -> Tensor:
        """The value of a row, also of one that is not selected."""
        whole = self._origin.holder.detach()
        return whole if weight.part is None else whole.as_strided(*weight.part)

    def masked(self, value: Tensor) -> Tensor | None:
        """The rows as an op shall read them; None for no change."""
        if not self._rows.is_masked:
            return None
        for one in self.within:
            one.begin(partial(self.value_of, one, value))
        mask, grown = self._rows.tensors_like(self._origin.holder)
        kept = self._origin.of(mask).to(value.dtype)
        return value * kept if grown is None else (value - self._origin.of(grown).to(value.dtype)) * kept


def order_of_axes(origin: Origin, value: Tensor) -> Sequence[int] | None:
    """In which order the last axes of a tensor are those of the parameter's rows; None where they are not.

    origin: of the tensor, which has elements.
    """
    import torch

    holder = origin.holder
    extents = holder.shape[1:]
    places = origin.of(torch.arange(holder.numel(), device=holder.device).reshape(holder.shape))
    if places.dim() < len(extents):
        return None
    inner = places.reshape(-1, *places.shape[places.dim() - len(extents) :])
    size = extents.numel()
    row = torch.arange(size, device=holder.device).reshape(extents)
    starts = (inner.reshape(len(inner), -1)[:, 0] // size * size).reshape(-1, *[1] * len(extents))
    for axes in permutations(range(len(extents))):
        turned = row.permute(axes)
        if turned.shape == inner.shape[1:] and torch.equal(inner, starts + turned):
            return axes
    return None


def row_layout(layout: str | None, axes: Sequence[int]) -> str | None:
    """The layout of a row, of that in which an op reads it with its axes in another order."""
    if layout is None or len(layout) != len(axes):
        return None
    return "".join(layout[axes.index(axis)] for axis in range(len(axes)))
