"""Shapes of values that stand for many samples, as under a vmap."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any


class BatchedShape(tuple[int, ...]):
    """The shape of one sample, with the sizes of the batches that the value has beside it.

    batches: pairs of the level of a vmap and its number of samples.  Unequal to the same shape without them.
    """

    batches: tuple[tuple[int, int], ...]

    def __new__(cls, shape: Iterable[int], batches: Iterable[tuple[int, int]]) -> BatchedShape:
        """Make the shape of a sample in some batches."""
        batched = super().__new__(cls, shape)
        batched.batches = tuple(batches)
        return batched

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.batches == getattr(other, "batches", ())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.batches))

    def __repr__(self) -> str:
        return f"{tuple(self)!r} in batches of {', '.join(str(size) for _, size in self.batches)}"


def sample_count(shapes: Any) -> int:
    """Return how many samples an execution with these shapes computes: 1 without a vmap."""
    return prod(_sizes_by_level(shapes).values())


def _sizes_by_level(shapes: Any) -> dict[int, int]:
    """Return the sizes of the batches of shapes, or of nested lists of shapes, by the level of the vmap."""
    if isinstance(shapes, BatchedShape):
        return dict(shapes.batches)
    sizes: dict[int, int] = {}
    if isinstance(shapes, (list, tuple)):
        for shape in shapes:
            sizes.update(_sizes_by_level(shape))
    return sizes
