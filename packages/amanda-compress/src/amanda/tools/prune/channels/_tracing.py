"""Follows the channels of a model through one call of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import amanda
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune.channels._labels import Call, Families, Family, Notes, Part
from amanda.tools.prune.channels._rules import MOVES, Rule


@dataclass(frozen=True)
class TracedOp:
    """An executed op: its word, its module's path, and families and extents of its tensors.

    key: tells the op from others.  moved: of an op that only moves elements, see `Call.moved`.
    """

    type: str
    module: str
    source: str
    key: Any
    inputs: Sequence[Part]
    outputs: Sequence[Part]
    moved: Callable[[Family], list[Family]] | None = None

    @property
    def place(self) -> str:
        """Return the op in words."""
        return f"{self.type} of {self.module or 'the model'}"


class Tracing(amanda.Tool):
    """Follows channels from op to op.

    steps: the ops in their order.  channels: families of parameters and buffers, by their names.
    result: of the call.  unfollowed: why layers are left whose weights have no channels, by layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        self.steps: list[TracedOp] = []
        self.channels: dict[str, Families] = {}
        self.unfollowed: dict[str, str] = {}
        self.result: Any = None
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._analyse)

    @abstractmethod
    def follow(self, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the model, and keep whole what it returns; return that."""

    @abstractmethod
    def layer(self, name: str) -> str:
        """Return the path of the layer that a weight is of."""

    @abstractmethod
    def _analyse(self, context: amanda.OpContext) -> None:
        """Follow an op."""

    def fresh(self, name: str | None, shape: Sequence[int]) -> Families:
        """Return new labels for the places along each axis of a weight."""
        labels = self.notes.labels
        families = tuple(
            labels.fresh(extent).reshape([-1 if i == axis else 1 for i in range(len(shape))])
            for axis, extent in enumerate(shape) if extent > 1
        )  # fmt: skip
        if name is not None:
            self.channels[name] = families
        return families

    def step(
        self,
        call: Call,
        rule: Rule,
        module: str,
        source: str,
        read: Sequence[Part],
        output_families: Sequence[Families],
    ) -> None:
        """Note an op that a rule has followed."""
        parts = [
            (families, tuple(output.shape))
            for output, families in zip(call.outputs, output_families, strict=True)
        ]
        moved = call.moved if rule in MOVES else None
        self.steps.append(TracedOp(call.type, module, source, call.key, read, parts, moved))

    def extents(self, part: Part, alive: Any) -> tuple[int, ...]:
        """Return the extents of a tensor when those labels are kept alone.  alive: a truth for each label."""
        extents = list(part[1])
        for axis in range(len(extents)):
            places = self.places(part[0], axis, alive)
            if places is not None:
                extents[axis] = int(places.sum())
        return tuple(extents)

    def places(self, families: Families, axis: int, alive: Any) -> Any:
        """Return which places along an axis are kept; None of an axis without channels."""
        for family in families:
            if family.shape[axis] > 1:
                other_axes = tuple(i for i in range(family.ndim) if i != axis)
                return np.any(alive[family], axis=other_axes)
        return None


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors of what a model returns."""
    return [leaf for leaf in leaves([value], structures=True) if hasattr(leaf, "shape")]
