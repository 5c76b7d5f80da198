"""The schedule: when masks are made, and how sparse they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

from amanda.options import NonNegativeInt, PositiveInt, Share, checked
from amanda.tools.prune._masks import PruneError

Kind = Literal["constant", "linear", "cubic"]


@checked(error=PruneError)
def cubic_sparsity(
    step: NonNegativeInt, begin: NonNegativeInt, end: NonNegativeInt, initial: Share, final: Share
) -> float:
    """Return the sparsity at a step between begin and end: fast at first, slower and slower.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", eq. 1.
    """
    left = 1 - _passed(step, begin, end)
    return final + (initial - final) * left**3


@checked(error=PruneError)
def linear_sparsity(
    step: NonNegativeInt, begin: NonNegativeInt, end: NonNegativeInt, initial: Share, final: Share
) -> float:
    """Return the sparsity at a step between begin and end: as much more at each step."""
    return initial + (final - initial) * _passed(step, begin, end)


def _passed(step: int, begin: int, end: int) -> float:
    """Return the share of the steps from begin to end that have passed."""
    if end <= begin:
        raise PruneError(f"end is {end}, begin {begin}: the end comes after the beginning")
    return min(max((step - begin) / (end - begin), 0.0), 1.0)


@checked(error=PruneError)
@dataclass(frozen=True)
class Schedule:
    """The steps at which masks are made: `begin`, then each `frequency`th, and `end`.

    kind: "constant", or "linear" or "cubic" from `initial` at begin to `sparsity` at end.
    end: None for masks that are made at begin alone, or with a frequency for ever.
    Raises PruneError for what does not go together.
    """

    sparsity: Share = 0.5
    kind: Kind = "constant"
    initial: Share = 0.0
    begin: NonNegativeInt = 0
    end: NonNegativeInt | None = None
    frequency: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.end <= self.begin:
            raise PruneError(f"end is {self.end}, begin {self.begin}: the end comes after the beginning")
        if self.kind != "constant" and self.end is None:
            raise PruneError(f"a {self.kind} schedule has an end: the step from which the sparsity stays")

    def latest(self, step: int) -> int | None:
        """Return the last step up to this one at which masks are made; None before the first."""
        if step < self.begin:
            return None
        if not self.goes_on:
            return self.begin
        if self.end is not None and step >= self.end:
            return self.end
        return step - (step - self.begin) % (self.frequency or 1)

    @property
    def last(self) -> int:
        """Return the step whose masks stay; of a schedule without an end, its first."""
        made = self.latest(self.begin if self.end is None else self.end)
        return self.begin if made is None else made

    @property
    def goes_on(self) -> bool:
        """True if masks are made again after the first time."""
        return self.kind != "constant" or self.frequency is not None

    def at(self, step: int) -> float:
        """Return the sparsity of masks that are made at a step."""
        if self.kind == "constant" or self.end is None:
            return self.sparsity
        sparsity = cubic_sparsity if self.kind == "cubic" else linear_sparsity
        return sparsity(step, self.begin, self.end, self.initial, self.sparsity)

    def regrown(self, step: int, fraction: float) -> float:
        """Return the share of what is kept that is exchanged at a step: annealed to 0 where there is an end.

        Source: Evci et al. 2020, "Rigging the lottery" (RigL), eq. 1.
        """
        return fraction if self.end is None else fraction / 2 * (1 + cos(pi * min(step / self.end, 1.0)))
