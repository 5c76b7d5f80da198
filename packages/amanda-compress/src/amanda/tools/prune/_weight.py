"""A weight that is pruned: what its next mask is made of."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._arrays import Array
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._permutation import input_permutation
from amanda.tools.weights import Weight


class PrunedWeight(Weight):
    """A weight with its mask.

    State: "mask", true where an element is kept; "offset", what is taken from a value before it is masked:
    what an element had when it came back, from which it is counted, or what SparseGPT changed;
    "permutation", the order of the input channels; "movement", sums of weight times gradient.
    magnitudes, gradient, product, inputs: what a step has gathered for the next mask.  magnitudes, and the
    gradient and its product with the weight, are in the order of `ordered`; inputs as `squares` or `products`
    of _inputs gives them.
    """

    magnitudes: Array = None
    gradient: Array = None
    product: Array = None
    inputs: Array = None
    value: Array = None
    _fresh: Array = None

    @property
    def mask(self) -> Array:
        """True where an element is kept."""
        return self["mask"]

    @property
    def offset(self) -> Array | None:
        """Array subtracted from a weight before masking; None without one."""
        return self.get("offset")

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
        return not self.is_skipped and update is not None and self.updated < update

    def fit_loaded(self, present: Callable[[], Any]) -> None:
        """Subtract nothing from a value that `finalize` has written: all that the mask drops is 0 in it.

        SparseGPT subtracts nothing from such a value either, since it made up for nothing.
        """
        self.is_loaded = False
        if self.offset is None or self.is_skipped:
            return
        value = self.plain(present())
        dropped = ~self.like(self.mask, value)
        if bool(dropped.any()) and not bool(((value != 0) & dropped).any()):
            self["offset"] = 0

    def start_grown(self, present: Callable[[], Any]) -> None:
        """Count elements that have just come back from the present value: they start at 0."""
        if self._fresh is None:
            return
        start = self.plain(present())
        fresh, offset = (self.like(one, start) for one in (self._fresh, self.offset))
        self["offset"] = do("where", fresh, start, offset)
        self._fresh = None

    def ordered(self, value: Any) -> Array:
        """Return a value with outputs and inputs first, the inputs in the order of the pattern."""
        return self.permuted(self.canonical(self.plain(value)))

    def permuted(self, array: Array) -> Array:
        """Return an array (outputs, inputs, ...) with the inputs in the order of the pattern."""
        return array if self.permutation is None else array[:, self.permutation]

    def kept_like(self, other: Array) -> Array:
        """Return the mask in the order of `ordered`, where another array is."""
        return self.permuted(self.canonical(self.like(self.mask, other)))

    def gather(self, value: Any) -> None:
        """Take the magnitudes of a value."""
        self.magnitudes = abs(self.ordered(value))

    def alive(self, scores: Array) -> Array:
        """Return scores, -inf for what is dropped."""
        if not self.is_ready:
            return scores
        return do("where", self.kept_like(scores), scores, do("full_like", scores, -inf))

    def permute(self, scores: Array, n: int, m: int) -> Array:
        """Put the inputs in the order in which n:m keeps most of scores; return these in that order."""
        inputs_last = np.moveaxis(self.to_numpy(scores), 1, -1)
        self["permutation"] = input_permutation(inputs_last, n, m)
        return scores[:, self.permutation]

    def gather_gradient(self, gradient: Any) -> None:
        """Add a gradient to what the step has gathered, if it gathers."""
        if self.magnitudes is not None and is_finite(self.plain(gradient)):
            self.gradient = _sum(self.gradient, self.ordered(gradient))

    def gather_product(self, gradient: Any) -> None:
        """Add the weight times a gradient to what the step has gathered, and to the movement."""
        if self.value is None:
            return
        product = self.value * self.plain(gradient)
        if not is_finite(product):  # a step that a gradient scaler leaves out
            return
        self.product = _sum(self.product, self.ordered(product))
        if self.get("movement") is not None:
            self["movement"] = self["movement"] + self.like(product, self["movement"])

    def gather_inputs(self, inputs: Array) -> None:
        """Add squares or products of inputs to what the step has gathered."""
        self.inputs = _sum(self.inputs, inputs)

    def check_inputs(self) -> None:
        """Raise PruneError for NaN and infinity in the sums of inputs that a step has gathered."""
        if self.inputs is not None and not is_finite(self.inputs):
            raise PruneError(
                f"NaN or Inf in what the {self.type} of {self.name} is given, or in the sums of its squares"
            )

    def forget(self) -> None:
        """Release the arrays gathered in a step."""
        self.magnitudes = self.gradient = self.product = self.inputs = self.value = None

    def keep_only(self, kept: Array, update: int) -> None:
        """Take another mask, in the order of `ordered`, made for a step."""
        if self.permutation is not None:
            kept = kept[:, self.permutation.argsort()]
        mask = self.restored(kept)
        if self.offset is not None and self.is_ready:
            self._fresh = mask & ~self.like(self.mask, mask)
        self["mask"], self.updated = mask, update
        self.forget()


def is_finite(array: Array) -> bool:
    """Return True if an array has no NaN and no infinity."""
    return bool((abs(array) < inf).all())


def _sum(former: Array, added: Array) -> Array:
    return added * 1 if former is None else former + added
