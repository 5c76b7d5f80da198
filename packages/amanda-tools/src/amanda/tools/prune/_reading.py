"""A parameter in another form than the one that its masks were made for."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

from amanda.tools.prune._framework import Array, Framework
from amanda.tools.prune._weight import Masked, Weight


class Reading(Masked):
    """A parameter in a form that overlaps those its masks were made for: transposed, a part, the whole.

    What is dropped there is dropped here; where no mask reaches, it is kept.
    weights: those of the parameter.  whole: the form of all of it.
    """

    def __init__(self, framework: Framework, part: Any, whole: Any, weights: Sequence[Weight]) -> None:
        self.framework, self._part, self._whole, self._weights = framework, part, whole, weights
        self._tensors = {}
        self._seen: list[int] = []
        self._covers: list[bool] = []

    @property
    def _masked(self) -> list[Weight]:
        return [one for one in self._weights if one.is_masked]

    @property
    def is_masked(self) -> bool:  # type: ignore[override]
        """Whether a mask is there to be read through."""
        return bool(self._masked)

    @property
    def kept(self) -> Array:
        """True where it is kept."""
        return self._carried([(one.kept, one.part) for one in self._masked], True)

    @property
    def grown(self) -> Array | None:  # type: ignore[override]
        """What elements that came back had then."""
        grown = [(one.grown, one.part) for one in self._masked if one.grown is not None]
        return self._carried(grown, 0) if grown else None

    def is_of(self, weights: Container[int]) -> bool:
        """Whether it reads any of these weights, by their ids."""
        return any(id(one) in weights for one in self._weights)

    @property
    def within(self) -> list[Weight]:
        """Those weights of which this form has every element."""
        if len(self._covers) < len(self._weights):
            more = self._weights[len(self._covers) :]
            self._covers += [self.framework.covers(self._part, one.part, self._whole) for one in more]
        return [one for one, covered in zip(self._weights, self._covers, strict=True) if covered]

    def masked(self, value: Any) -> Any:
        """The parameter as an op shall read it; None for no change."""
        for one in self.within:
            one.begin(partial(self.value_of, one, value))
        return super().masked(value)

    def value_of(self, weight: Weight, value: Any) -> Any:
        """The value of a weight within, from that of this form."""
        return self.framework.carried(
            [(self.framework.plain(value), self._part)], weight.part, self._whole, 0
        )

    def gather_gradient(self, gradient: Any) -> None:
        """Add a gradient to what the step has gathered for the weights."""
        own = [(self.framework.plain(gradient), self._part)]
        for one in self._weights:
            one.gather_gradient(self.framework.carried(own, one.part, self._whole, 0))

    def _carried(self, pieces: Sequence[tuple[Array, Any]], fill: Any) -> Array:
        return self.framework.carried(pieces, self._part, self._whole, fill)

    def tensors_like(self, value: Any) -> tuple[Any, Any]:
        """Mask and beginnings in the type of a tensor, where it is."""
        seen = [one.changes for one in self._masked]
        if seen != self._seen:
            self._tensors.clear()
            self._seen = seen
        return super().tensors_like(value)
