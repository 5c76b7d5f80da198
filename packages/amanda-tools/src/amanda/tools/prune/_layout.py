"""Weights in one layout, whatever their framework's is."""

from __future__ import annotations

from collections.abc import Sequence

from autoray import do, shape

from amanda.tools.prune._framework import Array


def canonical(weight: Array, layout: str | None) -> Array:
    """A weight with its axes in the order of output channels, input channels, height, width.

    layout: as in StandardMapping: O out, I in, M how many channels a depthwise convolution makes of one;
    None for a weight whose axes have no fixed meaning, which is left as it is.
    Returns (O, I, ...); of a depthwise convolution's weight (I * M, 1, ...).
    """
    if layout is None:
        return weight
    turned = do("transpose", weight, _order(layout))
    if "M" not in layout:
        return turned
    return do("reshape", turned, canonical_extents(shape(weight), layout))


def restored(mask: Array, layout: str | None, extents: tuple[int, ...]) -> Array:
    """What `canonical` made of a weight of these extents, in that weight's layout again."""
    if layout is None:
        return mask
    order = _order(layout)
    turned = do("reshape", mask, tuple(extents[axis] for axis in order))
    return do("transpose", turned, tuple(order.index(axis) for axis in range(len(order))))


def canonical_extents(extents: Sequence[int], layout: str | None) -> tuple[int, ...]:
    """The shape that `canonical` gives to a weight of these extents."""
    if layout is None:
        return tuple(extents)
    first, second, *kernel = (extents[axis] for axis in _order(layout))
    return (first * second, 1, *kernel) if "M" in layout else (first, second, *kernel)


def _order(layout: str) -> tuple[int, ...]:
    channels = "IM" if "M" in layout else "OI"
    kernel = [axis for axis in layout if axis not in channels]
    return tuple(layout.index(axis) for axis in (*channels, *kernel))
