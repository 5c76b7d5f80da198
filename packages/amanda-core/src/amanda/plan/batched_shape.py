"""Shapes of values that stand for many samples, as under a vmap."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

Batches = tuple[tuple[int, int], ...]
Tangents = tuple[tuple[tuple[int, ...], Batches], ...]


class BatchedShape(tuple[int, ...]):
    """The shape of one sample, with the sizes of the batches that the value has beside it.

    batches: pairs of the level of a vmap and its number of samples.
    tangents: of forward-mode derivatives, each as the levels that differentiate, and its own batches.
    Unequal to the same shape with others.
    """

    batches: Batches
    tangents: Tangents

    def __new__(cls, shape: Iterable[int], batches: Batches, tangents: Tangents = ()) -> BatchedShape:
        """Make the shape of a sample in some batches, of a value with some tangents."""
        batched = super().__new__(cls, shape)
        batched.batches, batched.tangents = tuple(batches), tuple(tangents)
        return batched

    def __eq__(self, other: object) -> bool:
        if tuple.__eq__(self, other) is not True or self.batches != getattr(other, "batches", ()):
            return False
        return bool(self.tangents == getattr(other, "tangents", ()))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.batches, self.tangents))

    def __repr__(self) -> str:
        batches = f" in batches of {', '.join(str(size) for _, size in self.batches)}" if self.batches else ""
        tangents = f" with {len(self.tangents)} tangents" if self.tangents else ""
        return f"{tuple(self)!r}{batches}{tangents}"


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
