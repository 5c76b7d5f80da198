"""Fake quantisation of arrays in host memory, a piece at a time: its steps stay in the processor's cache.

A framework's own operators pass over the whole tensor in each step, into memory that is new each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_PIECE = 65_536
"""Elements."""


def on_grid(
    x: Floats, scale: Floats, zero_point: Floats, low: int, high: int, axes: Sequence[int], into: Floats
) -> NDArray[np.intp]:
    """Write `fake_quantize` of a contiguous array, half to even; the flat positions of what was clipped.

    NaN counts to that.  scale, zero_point: scalars, or (channels,) with `axes` of the channels in x, which
    follow one another.  into: a contiguous array of its shape.
    """
    rows, made = _rows(x, axes), _rows(into, axes)
    s, z = (_beside(np.asarray(one, np.float32), x, axes) for one in (scale, zero_point))
    inverse = np.float32(1) / s
    each = max(1, _PIECE // prod(rows.shape[1:]))
    clipped = []
    for first in range(0, len(rows), each):
        piece, out = rows[first : first + each], made[first : first + each]
        own = slice(first, first + each) if len(s) > 1 else slice(None)
        np.multiply(piece, inverse[own], out=out)
        np.rint(out, out=out)
        np.add(out, z[own], out=out)
        inside = np.clip(out, np.float32(low), np.float32(high))
        outside = inside != out
        if outside.any():
            clipped.append(np.flatnonzero(outside) + first * prod(rows.shape[1:]))
        np.subtract(inside, z[own], out=inside)
        np.multiply(inside, s[own], out=out)
    return np.concatenate(clipped) if clipped else np.empty(0, np.intp)


def _rows(x: Floats, axes: Sequence[int]) -> Floats:
    """The same elements with one axis before those of channels; with one in all where there are none."""
    if not axes:
        return x.reshape(-1)
    return x.reshape(-1, *x.shape[axes[0] :]) if axes[0] else x


def _beside(parameter: Floats, x: Floats, axes: Sequence[int]) -> Floats:
    """Channels' numbers in a shape that broadcasts with `_rows`."""
    if not axes:
        return parameter.reshape(1)
    first, last = axes[0], axes[-1] + 1
    return parameter.reshape(*([1] if first else []), *x.shape[first:last], *[1] * (x.ndim - last))
