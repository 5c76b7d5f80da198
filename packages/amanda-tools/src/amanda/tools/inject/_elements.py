"""Single elements of tensors as bytes and as numbers, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


class Elements(ABC):
    """Reads and replaces elements; bytes are little-endian, a row for each element."""

    @abstractmethod
    def extents(self, value: Any) -> tuple[int, ...] | None:
        """Shape of a dense tensor that holds values; None for anything else."""

    @abstractmethod
    def read(self, value: Any, positions: Positions) -> Bytes:
        """Bytes (n, width) of the elements at positions in the flattened tensor."""

    @abstractmethod
    def replaced(self, value: Any, positions: Positions, raw: Bytes) -> Any:
        """A tensor like `value`, with these bytes at these positions."""

    @abstractmethod
    def as_array(self, value: Any) -> NDArray[Any]:
        """A copy of a whole tensor; in float64 where numpy has no such type."""

    @abstractmethod
    def from_double(self, numbers: NDArray[np.float64], dtype: str) -> Bytes:
        """Bytes of numbers, rounded to a type that numpy does not have."""

    @abstractmethod
    def to_double(self, raw: Bytes, dtype: str) -> NDArray[np.float64]:
        """The numbers that bytes of such a type stand for."""

    def numbers(self, raw: Bytes, dtype: str) -> NDArray[Any]:
        """The numbers that bytes (n, width) stand for."""
        if dtype == "complex32":
            parts = raw.view("<f2").astype(np.float64)
            return np.asarray(parts[:, 0] + 1j * parts[:, 1])
        if _is_numpys(dtype):
            return np.asarray(raw.view(np.dtype(dtype).newbyteorder("<"))[:, 0])
        return self.to_double(raw, dtype)

    def encoded(self, numbers: NDArray[Any], dtype: str) -> Bytes:
        """Bytes (n, width) of numbers: rounded, in integers also clipped to what the type holds.

        Raises ValueError for NaN where an integer is wanted.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if dtype == "complex32":
                made = np.stack([numbers.real, numbers.imag], axis=1).astype("<f2")
            elif not _is_numpys(dtype):
                return self.from_double(np.asarray(numbers, np.float64), dtype)
            elif np.issubdtype(np.dtype(dtype), np.integer):
                made = _integers(numbers, np.iinfo(dtype))
            else:
                made = np.asarray(numbers).astype(np.dtype(dtype).newbyteorder("<"))
        return np.ascontiguousarray(made).reshape(len(numbers), -1).view(np.uint8)


def _is_numpys(dtype: str) -> bool:
    return dtype != "complex32" and dtype != "bfloat16" and not dtype.startswith("float8")


def _integers(numbers: NDArray[Any], limits: Any) -> NDArray[Any]:
    if np.isnan(numbers).any():
        raise ValueError(f"NaN cannot be written into elements of type {limits.dtype}")
    least, most = int(limits.min), int(limits.max)
    infinite = {np.inf: most, -np.inf: least}
    clipped = [
        infinite[one] if one in infinite else min(max(round(one), least), most) for one in numbers.tolist()
    ]
    return np.array(clipped, limits.dtype.newbyteorder("<"))
