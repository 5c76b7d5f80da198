"""A tensor's content in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, prod
from typing import Any, NamedTuple

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.results import made_of, number_of


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
        tensors = tensors_of(tensor)
        shape, numbers = tensors.extents(tensor), tensors.stored_values(tensor, widen=True)
        if numbers is None:
            return cls(shape, dtype, 0, 0)
        finite = do("isfinite", numbers)
        nan, inf = (int(do("count_nonzero", do(test, numbers))) for test in ("isnan", "isinf"))
        left = prod(map(int, numbers.shape)) - nan - inf
        if left == 0:
            return cls(shape, dtype, nan, inf)
        infinite = do("full_like", numbers, float("inf"))
        least = float(do("min", do("where", finite, numbers, infinite)))
        most = float(do("max", do("where", finite, numbers, -infinite)))
        mean = float(do("sum", do("where", finite, numbers, do("zeros_like", numbers)))) / left
        return cls(shape, dtype, nan, inf, least, most, mean)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Summary:
        """Return the summary that `_asdict` described."""
        numbers = {name: number_of(told[name]) for name in ("least", "most", "mean")}
        return made_of(cls, {**told, **numbers, "shape": tuple(told["shape"])})

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
    tensors = tensors_of(tensor)
    total = tensors.checksum(tensor)
    if isfinite(total) or not (inf or isnan(total)):
        return 0
    numbers = tensors.stored_values(tensor, widen=True)
    found = NAN if isnan(total) and bool(do("any", do("isnan", numbers))) else 0
    return found | (INF if inf and bool(do("any", do("isinf", numbers))) else 0)


def are_finite(values: Sequence[Any]) -> bool:
    """Return True if all are arrays of finite numbers in memory that NumPy reads; a hot path.

    False proves nothing: a sum of squares may overflow, which NumPy warns of.  values: of one library.
    """
    arrays = tensors_of(values[0]).shared_floats(values) if values else []
    if arrays is None:
        return False
    small: dict[Any, list[Any]] = {}
    for array in arrays:
        row, kind = array.ravel(), array.dtype
        if row.size <= _SMALL:
            small.setdefault(kind, []).append(row)
        elif not _is_finite(row):
            return False
    return all(_is_finite(np.concatenate(rows)) for rows in small.values())


_SMALL = 1024
"""Elements below which it pays to look at arrays together."""


def _is_finite(row: Any) -> bool:
    is_single = row.dtype == np.float32  # BLAS takes several threads for other types
    return isfinite(abs(row.dot(row) if is_single else tensors_of(row).total(row)))
