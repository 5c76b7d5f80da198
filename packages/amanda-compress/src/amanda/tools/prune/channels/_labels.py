"""Labels number channels; families are arrays of labels along a tensor's axes; rules follow ops by families.

place: an index along an axis of a tensor.
label: a number for a place along an axis of a weight.  Labels in one set are channels that are removed
    together; the least label of a set is its root.
family: the labels of a tensor along an axis, an integer array of the tensor's rank, whose extents are those
    of the tensor where the family varies and 1 elsewhere.  A tensor has a family for each axis with channels.
block: a family that varies along several axes, such as heads and their features.
to leave channels whole: to remove none of them, for a reason.
to pin an axis: to make all its places one channel, so that the axis stays whole.
output labels: those of the channels that a layer computes; only such channels can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np

Family = Any
"""An integer array of NumPy."""

Families = tuple[Family, ...]
Part = tuple[Families, tuple[int, ...]]
"""The families of a tensor, and the tensor's extents."""


class ChannelSets:
    """Disjoint sets of labels of channels that are removed together, or left whole for a reason."""

    def __init__(self) -> None:
        # A union-find over all channels of the model: one array instead of an object for each of a million
        # labels.
        self._parents = np.zeros(0, np.int64)
        self._whole: list[tuple[Any, str]] = []  # labels that are left whole, and the reason
        self._outputs: list[Any] = []  # labels of the channels that each layer computes
        self.blocks: list[Family] = []

    @property
    def count(self) -> int:
        """Return how many labels there are."""
        return len(self._parents)

    def new_labels(self, count: int) -> Family:
        """Return new labels, each a set of its own."""
        start = len(self._parents)
        self._parents = np.concatenate([self._parents, np.arange(start, start + count)])
        return self._parents[start:].copy()

    def roots(self, labels: Family) -> Family:
        """Return the root of each label, which stands for its set."""
        roots = self._parents[labels]
        # Arrays of labels climb the trees together, one gather for each level.
        while True:
            parents = self._parents[roots]
            if (parents == roots).all():
                return roots
            roots = parents

    def unite(self, labels: Family, other_labels: Family) -> None:
        """Unite the sets of labels at the same places of two arrays, after broadcasting."""
        labels, other_labels = np.broadcast_arrays(self.roots(labels), self.roots(other_labels))
        different = labels != other_labels
        # Broadcasting repeats pairs: a batch of images unites the same channels for each position.
        pairs = np.unique(np.stack([labels[different], other_labels[different]]), axis=1)
        for first, second in pairs.T.tolist():
            first, second = self._root(first), self._root(second)
            # The lower label becomes the root, so that groups are in the order in which their layers were
            # met.
            self._parents[max(first, second)] = min(first, second)

    def _root(self, label: int) -> int:
        """Return the root of a label, and shorten the way to it for later calls."""
        while (parent := int(self._parents[label])) != label:
            self._parents[label] = self._parents[parent]
            label = parent
        return label

    def leave_whole(self, labels: Iterable[Family] | Family, reason: str) -> None:
        """Keep the channels of labels whole; reason: "" for axes that are not channels."""
        for family in labels if isinstance(labels, (tuple, list)) else (labels,):
            # Labels and not roots: later unions extend what is left whole.
            self._whole.append((np.unique(family), reason))

    def mark_outputs(self, labels: Family | None) -> None:
        """Mark labels as outputs of a layer: only such channels can be removed; nothing for None."""
        if labels is not None:
            self._outputs.append(np.unique(labels))

    def output_roots(self) -> set[int]:
        """Return the roots of all channels that layers compute."""
        return {root for labels in self._outputs for root in self.roots(labels).tolist()}

    def output_labels(self) -> set[int]:
        """Return the labels of all channels that layers compute, before any union."""
        return {label for labels in self._outputs for label in labels.tolist()}

    def whole_roots(self) -> dict[int, str]:
        """Return the reason for each root that is left whole."""
        reasons: dict[int, str] = {}
        for labels, reason in self._whole:
            for root in self.roots(labels).tolist():
                # The first reason that is not "" stays.
                reasons[root] = reasons.get(root) or reason
        return reasons

    def pin_axis(self, family: Family, axis: int, reason: str) -> Family | None:
        """Keep an axis whole: return the family without the axis.

        Returns None if the family varies along no other axis; then it is left whole for the reason.
        """
        # An axis stays whole if all its places are one channel.
        first_place = family.take([0], axis)
        self.unite(family, first_place)
        if first_place.size > 1:
            return first_place
        if family.size > 1:
            self.leave_whole(first_place, reason)
        return None

    def pin_axes(self, families: Families, axes: Iterable[int], reason: str) -> Families:
        """Pin axes of families; return the families that vary along other axes.

        A family without other axes is left whole for the reason.
        """
        for axis in axes:
            pinned_families = [
                self.pin_axis(family, axis, reason) if family.shape[axis] > 1 else family
                for family in families
            ]
            families = tuple(family for family in pinned_families if family is not None)
        return families

    def without_constant_axes(self, family: Family, reason: str) -> Family | None:
        """Return the roots of a family without axes along which these do not change; None if all are such.

        A family that loses all axes is left whole for the reason.  A tensor without elements, such as an
        empty slice, has no channels.
        """
        if not family.size:
            return None
        roots = self.roots(family)
        # A reshape may split an axis into places of the same channel, as spatial ones; such axes carry
        # nothing.
        for axis in range(roots.ndim):
            first_place = roots.take([0], axis)
            if (roots == first_place).all():
                roots = first_place
        if roots.size > 1:
            return roots
        if family.size > 1:
            self.leave_whole(roots, reason)
        return None

    def unite_elementwise(self, parts: Sequence[Part], reason: str) -> Families:
        """Unite the channels of tensors that an op computes with element by element; return the result's.

        An axis that one tensor has and another has without channels stays whole.
        """
        rank = max(len(shape) for _, shape in parts)
        aligned_parts = [_broadcast_to_rank(part, rank) for part in parts]
        # A tensor without channels keeps its extent, so that the op would fail if others were shorter.
        axes_without_channels = [
            axis for axis in range(rank) if any(_lacks(part, axis) for part in aligned_parts)
        ]
        merged: list[Family] = []
        for families, _ in aligned_parts:
            for family in self.pin_axes(families, axes_without_channels, reason):
                self._merge_into(merged, family, reason)
        return tuple(merged)

    def _merge_into(self, merged: list[Family], family: Family | None, reason: str) -> None:
        """Add a family to those of a result, in place; families along the same axis become one.

        Of a family whose axes are inner ones of another, such as the features of heads, the axes are pinned.
        """
        next_index = 0  # of the member of the result to compare with
        while family is not None and next_index < len(merged):
            axes, merged_axes = varying(family), varying(merged[next_index])
            if not axes & merged_axes:  # along other axes: both stay
                next_index += 1
            elif _is_inner(axes, merged_axes):
                # For example a weight of each feature of all heads: heads stay separate.
                self.pin_axes((family,), axes, reason)
                return
            elif _is_inner(merged_axes, axes):
                # The other way round: the new family keeps its outer axes.
                inner = merged.pop(next_index)
                self.pin_axes((inner,), merged_axes, reason)
                pinned_families = self.pin_axes((family,), merged_axes, reason)
                family = pinned_families[0] if pinned_families else None
            else:
                # The same axes, or some in common: both become one family.
                merged_family = merged.pop(next_index)
                self.unite(family, merged_family)
                united = np.broadcast_arrays(family, merged_family)[0]
                family = self.without_constant_axes(united, reason)
                # It varies along other axes than before, so that it is compared with all again.
                next_index = 0
        if family is not None:
            merged.append(family)

    def settle_blocks(self) -> None:
        """Make each family that varies along several axes, as heads and their features, vary along one.

        That is the longest one, unless unions by ops have left the block one axis along which it varies.
        """
        # Until no set is united: the axis that one block gets may decide that of others with the same labels.
        set_count, set_count_before = self._set_count(), -1
        while set_count != set_count_before:
            for block in self.blocks:
                if not any(self._varies_only_along(block, axis) for axis in varying(block)):
                    # Of heads and features the longer axis gives the finer choice of what to remove.
                    longest_axis = max(varying(block), key=lambda axis: block.shape[axis])
                    for axis in varying(block) - {longest_axis}:
                        self.unite(block, block.take([0], axis))
            set_count, set_count_before = self._set_count(), set_count

    def _set_count(self) -> int:
        return len(np.unique(self.roots(np.arange(len(self._parents)))))

    def _varies_only_along(self, block: Family, axis: int) -> bool:
        """Return True if the sets of a block change along this axis alone."""
        sets_at_place = np.moveaxis(self.roots(block), axis, 0).reshape(block.shape[axis], -1)
        return bool((sets_at_place == sets_at_place[:, :1]).all())


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


def _broadcast_to_rank(part: Part, rank: int) -> Part:
    """Return families and extents with leading axes of extent 1, as broadcasting aligns tensors."""
    families, shape = part
    leading = (1,) * (rank - len(shape))
    return tuple(family.reshape(leading + family.shape) for family in families), leading + tuple(shape)


def _lacks(part: Part, axis: int) -> bool:
    """Return True if a tensor has several places along an axis, and no channels."""
    families, shape = part
    return shape[axis] > 1 and not any(family.shape[axis] > 1 for family in families)


def _is_inner(axes: set[int], block_axes: set[int]) -> bool:
    """Return True if a block varies along these axes, and along others before them."""
    return axes < block_axes and min(axes) > min(block_axes)


@dataclass(frozen=True)
class Reduction:
    """An op that computes over the channels of its first input, and so over those that are kept.

    key: tells the op from others.  type: its word.  axis: of the input.  labels: of the channels along it.
    """

    key: Any
    type: str
    axis: int
    labels: Family


@dataclass(frozen=True)
class Work:
    """Multiplications of an op, and the channels of its outputs and inputs that they are proportional to."""

    multiplications: int
    outputs: Family | None
    inputs: Family | None


@dataclass
class Notes:
    """Notes of the ops for the removal, besides the labels.

    whole_groups: names of weights whose groups are removed as wholes, so that their number changes.
    """

    labels: ChannelSets = field(default_factory=ChannelSets)
    reductions: list[Reduction] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    whole_groups: set[str] = field(default_factory=set)


@dataclass
class FollowedOp:
    """An execution of an op as rules see it: its tensors with their families, inputs in PyTorch's order.

    names: of the inputs.  find_families: returns a tensor's families.  name_of: returns a weight's name.
    move: moves a family of the first input as the op moves its elements, a result for each output.
    key: tells the op from others.  place: "conv2d of layer1.0", for reasons.
    """

    type: str
    place: str
    key: Any
    inputs: Sequence[Any]
    names: Sequence[str]
    outputs: Sequence[Any]
    find_families: Callable[[Any], Families]
    move: Callable[[Family], list[Family]]
    notes: Notes
    name_of: Callable[[Any], str | None]

    @property
    def labels(self) -> ChannelSets:
        """Return the labels of the whole model."""
        return self.notes.labels

    @property
    def lacking_reason(self) -> str:
        """Return why channels are left whole that another tensor of the op does not have."""
        return f"{self.place} computes with a tensor that has no channels to remove with them"

    def value(self, name: str, default: Any = None) -> Any:
        """Return an input by name; the default for an input that is missing or None."""
        value_or_none = dict(zip(self.names, self.inputs, strict=False)).get(name)
        return default if value_or_none is None else value_or_none

    def families_of(self, value: Any) -> Families:
        """Return the families of an input; () for an input that is not a tensor."""
        return () if value is None or not hasattr(value, "shape") else self.find_families(value)

    def part_of(self, value: Any) -> Part:
        """Return families and extents of an input."""
        return self.families_of(value), tuple(value.shape)

    def labels_along(self, families: Families, axis: int) -> Family | None:
        """Pin all axes but one; return the labels along it as a vector, None without any.

        Families that do not vary along the axis are left whole; several that do become one.
        """
        channels: Family | None = None
        for family in families:
            if family.shape[axis] == 1:
                self.labels.leave_whole(family, self.lacking_reason)
                continue
            other_axes = [i for i in range(family.ndim) if i != axis % family.ndim]
            for axis_labels in self.labels.pin_axes((family,), other_axes, self.lacking_reason):
                if channels is not None:
                    self.labels.unite(channels, axis_labels.reshape(-1))
                channels = axis_labels.reshape(-1)
        return channels

    def split_axis(self, families: Families, axis: int) -> tuple[Family | None, Families]:
        """Split families into the labels along an axis, as a vector, and the families along other axes.

        None without labels along the axis; several families along it become one.  Of a family along both,
        such as heads and their features, the axis is pinned.
        """
        axis_labels: Family | None = None
        other_families: list[Family] = []
        for family in families:
            if family.shape[axis] == 1:
                other_families.append(family)
            elif family.size == family.shape[axis]:
                if axis_labels is not None:
                    self.labels.unite(axis_labels, family.reshape(-1))
                axis_labels = family.reshape(-1)
            else:
                other_families.extend(self.labels.pin_axes((family,), [axis], self.lacking_reason))
        return axis_labels, tuple(other_families)

    def match(self, first: Family | None, second: Family | None) -> None:
        """Unite two tensors' channels place by place; where one has none, leave the other's whole."""
        if first is not None and second is not None:
            self.labels.unite(first, second)
        for labels in (first, second):
            if labels is not None and (first is None or second is None):
                self.labels.leave_whole(labels, self.lacking_reason)

    def match_vector(self, channels: Family | None, *vectors: Any) -> None:
        """Match the channels with those of parameters that have one value for each."""
        for vector in vectors:
            if vector is not None:
                self.match(channels, self.labels_along(self.families_of(vector), 0))

    def note_whole_groups(self, weight: Any) -> None:
        """Note that whole groups of a layer with this weight are removed; nothing for a computed weight."""
        name = None if weight is None else self.name_of(weight)
        if name is not None:
            self.notes.whole_groups.add(name)

    def note_reduction(self, axis: int, labels: Family) -> None:
        """Note that the op computes over these channels of its first input."""
        self.notes.reductions.append(Reduction(self.key, self.type, axis, labels))

    def leave_inputs_whole(self, reason: str) -> None:
        """Leave the channels of all inputs whole, and mark those of weights as outputs."""
        # Results give reasons for outputs alone.
        for value in leaves(self.inputs):
            self.labels.leave_whole(self.families_of(value), reason)
            if self.name_of(value) is not None:
                for family in self.families_of(value):
                    self.labels.mark_outputs(family)
