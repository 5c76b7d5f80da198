"""Values that function transforms have wrapped: the parts of them that quantizers read, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from amanda.tools.kit import Samples, tensors_of
from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._quantizer import Quantizer

LEARNED = "its scale is learned, and a transform such as vmap has wrapped the value"
"""Reason for leaving a value of LSQ within a transform."""


class ModelQuantizers:
    """Quantizers of an input of an op whose weight differs among the samples of a vmap, as in an ensemble.

    make: returns a new quantizer, whose name has a suffix, "[0]" of the first model; None if it is skipped.
    """

    def __init__(self, make: Callable[[str], Quantizer | None]) -> None:
        self._make = make
        self._quantizers: dict[tuple[int, ...], Quantizer | None] = {}

    def of(self, numbers: tuple[int, ...]) -> Quantizer | None:
        """Return the quantizer of a model by its number in each batch; () for a value that is not a batch."""
        if numbers not in self._quantizers:
            self._quantizers[numbers] = self._make("".join(f"[{number}]" for number in numbers))
        return self._quantizers[numbers]


class SampledValue:
    """A value that transforms have wrapped, cut along some of its batches.

    levels: of these batches.
    """

    def __init__(self, value: Any, samples: Samples, levels: Collection[int]) -> None:
        self._value, self.samples = value, samples
        self._axes = [axis for axis, level in enumerate(samples.levels) if level in levels]
        self._sizes = tuple(samples.sizes[axis] for axis in self._axes)

    def parts(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield the number of each part in the batches, and the part, with axes of other batches in front."""
        data = do("moveaxis", self.samples.data, tuple(self._axes), tuple(range(len(self._axes))))
        for numbers in np.ndindex(self._sizes):
            yield numbers, data[numbers]

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return new values of the parts as one value under the transforms, without a gradient."""
        front = tuple(range(len(self._axes)))
        # Within a transform the result of each operation belongs to its level.
        with self.samples.outside():
            data = do("reshape", do("stack", tuple(parts)), (*self._sizes, *shape(parts[0])))
            data = do("moveaxis", data, front, tuple(self._axes))
        return self.samples.wrapped(data)

    def straight_through(self, quantised: Any, passes: Any) -> Any:
        """Return quantised values with a gradient, which passes to the value where `passes` is true."""
        xp = tensors_of(self._value)
        passed = xp.where(passes, self._value, do("zeros_like", self._value))
        # A difference of 0 at every level of transforms, whose gradient is that of the value.
        return quantised + (passed - xp.detach(passed))
