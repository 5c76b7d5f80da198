"""Masks are made when they are due, of what a step has gathered of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from amanda.tools._libraries import numpy as np
from amanda.tools.kit import Present, WeightTool
from amanda.tools.kit._tensors import Array
from amanda.tools.prune._masks import PruneError, regrown_kept
from amanda.tools.prune._options import Options
from amanda.tools.prune._weight import PrunedWeight


class Making:
    """Knows the step, and makes the masks that are due: at an op, or of all weights as a step ends.

    step: the number of the present step.  is_preparing: True within `prepare`, which is no step.
    """

    def __init__(self, options: Options, tool: WeightTool[PrunedWeight]) -> None:
        self._options, self._schedule, self._tool = options, options.schedule, tool
        self.step = self._first = 0
        self.is_preparing = self._stepped = self._for_good = False

    @property
    def next_step(self) -> int:
        """The step that comes when the present one is done, or has not begun."""
        return self.step + 1 if self._stepped else self._first

    def begin_at(self, step: int) -> None:
        """Number the next step."""
        self._first, self._stepped = step, False

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Context of a call of the model that is no step, and gathers for the masks of the first one."""
        self.is_preparing = True
        try:
            yield
            self._make_gathered(self._schedule.last if self._for_good else self._next_update)
        finally:
            self.is_preparing = self._for_good = False

    def turn(self, number: int) -> None:
        """End the step, and begin the one that is this many behind the first."""
        self._make_gathered(self._next_update)
        self.step, self._stepped = self._first + number, False

    def look_at(self, weight: PrunedWeight, present: Present) -> None:
        """Make the mask of a weight, or gather what it will be made of, where either is due."""
        self._stepped = self._stepped or not self.is_preparing
        if self._is_made_at_once(weight):
            update = self._schedule.latest(self.step)
            if update is not None and weight.precedes(update):
                self._gather(weight, present)
                self._make_masks([weight], update)
        elif weight.magnitudes is None and weight.precedes(self._next_update):
            self._check_prepared()
            self._gather(weight, present)

    def gather_for_good(self, weight: PrunedWeight, present: Present) -> None:
        """Gather, within `prepare`, what the mask of the last step is made of; else no mask is made."""
        if not weight.is_ready:
            self._for_good = self.is_preparing
            if weight.magnitudes is None:
                weight.gather(present(), revive=False)

    def _gather(self, weight: PrunedWeight, present: Present) -> None:
        revive = self._options.regrow == "magnitude"
        value = present()
        if weight.is_ready and not revive:
            weight.start_grown(present)
            value = weight.transformed(self._tool, value)
        weight.gather(value, revive)

    def _check_prepared(self) -> None:
        is_first = self._schedule.begin == self.step == 0 and not self.is_preparing
        if is_first and not any(one.is_ready for one in self._tool.weights):
            raise PruneError(
                'scope="global" ranks all weights of the model, and the first masks are due before they '
                "are known: call tool.prepare(model, example), or give begin=1: step 0 is dense then"
            )

    def _is_made_at_once(self, weight: PrunedWeight) -> bool:
        """Return True if a mask needs no more than the weight's own present value."""
        return not self._options.is_global and not (self._options.regrow == "gradient" and weight.is_ready)

    @property
    def _next_update(self) -> int | None:
        """The update for which this step gathers; a step of preparation for itself, another for the next."""
        return self._schedule.latest(self.step + (not self.is_preparing))

    def _make_gathered(self, update: int | None) -> None:
        """Make the masks for which the step has gathered what they need."""
        waiting = [one for one in self._tool.weights if one.magnitudes is not None]
        if self._options.regrow == "gradient":
            for one in [one for one in waiting if one.is_ready and one.gradient is None]:
                one.magnitudes = None
                waiting.remove(one)
        if update is None or not waiting:
            return
        for group in [waiting] if self._options.is_global else [[one] for one in waiting]:
            self._make_masks(group, update)

    def _make_masks(self, weights: Sequence[PrunedWeight], update: int) -> None:
        """Give weights that share a budget, whose magnitudes are gathered, the masks of a step."""
        options, pattern = self._options, self._options.pattern
        for one in weights:
            if pattern.vectors and one.permutation is not None and not one.is_ready:
                one.permute(*pattern.vectors)
        magnitudes = [one.magnitudes for one in weights]
        sparsity = self._schedule.at(update)
        if options.exchanges and all(one.is_ready for one in weights):
            growth = [self._growth(one, update) for one in weights]
            fraction = self._schedule.regrown(update, options.fraction)
            kept = regrown_kept(magnitudes, growth, sparsity, fraction)
        else:
            kept = pattern.kept(magnitudes, sparsity)
        for one, own in zip(weights, kept, strict=True):
            stays_dropped = options.regrow is None and one.is_ready
            one.keep_only(own & one.kept_like(own) if stays_dropped else own, update)

    def _growth(self, weight: PrunedWeight, update: int) -> Array:
        """Return how much each element of a weight deserves to come back."""
        if self._options.regrow == "gradient":
            return abs(weight.gradient)
        # By the weight's place and the step alone: the same in every framework, and after a restart.
        random = np.random.Generator(np.random.Philox([self._options.seed, weight.number, update]))
        scores = random.random(tuple(weight.magnitudes.shape), np.float32)
        return weight.like(scores, weight.magnitudes)
