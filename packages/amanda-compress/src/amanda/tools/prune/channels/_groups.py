"""Groups: channels of parameters that are removed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._labels import varying
from amanda.tools.prune.channels._tracing import Tracing


@dataclass(frozen=True)
class Member:
    """The part that an axis of a parameter or buffer has in a group.

    indices: (channels of the group, places along the axis).  is_made: whether these are a layer's outputs.
    """

    name: str
    axis: int
    indices: Any
    is_made: bool

    def __str__(self) -> str:
        """Return name and axis: `layer1.0.conv1.weight:0`."""
        return f"{self.name}:{self.axis}"


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that parameters share.

    roots: the label of each channel.  members: where they lie; the first one is a layer's outputs.
    """

    roots: Any
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """Return the parameter whose outputs are the group's, the first of several."""
        return self.members[0].name

    @property
    def width(self) -> int:
        """Return how many places along the axis a channel has: of a head its features."""
        return int(self.members[0].indices.shape[1])

    def __len__(self) -> int:
        return len(self.roots)

    def values(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return for each weight of the group its slices (channels, elements), by `name:axis`."""
        found = {}
        for member in self.members:
            tensor = tensors[member.name]
            if tensor.ndim > 1:
                found[str(member)] = tensor.swapaxes(0, member.axis)[member.indices].reshape(len(self), -1)
        return found


def groups_of(tracing: Tracing) -> list[ChannelGroup]:
    """Return the groups that can be removed, in the order of their first layers."""
    labels = tracing.notes.labels
    produced, left, made = labels.produced(), labels.left(), labels.made()
    places: dict[int, dict[tuple[str, int, bool], list[int]]] = defaultdict(dict)
    for name, families in tracing.channels.items():
        for family in families:
            (axis,) = varying(family)
            for i, (label, root) in enumerate(
                zip(family.reshape(-1).tolist(), labels.roots(family).reshape(-1).tolist(), strict=True)
            ):
                if root in produced and root not in left:
                    places[root].setdefault((name, axis, label in made), []).append(i)
    alike: dict[Any, list[int]] = defaultdict(list)
    for root, own in places.items():
        alike[tuple((*key, len(found)) for key, found in own.items())].append(root)
    groups = []
    for key, roots in alike.items():
        members = [
            Member(name, axis, np.array([places[root][name, axis, is_made] for root in roots]), is_made)
            for name, axis, is_made, _ in key
        ]
        members.sort(key=lambda one: not one.is_made)
        groups.append(ChannelGroup(np.array(roots), tuple(members)))
    return sorted(groups, key=lambda one: int(one.roots[0]))


def left_whole(tracing: Tracing) -> dict[str, str]:
    """Return why the outputs of weights are left whole, by the weights' names."""
    labels = tracing.notes.labels
    left, made = labels.left(), labels.made()
    found: dict[str, str] = {}
    for name, families in tracing.channels.items():
        for family in families:
            for label, root in zip(
                family.reshape(-1).tolist(), labels.roots(family).reshape(-1).tolist(), strict=True
            ):
                if label in made and root in left:
                    found.setdefault(name, left[root])
    return found
