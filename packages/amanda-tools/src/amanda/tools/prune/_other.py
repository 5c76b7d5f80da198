"""Any further framework: masks are computed with arrays, which autoray makes its tensors again.

autoray has to know the framework's `to_numpy` and `asarray`;  a driver may register them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from autoray import do, to_numpy

from amanda.tools.prune import _numpy
from amanda.tools.prune._numpy import Array

row, lowest_dropped, ranks, like = _numpy.row, _numpy.lowest_dropped, _numpy.ranks, _numpy.like


def plain(weight: Any) -> Array:
    """A weight as an array that masks are computed with, in float32 at least."""
    return _numpy.plain(to_numpy(weight))


def as_mask(kept: Any, weight: Any) -> Any:
    """A mask of 0 and 1 in the weight's own type."""
    return do("asarray", np.asarray(kept, np.float32), like=weight).astype(weight.dtype)


def numbers(array: Any) -> Array:
    """An array of NumPy with the same content."""
    return np.asarray(to_numpy(array))


def stored(array: Any) -> Array:
    """A copy to be written into later."""
    return np.array(to_numpy(array))
