"""The part of a tensor that an intervention changes: token positions and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.errors import AmandaError
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PatchError(AmandaError, ValueError):
    """An option is not valid, a value does not fit, or nothing was selected."""


class Region(NamedTuple):
    """Token positions along an axis, and attention heads, which are equal parts of the last axis.

    positions, heads: None for all; negative numbers count from the end.  num_heads: of the last axis.
    """

    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    num_heads: int | None = None
    axis: int = 1

    @classmethod
    def of(
        cls, positions: Sequence[int] | int | None, heads: Sequence[int] | int | None, num_heads: int | None,
        axis: int,
    ) -> Region:  # fmt: skip
        """Return the region of these options; raise PatchError for contradictory options."""
        region = cls(_as_tuple(positions), _as_tuple(heads), num_heads, axis)
        if region.heads is not None:
            if num_heads is None or num_heads < 1:
                raise PatchError(
                    f"heads is {heads}, num_heads is {num_heads}; give num_heads, the number of all heads"
                )
            invalid = [head for head in region.heads if not -num_heads <= head < num_heads]
            if invalid:
                raise PatchError(f"heads has {invalid[0]}; there are {num_heads}, counted from 0")
        return region

    @property
    def is_all(self) -> bool:
        """True for a region that is the whole tensor."""
        return self.positions is None and self.heads is None

    def mask(self, shape: Sequence[int], name: str) -> NDArray[np.bool_] | None:
        """Return True for elements in the region, to be broadcast; None if no position exists.

        name: of the tensor, for errors.  Raises PatchError for a shape without such an axis or heads.
        """
        mask = np.ones([1] * len(shape), bool)
        if self.positions is not None:
            if not -len(shape) <= self.axis < len(shape):
                raise PatchError(f"{name} has shape {tuple(shape)}, which lacks axis {self.axis}")
            size = shape[self.axis]
            existing = [position for position in self.positions if -size <= position < size]
            if not existing:
                return None
            mask = mask & _axis_mask(self.axis, size, existing, len(shape))
        if self.heads is not None:
            assert self.num_heads is not None
            width, remainder = divmod(shape[-1] if shape else 0, self.num_heads)
            if remainder or not width:
                raise PatchError(f"{name} has shape {tuple(shape)}; {self.num_heads} heads do not divide it")
            columns = [
                (head % self.num_heads) * width + column for head in self.heads for column in range(width)
            ]
            mask = mask & _axis_mask(-1, shape[-1], columns, len(shape))
        return mask


def _axis_mask(axis: int, size: int, indices: Sequence[int], rank: int) -> NDArray[np.bool_]:
    row = np.zeros(size, bool)
    row[list(indices)] = True
    extents = [1] * rank
    extents[axis] = size
    return row.reshape(extents)


def is_value(value: Any, depth: int = 0) -> bool:
    """Return True for a number, a tensor, or lists and dicts of these, as `set`, `add` and `scale` take."""
    if isinstance(value, (Mapping, list)) and depth < 2:
        parts = list(value.values()) if isinstance(value, Mapping) else value
        return bool(parts) and all(is_value(part, depth + 1) for part in parts)
    if isinstance(value, np.generic) or not hasattr(value, "shape"):
        return isinstance(value, Real) and not isinstance(value, bool)
    return (
        getattr(value, "dtype", None) is not None
        and str(value.dtype) not in ("object", "bool")
        and not (isinstance(value, np.ndarray) and value.dtype.kind in "OUSVMmb")
    )


def _as_tuple(numbers: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)
