"""Arrays of numpy, and of whatever can be turned into such, as blocks of real numbers, and their bins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

BLOCK = 1 << 15
"""Numbers that are worked on at once: as many as stay in a processor's cache."""


def numbers(tensor: Any) -> tuple[Any, int]:
    """The numbers in one row."""
    array = np.asarray(tensor)
    return (np.abs(array) if np.iscomplexobj(array) else array).reshape(-1), 0


def blocks(row: Any) -> Iterator[Any]:
    """Yield parts of a row in float64. Numpy would warn about memory that nobody wrote to."""
    for start in range(0, row.shape[0], BLOCK):
        with np.errstate(invalid="ignore"):
            block = row[start : start + BLOCK].astype(np.float64)
        yield block


def finite_vector(block: Any) -> Any:
    """The ten numbers of `Statistics`, in few steps; None if some are not finite."""
    least, most = block.min(), block.max()
    if not (np.isfinite(least) and np.isfinite(most)):
        return None
    mean = block.mean()
    distance = block - mean
    zeros = block.size - np.count_nonzero(block)
    return np.array(
        [block.size, mean, np.square(distance).sum(), np.abs(block).sum(), least, most, 0, 0, 0, zeros]
    )


def leading_bits(block: Any, bits: int) -> tuple[Any, int]:
    """Exponent and first bits of the mantissa of magnitudes, as integers; those of the number 1."""
    return np.abs(block).view(np.int64) >> (52 - bits), 1023 << bits


def counts(indices: Any, total: int) -> Any:
    """Return the number of times that each index occurs."""
    return np.bincount(indices, minlength=total)


def place(tensor: Any) -> str:
    """Return where a tensor lies."""
    return str(getattr(tensor, "device", "cpu"))


def arrays(tensors: list[Any]) -> list[Any]:
    """Tensors as arrays of numpy."""
    return [np.asarray(tensor) for tensor in tensors]
