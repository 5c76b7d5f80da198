"""Options of the tool, and which of them go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from amanda.tools.prune._arrays import Array
from amanda.tools.prune._importance import OF_GRADIENTS, OF_INPUTS, Importance
from amanda.tools.prune._masks import PruneError, rows_kept
from amanda.tools.prune._patterns import Pattern
from amanda.tools.prune._schedule import Schedule

Budget = Literal["local", "global"]
Regrow = Literal["importance", "gradient", "random"]


@dataclass(frozen=True)
class Options:
    """The arguments of PruneTool.

    Raises PruneError for those that do not go together.
    """

    schedule: Schedule
    pattern: Pattern
    scope: Budget
    importance: Importance
    regrow: Regrow | None
    fraction: float
    permute: bool
    mask_gradients: bool
    seed: int

    def __post_init__(self) -> None:
        vectors, name = self.pattern.vectors is not None, self.pattern.name
        if vectors and (self.is_global or self.schedule.kind != "constant"):
            raise PruneError(
                f"pattern {name} drops the same of each weight at any time: it has no global budget and "
                "no other schedule than the constant one"
            )
        if self.permute and not vectors:
            raise PruneError(f"permute is for patterns such as 2:4, not for {name}")
        if self.importance == "movement" and not (self.pattern.is_elementwise or vectors):
            raise PruneError(f"importance movement has a sign, of which {name} takes no norm")
        if self.importance == "sparsegpt":
            self._check_sparsegpt(vectors)
        if self.exchanges and not self.pattern.is_elementwise:
            raise PruneError(f"regrow={self.regrow!r} exchanges single elements, which {name} has not")
        if self.regrow and not self.schedule.goes_on:
            raise PruneError("regrow exchanges what masks keep when they are made again: give a frequency")

    def _check_sparsegpt(self, vectors: bool) -> None:
        if not (self.pattern.is_elementwise or vectors):
            raise PruneError(f"importance sparsegpt drops elements or n:m, not {self.pattern.name}")
        if self.is_global or self.schedule.goes_on or self.permute:
            raise PruneError(
                "importance sparsegpt makes each mask once, as it changes the weight: it has no global "
                "budget, no other schedule than the constant one, no frequency and no permute"
            )

    def kept(self, scores: Sequence[Array], sparsity: float) -> list[Array]:
        """Return what is kept of weights that share a budget; with Wanda each output has its own."""
        if self.importance == "wanda" and self.pattern.is_elementwise and not self.is_global:
            return rows_kept(scores, sparsity)
        return self.pattern.kept(scores, sparsity)

    @property
    def of_gradients(self) -> bool:
        """True if the importance is computed of gradients."""
        return self.importance in OF_GRADIENTS

    @property
    def of_inputs(self) -> bool:
        """True if the importance is computed of the inputs of ops."""
        return self.importance in OF_INPUTS

    @property
    def of_weight_alone(self) -> bool:
        """True if the weight alone decides on its mask."""
        return not (self.is_global or self.of_gradients or self.of_inputs)

    @property
    def is_global(self) -> bool:
        """True if all weights share one budget."""
        return self.scope == "global"

    @property
    def ranks_anew(self) -> bool:
        """True if what is dropped comes back where it is worth enough."""
        return self.regrow == "importance"

    @property
    def exchanges(self) -> bool:
        """True if as many come back as are dropped for them."""
        return self.regrow in ("gradient", "random")

    @property
    def needs_steps(self) -> bool:
        """True if masks are made at another time than the first."""
        return not self.of_weight_alone or self.schedule.begin > 0 or self.schedule.goes_on
