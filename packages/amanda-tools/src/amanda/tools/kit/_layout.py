"""Weights with their axes in one order, whatever their framework's is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.tools._libraries import do, shape


def canonical(weight: Any, layout: str | None) -> Any:
    """Return a weight with its axes in the order of output channels, input channels, window.

    weight: an array or tensor of any framework.  layout: as in StandardMapping: O out, I in, M how many
    channels a depthwise convolution makes of one; None for a weight whose axes have no fixed meaning, which
    is returned as it is.
    Returns (O, I, ...); of a depthwise convolution's weight (I * M, 1, ...).
    """
    if layout is None:
        return weight
    order = _order(layout)
    turned = weight if order == tuple(range(len(order))) else do("transpose", weight, order)
    return turned if "M" not in layout else do("reshape", turned, canonical_extents(shape(weight), layout))


def restored(array: Any, layout: str | None, extents: Sequence[int]) -> Any:
    """Return what `canonical` made of a weight of these extents in that weight's own layout."""
    if layout is None:
        return array
    order = _order(layout)
    turned = array if "M" not in layout else do("reshape", array, tuple(extents[axis] for axis in order))
    back = tuple(order.index(axis) for axis in range(len(order)))
    return turned if back == tuple(range(len(back))) else do("transpose", turned, back)


def canonical_extents(extents: Sequence[int], layout: str | None) -> tuple[int, ...]:
    """Return the shape that `canonical` gives to a weight of these extents."""
    if layout is None:
        return tuple(extents)
    first, second, *window = (extents[axis] for axis in _order(layout))
    return (first * second, 1, *window) if "M" in layout else (first, second, *window)


def _order(layout: str) -> tuple[int, ...]:
    channels = "IM" if "M" in layout else "OI"
    window = [axis for axis in layout if axis not in channels]
    return tuple(layout.index(axis) for axis in (*channels, *window))
