"""Any further framework: masks are computed with arrays, which autoray makes its tensors again.

autoray has to know the framework's `to_numpy` and `asarray`, and for `finalize` also
`assign(variable, array)`, which writes into a variable; a driver may register them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from autoray import do, to_numpy

from amanda import interceptor
from amanda.tools.prune import _numpy
from amanda.tools.prune._errors import PruneError
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


def identity(holder: Any) -> int:
    """What names a parameter."""
    return interceptor.ordinal(holder)


def held(holder: Any, weight: Any) -> tuple[int, None] | None:
    """What names the parameter that a weight is; None of one that is computed."""
    return (identity(holder), None) if holder is weight else None


def variables(model: Any) -> Iterator[tuple[int, Callable[[None, Callable[[Array], Array]], None]]]:
    """The identities of a model's or a list's parameters, each with what changes its value.

    Raises PruneError where there are none.
    """
    names = ("get_parameters", "parameters")
    listed = next((getattr(model, name) for name in names if callable(getattr(model, name, None))), None)
    try:
        found = list(model if listed is None else listed())
    except TypeError as error:
        raise PruneError(
            f"{type(model).__name__} has no parameters; give a model or a list of parameters"
        ) from error
    for parameter in found:
        yield identity(parameter), _changing(parameter)


def _changing(parameter: Any) -> Callable[[None, Callable[[Array], Array]], None]:
    def change(part: None, changed: Callable[[Array], Array]) -> None:
        do("assign", parameter, changed(stored(parameter)), like=parameter)

    return change
