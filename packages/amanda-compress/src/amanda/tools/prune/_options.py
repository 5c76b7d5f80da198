"""PruneOptions of PruneTool: the schedule, the pattern, and which options go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi, prod
from typing import Literal

from amanda.options import NonNegativeInt, PositiveInt, Share, checked
from amanda.tools.libraries import do, shape
from amanda.tools.prune._importance import OF_GRADIENTS, OF_INPUTS, Importance
from amanda.tools.prune._masks import (
    Array,
    PruneError,
    block_keep_masks,
    channel_keep_masks,
    element_keep_masks,
    n_m_keep_mask,
    row_keep_masks,
    tile_keep_masks,
)

ScheduleKind = Literal["constant", "linear", "cubic"]


@checked(error=PruneError)
def cubic_sparsity(
    step: NonNegativeInt, begin: NonNegativeInt, end: NonNegativeInt, initial: Share, final: Share
) -> float:
    """Return the sparsity at a step between begin and end, which rises fast at first and then slower.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", eq. 1.
    """
    share_left = 1 - _share_passed(step, begin, end)
    return final + (initial - final) * share_left**3


@checked(error=PruneError)
def linear_sparsity(
    step: NonNegativeInt, begin: NonNegativeInt, end: NonNegativeInt, initial: Share, final: Share
) -> float:
    """Return the sparsity at a step between begin and end, which rises by the same amount at each step."""
    return initial + (final - initial) * _share_passed(step, begin, end)


def _share_passed(step: int, begin: int, end: int) -> float:
    """Return the share of the steps from begin to end that have passed."""
    if end <= begin:
        raise PruneError(f"end is {end}, begin {begin}: the end comes after the beginning")
    return min(max((step - begin) / (end - begin), 0.0), 1.0)


@checked(error=PruneError)
@dataclass(frozen=True)
class PruneSchedule:
    """The steps at which masks are updated: `begin`, then each `frequency`th, and `end`.

    kind: "constant", or "linear" or "cubic" from `initial` at begin to `sparsity` at end.
    end: None for one update at begin, or for updates without end where a frequency is set.
    Raises PruneError for options that contradict each other.
    """

    sparsity: Share = 0.5
    kind: ScheduleKind = "constant"
    initial: Share = 0.0
    begin: NonNegativeInt = 0
    end: NonNegativeInt | None = None
    frequency: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.end <= self.begin:
            raise PruneError(f"end is {self.end}, begin {self.begin}: the end comes after the beginning")
        if self.kind != "constant" and self.end is None:
            raise PruneError(f"a {self.kind} schedule has an end: the step from which the sparsity stays")

    def last_update(self, step: int) -> int | None:
        """Return the last step up to `step` at which masks are updated; None before the first update."""
        if step < self.begin:
            return None
        if not self.repeats:
            return self.begin
        if self.end is not None and step >= self.end:
            return self.end
        return step - (step - self.begin) % (self.frequency or 1)

    @property
    def final_update(self) -> int:
        """Return the step whose masks stay, or the first update of a schedule without an end."""
        step = self.last_update(self.begin if self.end is None else self.end)
        return self.begin if step is None else step

    @property
    def repeats(self) -> bool:
        """True if masks are updated more than once."""
        return self.kind != "constant" or self.frequency is not None

    def sparsity_at(self, step: int) -> float:
        """Return the sparsity of masks that are updated at a step."""
        if self.kind == "constant" or self.end is None:
            return self.sparsity
        sparsity = cubic_sparsity if self.kind == "cubic" else linear_sparsity
        return sparsity(step, self.begin, self.end, self.initial, self.sparsity)

    def exchanged_share(self, step: int, fraction: float) -> float:
        """Return the share of kept elements that is exchanged at a step, annealed to 0 at `end`.

        Source: Evci et al. 2020, "Rigging the lottery" (RigL), eq. 1.
        """
        return fraction if self.end is None else fraction / 2 * (1 + cos(pi * min(step / self.end, 1.0)))


@dataclass(frozen=True)
class Pattern:
    """A shape of sparsity: which elements of a weight are dropped together.

    name: the option `pattern` of PruneTool.  keep_masks: function of the scores of weights (outputs, inputs,
    ...), -inf where an element is dropped already, and of a sparsity; it returns keep masks.
    n_m: n and m of a pattern that keeps n of each m consecutive input channels, whatever the sparsity.
    block: outputs and inputs of a block; a weight's matrix (outputs, inputs and window) has whole blocks.
    """

    name: str
    keep_masks: Callable[[Sequence[Array], float], list[Array]]
    n_m: tuple[int, int] | None = None
    block: tuple[int, int] | None = None

    @property
    def is_elementwise(self) -> bool:
        """True if each element is dropped by itself."""
        return self.keep_masks is element_keep_masks

    def why_unsupported(self, extents: Sequence[int], has_axes: bool) -> str | None:
        """Return why a weight of these extents cannot have the pattern; None for a weight that can."""
        if not has_axes and not self.is_elementwise:
            return "which of its axes are outputs and inputs is not known"
        if self.n_m is not None and extents[1] % self.n_m[1]:
            return f"its {extents[1]} input channels are no multiple of {self.n_m[1]}"
        if self.block is not None:
            matrix = extents[0], prod(extents[1:])
            if any(extent % block_extent for extent, block_extent in zip(matrix, self.block, strict=True)):
                return f"its matrix of {matrix[0]}x{matrix[1]} has no whole number of blocks {self.block}"
        return None


def pattern_of(name: str, granularity: int, norm: int, block: tuple[int, int]) -> Pattern:
    """Return a pattern by name: "unstructured", n:m such as "2:4", "block", "tile" or "structured".

    Raises PruneError for another name.
    """
    if match := re.fullmatch(r"(\d+):(\d+)", name):
        n, m = int(match[1]), int(match[2])
        if 0 < n <= m:
            return Pattern(name, partial(_vector_keep_masks, n, m), (n, m))
        raise PruneError(f"pattern is {name!r}: of each {m} channels {n} cannot be kept")
    named: dict[str, Callable[..., list[Array]]] = {
        "unstructured": element_keep_masks,
        "block": partial(_matrix_block_keep_masks, block, norm),
        "tile": partial(_matrix_tile_keep_masks, granularity),
        "structured": partial(channel_keep_masks, norm=norm),
    }
    if name not in named:
        raise PruneError(
            f"pattern is {name!r}; it is unstructured, n:m (such as 2:4), block, tile or structured"
        )
    return Pattern(name, named[name], block=(block[0], block[1]) if name == "block" else None)


def _vector_keep_masks(n: int, m: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return keep masks by n:m along the input channels; the sparsity has no effect."""
    return [
        do("moveaxis", n_m_keep_mask(do("moveaxis", weight, 1, -1), n, m), -1, 1) for weight in magnitudes
    ]


def _matrix_block_keep_masks(
    block: tuple[int, int], norm: int, magnitudes: Sequence[Array], sparsity: float
) -> list[Array]:
    """Return keep masks by blocks of the matrices (outputs, inputs and window) of weights."""
    matrices = [do("reshape", weight, (shape(weight)[0], -1)) for weight in magnitudes]
    keep_masks = block_keep_masks(matrices, sparsity, block, norm)
    return [
        do("reshape", keep_mask, shape(weight))
        for keep_mask, weight in zip(keep_masks, magnitudes, strict=True)
    ]


def _matrix_tile_keep_masks(granularity: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return keep masks by tiles of the matrices (inputs and window, outputs) of weights."""
    matrices = [do("reshape", weight, (shape(weight)[0], -1)).T for weight in magnitudes]
    keep_masks = tile_keep_masks(matrices, sparsity, granularity)
    return [
        do("reshape", keep_mask.T, shape(weight))
        for keep_mask, weight in zip(keep_masks, magnitudes, strict=True)
    ]


Scope = Literal["local", "global"]
Regrow = Literal["importance", "gradient", "random"]


@dataclass(frozen=True)
class PruneOptions:
    """The arguments of PruneTool.

    Raises PruneError for arguments that contradict each other.
    """

    schedule: PruneSchedule
    pattern: Pattern
    scope: Scope
    importance: Importance
    regrow: Regrow | None
    fraction: float
    permute: bool
    mask_gradients: bool
    seed: int

    def __post_init__(self) -> None:
        is_n_m, name = self.pattern.n_m is not None, self.pattern.name
        if is_n_m and (self.is_global or self.schedule.kind != "constant"):
            raise PruneError(
                f"pattern {name} drops the same of each weight at any time: it has no global budget and "
                "no other schedule than the constant one"
            )
        if self.permute and not is_n_m:
            raise PruneError(f"permute is for patterns such as 2:4, not for {name}")
        if self.importance == "movement" and not (self.pattern.is_elementwise or is_n_m):
            raise PruneError(f"importance movement has a sign, of which {name} takes no norm")
        if self.importance == "sparsegpt":
            self._check_sparsegpt(is_n_m)
        if self.exchanges and not self.pattern.is_elementwise:
            raise PruneError(f"regrow={self.regrow!r} exchanges single elements, which {name} has not")
        if self.regrow and not self.schedule.repeats:
            raise PruneError("regrow exchanges what masks keep when they are made again: give a frequency")

    def _check_sparsegpt(self, is_n_m: bool) -> None:
        if not (self.pattern.is_elementwise or is_n_m):
            raise PruneError(f"importance sparsegpt drops elements or n:m, not {self.pattern.name}")
        if self.is_global or self.schedule.repeats or self.permute:
            raise PruneError(
                "importance sparsegpt makes each mask once, as it changes the weight: it has no global "
                "budget, no other schedule than the constant one, no frequency and no permute"
            )

    def keep_masks(self, scores: Sequence[Array], sparsity: float) -> list[Array]:
        """Return keep masks of weights that share a budget; with Wanda each output has its own budget."""
        if self.importance == "wanda" and self.pattern.is_elementwise and not self.is_global:
            return row_keep_masks(scores, sparsity)
        return self.pattern.keep_masks(scores, sparsity)

    @property
    def uses_gradients(self) -> bool:
        """True if the importance is computed of gradients."""
        return self.importance in OF_GRADIENTS

    @property
    def uses_inputs(self) -> bool:
        """True if the importance is computed of the inputs of ops."""
        return self.importance in OF_INPUTS

    @property
    def uses_weight_alone(self) -> bool:
        """True if a mask is computed from the weight's own values alone."""
        return not (self.is_global or self.uses_gradients or self.uses_inputs)

    @property
    def is_global(self) -> bool:
        """True if all weights share one budget."""
        return self.scope == "global"

    @property
    def ranks_dropped(self) -> bool:
        """True if dropped elements are ranked again, and come back where they are important enough."""
        return self.regrow == "importance"

    @property
    def exchanges(self) -> bool:
        """True if each update exchanges kept elements for as many dropped ones."""
        return self.regrow in ("gradient", "random")

    @property
    def needs_steps(self) -> bool:
        """True if masks depend on the number of the step."""
        return not self.uses_weight_alone or self.schedule.begin > 0 or self.schedule.repeats
