"""One execution of an op, as rules see it: its inputs with their channels, and what is noted of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda.tools.kit import leaves
from amanda.tools.prune.channels._labels import Families, Family, Labels, Part


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

    labels: Labels = field(default_factory=Labels)
    reductions: list[Reduction] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    whole_groups: set[str] = field(default_factory=set)


@dataclass
class Call:
    """An execution of an op, whose inputs have PyTorch's names and order.

    names: of the inputs.  channels: returns a tensor's families.  name_of: returns a weight's name.
    moved: moves a family of the first input as the op moves its elements, a result for each output.
    key: tells the op from others.  place: "conv2d of layer1.0", for reasons.
    """

    type: str
    place: str
    key: Any
    inputs: Sequence[Any]
    names: Sequence[str]
    outputs: Sequence[Any]
    channels: Callable[[Any], Families]
    moved: Callable[[Family], list[Family]]
    notes: Notes
    name_of: Callable[[Any], str | None]

    @property
    def labels(self) -> Labels:
        """Return the labels of the whole model."""
        return self.notes.labels

    @property
    def lacking(self) -> str:
        """Return why channels are left whole that another tensor of the op does not have."""
        return f"{self.place} computes with a tensor that has no channels to remove with them"

    def value(self, name: str, default: Any = None) -> Any:
        """Return an input by name."""
        found = dict(zip(self.names, self.inputs, strict=False)).get(name)
        return default if found is None else found

    def of(self, value: Any) -> Families:
        """Return the families of an input; none for what is no tensor."""
        return () if value is None or not hasattr(value, "shape") else self.channels(value)

    def part(self, value: Any) -> Part:
        """Return families and extents of an input."""
        return self.of(value), tuple(value.shape)

    def along(self, families: Families, axis: int) -> Family | None:
        """Return the labels along one axis alone, after keeping all other axes whole; None without any."""
        found: Family | None = None
        for family in families:
            if family.shape[axis] == 1:
                self.labels.leave(family, self.lacking)
                continue
            others = [i for i in range(family.ndim) if i != axis % family.ndim]
            for own in self.labels.pinned((family,), others, self.lacking):
                if found is not None:
                    self.labels.unite(found, own.reshape(-1))
                found = own.reshape(-1)
        return found

    def split(self, families: Families, axis: int) -> tuple[Family | None, Families]:
        """Return the labels along an axis, and the families along others.

        A family along both, such as heads and their features, keeps the axis whole.
        """
        own: Family | None = None
        rest: list[Family] = []
        for family in families:
            if family.shape[axis] == 1:
                rest.append(family)
            elif family.size == family.shape[axis]:
                if own is not None:
                    self.labels.unite(own, family.reshape(-1))
                own = family.reshape(-1)
            else:
                rest.extend(self.labels.pinned((family,), [axis], self.lacking))
        return own, tuple(rest)

    def match(self, one: Family | None, other: Family | None) -> None:
        """Make channels the same; where the other tensor has none, keep them whole."""
        if one is not None and other is not None:
            self.labels.unite(one, other)
        for labels in (one, other):
            if labels is not None and (one is None or other is None):
                self.labels.leave(labels, self.lacking)

    def match_vector(self, channels: Family | None, *vectors: Any) -> None:
        """Match the channels with those of parameters that have one value for each."""
        for vector in vectors:
            if vector is not None:
                self.match(channels, self.along(self.of(vector), 0))

    def note_whole_groups(self, weight: Any) -> None:
        """Note that whole groups of a layer with this weight are removed."""
        name = None if weight is None else self.name_of(weight)
        if name is not None:
            self.notes.whole_groups.add(name)

    def note_reduction(self, axis: int, labels: Family) -> None:
        """Note that the op computes over these channels of its first input."""
        self.notes.reductions.append(Reduction(self.key, self.type, axis, labels))

    def leave_all(self, reason: str) -> None:
        """Keep the channels of all inputs whole, those of weights as outputs that a layer makes."""
        for one in leaves(self.inputs):
            self.labels.leave(self.of(one), reason)
            for family in self.of(one) if self.name_of(one) is not None else ():
                self.labels.produce(family)
