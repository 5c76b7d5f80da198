"""What a tensor holds, in a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
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


def is_finite(tensor: Any) -> bool:
    """Whether every element is."""
    numbers = _numbers(tensor)
    return numbers is None or bool(do("all", do("isfinite", numbers)))


def _numbers(tensor: Any) -> Any:
    """The numbers that a tensor stores, as one of a kind that every function takes; None without any."""
    plain = _PLAIN.get(backend_of(tensor))
    return plain(tensor) if plain else tensor


_PLAIN: dict[str, Callable[[Any], Any]] = {"torch": _pytorch.plain, "tensorflow": _tensorflow.plain}


def _count(flags: Any) -> int:
    return int(do("count_nonzero", flags))
