"""One weight that is pruned: its mask, and what the next one is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autoray import do, get_dtype_name

import amanda
from amanda.tools.prune._framework import Array, Framework, framework_of
from amanda.tools.prune._layout import canonical, restored

NEVER = -1


class Masked:
    """What ops read of a parameter through a mask.

    kept: true where it is kept.  grown: what elements that came back had then, from which they are counted;
    None where none does.
    """

    framework: Framework
    kept: Array
    grown: Array | None
    is_masked: bool
    _tensors: dict[Any, tuple[Any, Any]]

    def masked(self, value: Any) -> Any:
        """The weight as an op shall read it; None for no change."""
        if not self.is_masked:
            return None
        mask, grown = self.tensors_like(value)
        return value * mask if grown is None else (value - grown) * mask

    def inlined(self) -> Mapping[str, Any]:
        """What `masked_for_good` is to be given besides the weight."""
        given = {"kept": self.kept} if self.grown is None else {"kept": self.kept, "grown": self.grown}
        return {name: self.framework.numbers(array) for name, array in given.items()}

    def masked_gradient(self, gradient: Any) -> Any:
        """The gradient where the weight is kept; None for no change."""
        return gradient * self.tensors_like(gradient)[0] if self.is_masked else None

    def mask_like(self, value: Any) -> Any:
        """The mask in the type of a tensor, where it is."""
        return self.tensors_like(value)[0]

    def tensors_like(self, value: Any) -> tuple[Any, Any]:
        """Mask and beginnings in the type of a tensor, where it is."""
        framework = framework_of(value)
        key = framework, get_dtype_name(value), str(getattr(value, "device", ""))
        if key not in self._tensors:
            grown = None if self.grown is None else framework.as_mask(self.grown, value)
            self._tensors[key] = framework.as_mask(self.kept, value), grown
        return self._tensors[key]


@dataclass(eq=False)
class Weight(Masked):
    """A weight of the model, which one or more ops read.

    holder: identity of the parameter or variable that holds it; None for a weight that is computed.
    part: which part of that it is.  number: in the order in which weights were met.
    kept, in the weight's own layout, and grown: see above.  updated: the step for which they were made,
    `NEVER` while nothing is dropped.  permutation: the order of the input channels; or None.
    These four are written in place: they are the tool's state.  changes: how often they were.
    is_left: whether it turned out to be none that is pruned.  readers: ids of the ops that read it.
    state: what the tool keeps of it.
    magnitudes, gradient: what a step has gathered for the next mask, outputs and inputs first.
    """

    module: str
    type: str
    source: str
    extents: tuple[int, ...]
    layout: str | None
    framework: Framework
    holder: Any
    part: Any
    number: int
    kept: Array
    updated: Array
    grown: Array | None = None
    permutation: Array | None = None
    magnitudes: Array | None = None
    gradient: Array | None = None
    changes: int = 0
    is_left: bool = False
    readers: set[int] = field(default_factory=set)
    state: list[Any] = field(default_factory=list)
    _fresh: Array | None = None
    _tensors: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.extents)

    @property
    def zeros(self) -> int:
        """How many of them are dropped."""
        return self.size - int(self.kept.sum())

    @property
    def is_masked(self) -> bool:  # type: ignore[override]
        """Whether it has a mask yet."""
        return not self.is_left and bool(self.updated[0] != NEVER)

    def precedes(self, update: int | None) -> bool:
        """Whether its mask was made for an earlier step than this one."""
        return not self.is_left and update is not None and int(self.updated[0]) < update

    # ---- what ops read ----

    def masked(self, value: Any) -> Any:
        """The weight as an op shall read it; None for no change."""
        self.begin(lambda: value)
        return super().masked(value)

    def finalized(self, values: Array) -> Array:
        """What the holder's values become: from now on elements that had come back are counted from 0."""
        made = self.masked(values)
        if self.grown is not None:
            self.grown[...] = 0
            self._change()
        return values if made is None else made

    def _change(self) -> None:
        self._tensors.clear()
        self.changes += 1

    def begin(self, value: Callable[[], Any]) -> None:
        """Let elements that have just come back be counted from the present value: they begin at 0."""
        if self._fresh is None:
            return
        start = self.framework.plain(value())
        assert self.grown is not None
        here = [self.framework.like(one, start) for one in (self._fresh, self.grown)]
        self.grown[...] = do("where", here[0], start, here[1])
        self._fresh = None
        self._change()

    # ---- what masks are made of ----

    def canonical(self, value: Any) -> Array:
        """A value as masks are made of it: outputs and inputs first, inputs in the order of the pattern."""
        turned = canonical(self.framework.plain(value), self.layout)
        return turned if self.permutation is None else turned[:, self.permutation]

    def gathered(self, value: Any, revive: bool) -> Array:
        """The magnitudes of a value of the weight; -1 where it is dropped, unless those are to count too."""
        if revive or not self.is_masked:
            return abs(self.canonical(value))
        effective = abs(self.canonical(self.masked(value)))
        return do("where", self.kept_like(effective), effective, -do("ones_like", effective))

    def gather_gradient(self, gradient: Any) -> None:
        """Add a gradient to what the step has gathered, if it gathers."""
        if self.magnitudes is not None:
            own = self.canonical(gradient) * 1
            self.gradient = own if self.gradient is None else self.gradient + own

    def kept_like(self, other: Array) -> Array:
        """What is kept, in the order of `canonical`, where another array is."""
        turned = canonical(self.framework.like(self.kept, other), self.layout)
        return turned if self.permutation is None else turned[:, self.permutation]

    def keep(self, kept: Array, update: int) -> None:
        """Take another mask, in the order of `canonical`, made for a step."""
        if self.permutation is not None:
            kept = kept[:, self.permutation.argsort()]
        made = restored(kept, self.layout, self.extents)
        if self.grown is not None and self.is_masked:
            self._fresh = made & ~self.framework.like(self.kept, made)
        self.kept[...] = made
        self.updated[...] = update
        self.magnitudes = self.gradient = None
        self._change()


@amanda.traceable
def masked_for_good(value: Any, kept: Any, grown: Any = None) -> Any:
    """A weight as ops read it from now on, as `Weight.masked` gives it, by tensor code alone.

    kept, grown: arrays of NumPy of the weight's shape.
    """
    framework = framework_of(value)
    mask = framework.as_mask(kept, value)
    return value * mask if grown is None else (value - framework.as_mask(grown, value)) * mask
