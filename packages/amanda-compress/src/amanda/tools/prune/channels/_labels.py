"""Labels of channels: disjoint sets, and arrays that say which channel each place of a tensor belongs to.

A tensor has families: integer arrays of the tensor's rank, whose extents are those of the tensor where the
family varies and 1 elsewhere.  Two labels in one set are channels that are removed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from amanda.tools.libraries import numpy as np

Family = Any
"""An integer array of NumPy."""

Families = tuple[Family, ...]
Part = tuple[Families, tuple[int, ...]]
"""The families of a tensor, and the tensor's extents."""


class Labels:
    """Disjoint sets of labels; a set that is left whole has a reason."""

    def __init__(self) -> None:
        self._parents = np.zeros(0, np.int64)
        self._left: list[tuple[Any, str]] = []
        self._produced: list[Any] = []
        self.blocks: list[Family] = []

    @property
    def count(self) -> int:
        """Return how many labels there are."""
        return len(self._parents)

    def fresh(self, count: int) -> Family:
        """Return new labels, each a set of its own."""
        first = len(self._parents)
        self._parents = np.concatenate([self._parents, np.arange(first, first + count)])
        return self._parents[first:].copy()

    def roots(self, labels: Family) -> Family:
        """Return for each label the one that stands for its set."""
        found = self._parents[labels]
        while True:
            above = self._parents[found]
            if (above == found).all():
                return found
            found = above

    def unite(self, one: Family, other: Family) -> None:
        """Make one set of the labels at the same places, after broadcasting."""
        one, other = np.broadcast_arrays(self.roots(one), self.roots(other))
        different = one != other
        pairs = np.unique(np.stack([one[different], other[different]]), axis=1)
        for first, second in pairs.T.tolist():
            first, second = self._root(first), self._root(second)
            self._parents[max(first, second)] = min(first, second)

    def _root(self, label: int) -> int:
        while (above := int(self._parents[label])) != label:
            self._parents[label] = self._parents[above]
            label = above
        return label

    def leave(self, labels: Iterable[Family] | Family, reason: str) -> None:
        """Keep the channels of labels whole; reason: "" for axes that are no channels."""
        for one in labels if isinstance(labels, (tuple, list)) else (labels,):
            self._left.append((np.unique(one), reason))

    def produce(self, labels: Family | None) -> None:
        """Note that an op makes these channels of a weight: only such channels can be removed."""
        if labels is not None:
            self._produced.append(np.unique(labels))

    def produced(self) -> set[int]:
        """Return the roots of the channels that an op makes."""
        return {root for one in self._produced for root in self.roots(one).tolist()}

    def made(self) -> set[int]:
        """Return the labels themselves of the channels that an op makes."""
        return {label for one in self._produced for label in one.tolist()}

    def left(self) -> dict[int, str]:
        """Return the reason for each root that is left whole."""
        found: dict[int, str] = {}
        for labels, reason in self._left:
            for root in self.roots(labels).tolist():
                found[root] = found.get(root) or reason
        return found

    def pin(self, family: Family, axis: int, reason: str) -> Family | None:
        """Keep an axis whole: return the family without it; None if it varies along no other axis."""
        first = family.take([0], axis)
        self.unite(family, first)
        if first.size > 1:
            return first
        if family.size > 1:
            self.leave(first, reason)
        return None

    def pinned(self, families: Families, axes: Iterable[int], reason: str) -> Families:
        """Return families with axes kept whole."""
        for axis in axes:
            families = tuple(
                made for one in families
                if (made := self.pin(one, axis, reason) if one.shape[axis] > 1 else one) is not None
            )  # fmt: skip
        return families

    def compressed(self, family: Family, reason: str) -> Family | None:
        """Return a family without axes along which its sets do not change; None if there is no other.

        A tensor without elements, such as an empty slice, has no channels.
        """
        if not family.size:
            return None
        found = self.roots(family)
        for axis in range(found.ndim):
            first = found.take([0], axis)
            if (found == first).all():
                found = first
        if found.size > 1:
            return found
        if family.size > 1:
            self.leave(found, reason)
        return None

    def merged(self, parts: Sequence[Part], reason: str) -> Families:
        """Unite the channels of tensors that an op computes with element by element; return the result's.

        An axis that one tensor has and another has without channels stays whole.
        """
        rank = max(len(shape) for _, shape in parts)
        padded = [
            (tuple(one.reshape((1,) * (rank - len(shape)) + one.shape) for one in families),
             (1,) * (rank - len(shape)) + tuple(shape))
            for families, shape in parts
        ]  # fmt: skip
        kept: list[Family] = []
        for families, _ in padded:
            for axis in range(rank):
                if any(_lacks(other, axis) for other in padded):
                    families = self.pinned(families, [axis], reason)
            for family in families:
                self._join(kept, family, reason)
        return tuple(kept)

    def _join(self, kept: list[Family], family: Family | None, reason: str) -> None:
        """Add a family to those of a result; families along the same axis become one."""
        i = 0
        while family is not None and i < len(kept):
            mine, other = varying(family), varying(kept[i])
            if not mine & other:
                i += 1
            elif _is_inner(mine, other):  # such as a weight of each head's features: heads stay separate
                self.pinned((family,), mine, reason)
                return
            elif _is_inner(other, mine):
                inner = kept.pop(i)
                self.pinned((inner,), other, reason)
                (family,) = self.pinned((family,), other, reason) or (None,)
            else:
                held = kept.pop(i)
                self.unite(family, held)
                both = np.broadcast_arrays(family, held)[0]
                family, i = self.compressed(both, reason), 0
        if family is not None:
            kept.append(family)

    def settle(self) -> None:
        """Make each family that varies along several axes, as heads and their features, vary along one.

        That is the longest one, if what ops do has not decided.
        """
        before = -1
        while before != (before := len(np.unique(self.roots(np.arange(len(self._parents)))))):
            for block in self.blocks:
                axes = [axis for axis in varying(block) if self._is_carrier(block, axis)]
                if not axes:
                    carrier = max(varying(block), key=lambda axis: block.shape[axis])
                    for axis in varying(block) - {carrier}:
                        self.unite(block, block.take([0], axis))

    def _is_carrier(self, block: Family, axis: int) -> bool:
        """Return True if the sets of a block change along this axis alone."""
        found = np.moveaxis(self.roots(block), axis, 0).reshape(block.shape[axis], -1)
        return bool((found == found[:, :1]).all())


def varying(family: Family) -> set[int]:
    """Return the axes along which a family varies."""
    return {axis for axis, extent in enumerate(family.shape) if extent > 1}


def shaped(labels: Family | None, axis: int, rank: int) -> Families:
    """Return the families of a tensor of a rank that has these labels along one axis."""
    if labels is None:
        return ()
    extents = [1] * rank
    extents[axis] = -1
    return (labels.reshape(extents),)


def _lacks(part: Part, axis: int) -> bool:
    families, shape = part
    return shape[axis] > 1 and not any(one.shape[axis] > 1 for one in families)


def _is_inner(axes: set[int], block: set[int]) -> bool:
    """Return True if a block varies along these axes, and along others before them."""
    return axes < block and min(axes) > min(block)
