"""A weight that is pruned: what its next mask is made of."""

from __future__ import annotations

from typing import Any

from amanda.tools._libraries import do
from amanda.tools._libraries import numpy as np
from amanda.tools.kit import Present, Weight
from amanda.tools.kit._tensors import Array
from amanda.tools.prune._permutation import input_permutation


class PrunedWeight(Weight):
    """A weight with its mask.

    State: "mask", true where an element is kept; "grown", the values that elements had when they came back,
    from which they are counted; "permutation", the order of the input channels.
    magnitudes, gradient: what a step has gathered for the next mask, in the order of `ordered`.
    """

    magnitudes: Array = None
    gradient: Array = None
    _fresh: Array = None

    @property
    def mask(self) -> Array:
        """True where an element is kept."""
        return self["mask"]

    @property
    def grown(self) -> Array | None:
        """The values that elements had when they came back; None where none comes back."""
        return self.get("grown")

    @property
    def permutation(self) -> Array | None:
        """The order of the input channels; None for that of the weight."""
        return self.get("permutation")

    @property
    def zeros(self) -> int:
        """Number of elements that are dropped."""
        return self.size - int(self.mask.sum())

    def precedes(self, update: int | None) -> bool:
        """Return True if its mask was made for an earlier step than this one."""
        return not self.is_left and update is not None and self.updated < update

    def start_grown(self, present: Present) -> None:
        """Count elements that have just come back from the present value: they start at 0."""
        if self._fresh is None:
            return
        start = self.plain(present())
        fresh, grown = (self.like(one, start) for one in (self._fresh, self.grown))
        self["grown"] = do("where", fresh, start, grown)
        self._fresh = None

    def ordered(self, value: Any) -> Array:
        """Return a value with outputs and inputs first, the inputs in the order of the pattern."""
        return self._permuted(self.plain(value))

    def kept_like(self, other: Array) -> Array:
        """Return the mask in the order of `ordered`, where another array is."""
        return self._permuted(self.like(self.mask, other))

    def _permuted(self, array: Array) -> Array:
        turned = self.canonical(array)
        return turned if self.permutation is None else turned[:, self.permutation]

    def gather(self, value: Any, revive: bool) -> None:
        """Take the magnitudes of a value; -1 for what is dropped, unless that is to count too.

        value: as ops read it, if it is masked and dropped elements do not count.
        """
        self.magnitudes = magnitudes = abs(self.ordered(value))
        if self.is_ready and not revive:
            dropped = -do("ones_like", magnitudes)
            self.magnitudes = do("where", self.kept_like(magnitudes), magnitudes, dropped)

    def permute(self, n: int, m: int) -> None:
        """Put the inputs of the magnitudes in the order in which n:m keeps most."""
        inputs_last = np.moveaxis(self.to_numpy(self.magnitudes), 1, -1)
        self["permutation"] = input_permutation(inputs_last, n, m)
        self.magnitudes = self.magnitudes[:, self.permutation]

    def gather_gradient(self, gradient: Any) -> None:
        """Add a gradient to what the step has gathered, if it gathers."""
        if self.magnitudes is not None:
            own = self.ordered(gradient) * 1
            self.gradient = own if self.gradient is None else self.gradient + own

    def keep_only(self, kept: Array, update: int) -> None:
        """Take another mask, in the order of `ordered`, made for a step."""
        if self.permutation is not None:
            kept = kept[:, self.permutation.argsort()]
        mask = self.restored(kept)
        if self.grown is not None and self.is_ready:
            self._fresh = mask & ~self.like(self.mask, mask)
        self["mask"], self.updated = mask, update
        self.magnitudes = self.gradient = None
