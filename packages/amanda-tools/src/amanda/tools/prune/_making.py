"""Masks are made when they are due, of what a step has gathered of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._framework import Array
from amanda.tools.prune._met import Met
from amanda.tools.prune._options import Options
from amanda.tools.prune._patterns import Vectors
from amanda.tools.prune._permutation import input_permutation
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._regrowth import regrown_kept
from amanda.tools.prune._weight import Weight


class Making:
    """Knows the step, and makes the masks that are due: at an op, or of all weights as a step ends.

    step: the number of the one under way.  is_preparing: whether it is none.
    """

    def __init__(self, options: Options, met: Met) -> None:
        self._options, self._schedule, self._met = options, options.schedule, met
        self.step = self._first = 0
        self.is_preparing = self._stepped = self._for_good = False

    # ---- steps ----

    @property
    def next_step(self) -> int:
        """The step that comes when this one is done, or has not begun."""
        return self.step + 1 if self._stepped else self._first

    def begin_at(self, step: int) -> None:
        """Let the next step be of this number."""
        self._first, self._stepped = step, False

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around a call of the model that is no step, and gathers for the masks of the first one."""
        self.is_preparing = True
        try:
            yield
            self._make_gathered(self._schedule.last if self._for_good else self._next_update)
        finally:
            self.is_preparing = self._for_good = False

    def await_last_masks(self) -> None:
        """Hear, in a preparation, that masks will stay as they are: those of the last step are made then."""
        self._for_good = self.is_preparing

    # ---- at ops ----

    def masked(self, value: Any, weight: Weight | Reading) -> Any:
        """A weight as an op shall read it; None for no change."""
        self._stepped = self._stepped or not self.is_preparing
        if isinstance(weight, Weight):
            self._look_at(weight, lambda: value)
        else:  # in a graph it may be read ahead of the others
            for one in weight.within:
                self._look_at(one, partial(weight.value_of, one, value))
        return weight.masked(value)

    def _look_at(self, weight: Weight, read: Callable[[], Any]) -> None:
        """Make the mask of a weight, or gather what it will be made of, where either is due."""
        revive = self._options.regrow == "magnitude"
        if self.is_made_at_once(weight):
            update = self._schedule.latest(self.step)
            if update is not None and weight.precedes(update):
                weight.magnitudes = weight.gathered(read(), revive)
                _make_masks([weight], update, self._options)
        elif weight.magnitudes is None and weight.precedes(self._next_update):
            self._check_prepared()
            weight.magnitudes = weight.gathered(read(), revive)

    def _check_prepared(self) -> None:
        is_first = self._schedule.begin == self.step == 0 and not self.is_preparing
        if is_first and not any(one.is_masked for one in self._met.weights.values()):
            raise PruneError(
                'scope="global" ranks all weights of the model, and the first masks are due before they '
                "are known: call tool.prepare(model, example), or give begin=1: step 0 is dense then"
            )

    def is_made_at_once(self, weight: Weight) -> bool:
        """Whether a mask needs no more than the weight's own present value."""
        return not self._options.is_global and not (self._options.regrow == "gradient" and weight.is_masked)

    @property
    def _next_update(self) -> int | None:
        """The update for which this step gathers; a step of preparation for itself, another for the next."""
        return self._schedule.latest(self.step + (not self.is_preparing))

    def turn(self, number: int) -> None:
        """End the step, and begin the one that is this many behind the first."""
        self._make_gathered(self._next_update)
        self.step, self._stepped = self._first + number, False

    def _make_gathered(self, update: int | None) -> None:
        """Make the masks for which the step has gathered what they need."""
        waiting = [one for one in self._met.weights.values() if one.magnitudes is not None]
        if self._options.regrow == "gradient":
            for one in waiting:
                if one.is_masked and one.gradient is None:
                    one.magnitudes = None
            waiting = [one for one in waiting if one.magnitudes is not None]
        if update is None or not waiting:
            return
        for group in [waiting] if self._options.is_global else [[one] for one in waiting]:
            _make_masks(group, update, self._options)


def _make_masks(weights: Sequence[Weight], update: int, options: Options) -> None:
    """Give weights that share a budget, whose magnitudes are gathered, the masks of a step."""
    for one in weights:
        if one.permutation is not None and not one.is_masked:
            _find_permutation(one, options.pattern)
    magnitudes = [one.magnitudes for one in weights]
    sparsity = options.schedule.at(update)
    if options.exchanges and all(one.is_masked for one in weights):
        growth = [_growth(one, update, options) for one in weights]
        fraction = options.schedule.regrown(update, options.fraction)
        kept = regrown_kept(magnitudes, growth, sparsity, fraction)
    else:
        kept = options.pattern.kept(magnitudes, sparsity)
    for one, own in zip(weights, kept, strict=True):
        stays_dropped = options.regrow is None and one.is_masked
        one.keep(own & one.kept_like(own) if stays_dropped else own, update)


def _growth(weight: Weight, update: int, options: Options) -> Array:
    """How much each element of a weight deserves to come back."""
    magnitudes: Any = weight.magnitudes
    if options.regrow == "gradient":
        gradient: Any = weight.gradient
        return abs(gradient)
    # By the weight's place and the step alone, so that it is the same in every framework and after a restart.
    random = np.random.Generator(np.random.Philox([options.seed, weight.number, update]))
    return weight.framework.like(random.random(tuple(magnitudes.shape), np.float32), magnitudes)


def _find_permutation(weight: Weight, pattern: Any) -> None:
    magnitudes: Any = weight.magnitudes
    permutation: Any = weight.permutation
    assert isinstance(pattern, Vectors)
    inputs_last = np.moveaxis(weight.framework.numbers(magnitudes), 1, -1)
    found = input_permutation(inputs_last, pattern.n, pattern.m)
    permutation[...] = weight.framework.like(found, permutation)
    weight.magnitudes = magnitudes[:, permutation]
