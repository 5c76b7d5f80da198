"""Ranges for annotations: `Annotated[int, Range(1, 8)]`, and names for the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, isnan
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

_MOST_INT = (1 << 63) - 1  # what frameworks' sizes, native counters and files hold


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `Range(0, 1)` has both ends; above, below: bounds that are not in the range.

    finite: False for a float that may be nan or infinite; nan passes any bound then.
    """

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf
    finite: bool = True

    def holds(self, number: float) -> bool:
        """Return True if a number is in the range; nan only where `finite` is False.

        Infinity only there, too, and without bounds.
        """
        # Comparisons with nan are False, so bounds alone would let it pass in one form and not in another.
        if self.finite and not isfinite(number):
            return False
        if self.least <= number <= self.most and self.above < number < self.below:
            return True
        # The bounds above and below, strict by default, exclude infinity: it is right where there are no
        # bounds.
        has_bounds = self != Range(finite=self.finite)
        return not self.finite and (isnan(number) or not has_bounds)

    def __str__(self) -> str:
        """Return words that follow a noun: " from 0 to 1", " above 0"; "" without bounds."""
        low = f">= {_bound_in_words(self.least)}" if self.least > -inf else ""
        low = f"above {_bound_in_words(self.above)}" if self.above > -inf else low
        high = f"at most {_bound_in_words(self.most)}" if self.most < inf else ""
        high = f"below {_bound_in_words(self.below)}" if self.below < inf else high
        if self.least > -inf and self.most < inf:
            return f" from {_bound_in_words(self.least)} to {_bound_in_words(self.most)}"
        if low and high:
            return f" {low} and {high}"
        bound = f" {low or high}" if low or high else ""
        return bound if self.finite else f"{bound}, nan or inf"


def _bound_in_words(bound: float) -> str:
    """Return a bound in words; powers of two beyond a million, and these less 1, are written as such."""
    # 2**63 - 1 is read at a glance, 9223372036854775807 is not.
    if power := _power_of_two_in_words(bound):
        return power
    if power := _power_of_two_in_words(bound + 1):
        return f"{power} - 1"
    return str(int(bound)) if bound == int(bound) and abs(bound) < 1e15 else f"{bound:g}"


def _power_of_two_in_words(number: float) -> str:
    """Return "2**63" for such a power beyond a million, "-2**63" for a negative one; "" for other numbers."""
    size = abs(int(number))
    is_power_of_two = size == abs(number) and size & (size - 1) == 0
    if not is_power_of_two or size <= 1 << 20:
        return ""
    return f"{'-' if number < 0 else ''}2**{size.bit_length() - 1}"


WHOLE = Range(-_MOST_INT - 1, _MOST_INT)
"""Range of an int that states none: 64 bits."""


@dataclass(frozen=True)
class Length:
    """Number of items of a list, or of letters of a text: at least so many, and at most."""

    least: int = 0
    # An iterator without an end is stopped here.
    most: int = 1_000_000

    def holds(self, count: int) -> bool:
        """Return True if a number of items is right."""
        return self.least <= count <= self.most


@dataclass(frozen=True)
class PathTarget:
    """The file or folder that a path has to lead to: a "file", "folder", "output file" or "output folder".

    An output file need not be there, but its folder must.  An output folder need not be there either; its
    nearest parent that is there must be a folder that can be written.
    """

    target: Literal["file", "folder", "output file", "output folder"]


@dataclass(frozen=True)
class Where:
    """Words for what is right, and a condition that no other mark states: `Where("an even number", is_even)`.

    holds: returns True for a value that is right; called for values of the annotated type.
    """

    words: str
    holds: Callable[[Any], bool] = lambda value: True


NotEmpty = Length(1)
"""At least one item or letter."""

PositiveInt = Annotated[int, Range(1, _MOST_INT)]
"""An integer >= 1."""
NonNegativeInt = Annotated[int, Range(0, _MOST_INT)]
"""An integer >= 0."""
Seed = Annotated[int, Range(0, (1 << 64) - 1)]
"""An unsigned 64-bit integer."""
PositiveFloat = Annotated[float, Range(above=0)]
"""A finite number above 0."""
NonNegativeFloat = Annotated[float, Range(0)]
"""A finite number >= 0."""
Share = Annotated[float, Range(0, 1)]
"""A number from 0 to 1."""
PositiveShare = Annotated[float, Range(above=0, most=1)]
"""A number above 0 and at most 1."""
AnyFloat = Annotated[float, Range(finite=False)]
"""A number that may be nan or infinite; a plain `float` is finite."""
Name = Annotated[str, NotEmpty]
"""A non-empty string."""
File = Annotated[str | PathLike[str] | Path, PathTarget("file")]
"""The path of a file that is there."""
Folder = Annotated[str | PathLike[str] | Path, PathTarget("folder")]
"""The path of a folder that is there."""
OutputFile = Annotated[str | PathLike[str] | Path, PathTarget("output file")]
"""The path of a file to write, in a folder that is there."""
OutputFolder = Annotated[str | PathLike[str] | Path, PathTarget("output folder")]
"""The path of a folder to write into, which is made when needed."""
