"""Options of the tool, checked."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from amanda.tools.kit import check_one_of
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._patterns import Pattern
from amanda.tools.prune._schedule import Schedule

Budget = Literal["op", "global"]
Regrow = Literal["magnitude", "gradient", "random"]


@dataclass(frozen=True)
class Options:
    """The arguments of PruneTool, checked.

    Raises PruneError for those that do not go together.
    """

    schedule: Schedule
    pattern: Pattern
    scope: Budget
    regrow: Regrow | None
    fraction: float
    permute: bool
    mask_gradients: bool
    seed: int

    def __post_init__(self) -> None:
        check_one_of("scope", self.scope, get_args(Budget), PruneError)
        check_one_of("regrow", self.regrow, (None, *get_args(Regrow)), PruneError)
        vectors, name = self.pattern.vectors is not None, self.pattern.name
        if vectors and (self.is_global or self.schedule.kind != "constant"):
            raise PruneError(
                f"pattern {name} drops the same of each weight at any time: it has no global budget and "
                "no other schedule than the constant one"
            )
        if self.permute and not vectors:
            raise PruneError(f"permute is for patterns such as 2:4, not for {name}")
        if self.exchanges and not self.pattern.is_elementwise:
            raise PruneError(f"regrow={self.regrow!r} exchanges single elements, which {name} has not")
        if self.regrow and not self.schedule.goes_on:
            raise PruneError("regrow exchanges what masks keep when they are made again: give a frequency")
        if not isinstance(self.fraction, Real) or not 0 <= self.fraction <= 1:
            raise PruneError(f"regrow_fraction is {self.fraction!r}; it is a share, from 0 to 1")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 1 << 64:
            raise PruneError(f"seed is {self.seed!r}; it is a whole number between 0 and 2**64 - 1")

    @property
    def is_global(self) -> bool:
        """True if all weights share one budget."""
        return self.scope == "global"

    @property
    def exchanges(self) -> bool:
        """True if as many come back as are dropped for them."""
        return self.regrow in ("gradient", "random")

    @property
    def needs_steps(self) -> bool:
        """True if masks are made at another time than the first."""
        return self.is_global or self.schedule.begin > 0 or self.schedule.goes_on
