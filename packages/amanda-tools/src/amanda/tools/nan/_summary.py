"""A tensor's content in a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, isnan, prod
from typing import Any, NamedTuple

from autoray import do

from amanda.tools.mapping import backend_of, local
from amanda.tools.nan import _pytorch, _tensorflow


class Summary(NamedTuple):
    """Extents and element type, how many elements are NaN or infinite, and what is told of the others.

    least, most, mean: of the finite elements; None where there are none.
    """

    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    least: float | None = None
    most: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, tensor: Any, dtype: str) -> Summary:
        """The summary of a tensor of floating or complex numbers (the magnitudes of the latter)."""
        tensor = local(tensor)
        nested = getattr(tensor, "is_nested", False)
        shape = (int(tensor.numel()),) if nested else tuple(int(extent) for extent in tensor.shape)
        tensor = _numbers(tensor)
        if tensor is None:
            return cls(shape, dtype, 0, 0)
        finite = do("isfinite", tensor)
        nan, inf = _count(do("isnan", tensor)), _count(do("isinf", tensor))
        zeros = do("zeros_like", tensor)
        left = prod(map(int, tensor.shape)) - nan - inf
        if left == 0:
            return cls(shape, dtype, nan, inf)
        infinite = do("full_like", tensor, float("inf"))
        least = float(do("min", do("where", finite, tensor, infinite)))
        most = float(do("max", do("where", finite, tensor, -infinite)))
        mean = float(do("sum", do("where", finite, tensor, zeros))) / left
        return cls(shape, dtype, nan, inf, least, most, mean)

    def __str__(self) -> str:
        extents = "x".join(map(str, self.shape)) or "scalar"
        found = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        if self.least is not None:
            found.append(f"{self.least:.3g} to {self.most:.3g}, mean {self.mean:.3g}")
        return f"{self.dtype} {extents}: {', '.join(found)}"


NAN, INF = 1, 2
"""Flags of what a tensor holds."""


def held(tensor: Any, inf: bool) -> int:
    """NAN, INF, both or neither: what a tensor holds; Inf is looked for if `inf`.

    The sum of all elements tells of finite ones in one pass; only where it is not finite are they looked at
    one by one.
    """
    numbers = _numbers(tensor)
    if numbers is None:
        return 0
    total = float(_TOTALS.get(backend_of(numbers), _total)(numbers))
    if isfinite(total) or not (inf or isnan(total)):
        return 0
    found = NAN if isnan(total) and bool(do("any", do("isnan", numbers))) else 0
    return found | (INF if inf and bool(do("any", do("isinf", numbers))) else 0)


def copied(tensor: Any) -> Any:
    """A tensor that stays when an op writes into this one."""
    return _pytorch.copied(tensor) if backend_of(tensor) == "torch" else tensor


def _numbers(tensor: Any) -> Any:
    """The numbers that a tensor stores, as one of a kind that every function takes; None without any."""
    plain = _PLAIN.get(backend_of(tensor))
    return plain(tensor) if plain else tensor


_PLAIN: dict[str, Callable[[Any], Any]] = {"torch": _pytorch.plain, "tensorflow": _tensorflow.plain}


_TOTALS: dict[str, Callable[[Any], Any]] = {"torch": _pytorch.total, "tensorflow": _tensorflow.total}


def _total(array: Any) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):
        return abs(array.sum(dtype=None if array.dtype.itemsize >= 4 else np.float32))


def _count(flags: Any) -> int:
    return int(do("count_nonzero", flags))
