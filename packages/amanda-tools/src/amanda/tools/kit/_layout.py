"""Weights with their axes in one order, whatever their framework's is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from amanda.tools.libraries import do, shape


class Unfolding(NamedTuple):
    """The way from a weight to its canonical form: reshape to `split`, transpose by `order`, then reshape.

    canonical: the shape at the end.  outputs: number of leading axes of it that are no inputs.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    canonical: tuple[int, ...]
    outputs: int

    @classmethod
    def of(cls, extents: Sequence[int], layout: str) -> Unfolding:
        """Return the way from a weight of these extents to its canonical form.

        layout: as in StandardMapping; further axes in front of it are those of a batch.
        """
        batch = len(extents) - len(layout)
        window = [batch + layout.index(axis) for axis in layout if axis not in "OIM"]
        inputs = batch + layout.index("I")
        if "M" not in layout:
            order = (*range(batch), batch + layout.index("O"), inputs, *window)
            return cls(tuple(extents), order, tuple(extents[axis] for axis in order), batch + 1)
        groups = int(getattr(layout, "groups", extents[inputs]))
        split = (*extents[:inputs], groups, extents[inputs] // groups, *extents[inputs + 1 :])
        after = {axis: axis + (axis > inputs) for axis in range(len(extents))}
        outputs = after[batch + layout.index("M")]
        order = (*range(batch), inputs, outputs, inputs + 1, *(after[axis] for axis in window))
        channels = (groups * split[outputs], split[inputs + 1])
        canonical = (*extents[:batch], *channels, *(extents[axis] for axis in window))
        return cls(split, order, canonical, batch + 1)

    @property
    def turned(self) -> tuple[int, ...]:
        """The shape after the transposition."""
        return tuple(self.split[axis] for axis in self.order)

    @property
    def back(self) -> tuple[int, ...]:
        """The order of axes that undoes the transposition."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))


def canonical(weight: Any, layout: str | None) -> Any:
    """Return a weight with its axes in the order of output channels, input channels, window.

    weight: an array or tensor of any framework.  layout: as in StandardMapping: O out, I in, M how many
    channels come of each group of I; None for a weight whose axes have no fixed meaning, which is returned as
    it is.  Further axes in front are those of a batch, and stay there.
    Returns (O, I, ...); where there is an M, (groups * M, I / groups, ...), which of a depthwise
    convolution's weight is (I * M, 1, ...).
    """
    if layout is None:
        return weight
    way = Unfolding.of(shape(weight), layout)
    return _reshaped(_turned(_reshaped(weight, way.split), way.order), way.canonical)


def restored(array: Any, layout: str | None, extents: Sequence[int]) -> Any:
    """Return what `canonical` made of a weight of these extents in that weight's own layout.

    Without an M in the layout the array may have other extents, such as those of a larger window.
    """
    if layout is None:
        return array
    way = Unfolding.of(extents, layout)
    if "M" not in layout:
        return _turned(array, way.back)
    return _reshaped(_turned(_reshaped(array, way.turned), way.back), tuple(extents))


def canonical_extents(extents: Sequence[int], layout: str | None) -> tuple[int, ...]:
    """Return the shape that `canonical` gives to a weight of these extents."""
    return tuple(extents) if layout is None else Unfolding.of(extents, layout).canonical


def _reshaped(array: Any, extents: tuple[int, ...]) -> Any:
    return array if tuple(shape(array)) == extents else do("reshape", array, extents)


def _turned(array: Any, order: tuple[int, ...]) -> Any:
    return array if order == tuple(range(len(order))) else do("transpose", array, order)
