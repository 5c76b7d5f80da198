"""The schedule: when masks are made, and how sparse they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from numbers import Integral
from typing import Literal, get_args

from amanda.tools.prune._masks import PruneError, check_sparsity

Kind = Literal["constant", "linear", "cubic"]


def cubic_sparsity(step: int, begin: int, end: int, initial: float, final: float) -> float:
    """Return the sparsity at a step between begin and end: fast at first, slower and slower.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", eq. 1.
    """
    left = 1 - min(max((step - begin) / (end - begin), 0.0), 1.0)
    return final + (initial - final) * left**3


def linear_sparsity(step: int, begin: int, end: int, initial: float, final: float) -> float:
    """Return the sparsity at a step between begin and end: as much more at each step."""
    return initial + (final - initial) * min(max((step - begin) / (end - begin), 0.0), 1.0)


@dataclass(frozen=True)
class Schedule:
    """The steps at which masks are made: `begin`, then each `frequency`th, and `end`.

    kind: "constant", or "linear" or "cubic" from `initial` at begin to `sparsity` at end.
    end: None for masks that are made at begin alone, or with a frequency for ever.
    Raises PruneError for what does not go together.
    """

    sparsity: float = 0.5
    kind: Kind = "constant"
    initial: float = 0.0
    begin: int = 0
    end: int | None = None
    frequency: int | None = None

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        check_sparsity(self.initial)
        if self.kind not in get_args(Kind):
            raise PruneError(f"schedule is {self.kind!r}; it is one of {', '.join(get_args(Kind))}")
        for name in ("begin", "end", "frequency"):
            given = getattr(self, name)
            if not isinstance(given, Integral) and (given is not None or name == "begin"):
                raise PruneError(f"{name} is {given!r}; steps are counted in whole numbers")
        if self.begin < 0:
            raise PruneError(f"begin is {self.begin}; steps count from 0")
        if self.frequency is not None and self.frequency < 1:
            raise PruneError(f"frequency is {self.frequency}; it is a number of steps, 1 at least")
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
