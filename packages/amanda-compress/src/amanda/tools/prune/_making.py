"""Masks are made when they are due, of what a step has gathered of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda.tools.prune._arrays import Array
from amanda.tools.prune._importance import needs, random_scores, scores
from amanda.tools.prune._masks import PruneError, regrown_kept
from amanda.tools.prune._options import Options
from amanda.tools.prune._sparsegpt import compensated
from amanda.tools.prune._weight import PrunedWeight, is_finite
from amanda.tools.weights import WeightTool


class Making:
    """Knows the step, and makes the masks that are due: at an op, or of all weights as a step ends.

    step: the number of the present step.  is_calibrating: True within `calibrating`, which is no step.
    """

    def __init__(self, options: Options, tool: WeightTool[PrunedWeight]) -> None:
        self._options, self._schedule, self._tool = options, options.schedule, tool
        self.step = self._first = 0
        self.is_calibrating = self._stepped = self._for_good = False

    @property
    def next_step(self) -> int:
        """The step that comes when the present one is done, or has not begun."""
        return self.step + 1 if self._stepped else self._first

    def begin_at(self, step: int) -> None:
        """Number the next step."""
        self._first, self._stepped = step, False

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Context of calls of the model that are no steps, and gather for the masks of the first one."""
        self.is_calibrating = True
        try:
            yield
            self._make_gathered(self._schedule.last if self._for_good else self._next_update)
        except BaseException:
            for one in self._tool.weights:
                one.forget()
            raise
        finally:
            self.is_calibrating = self._for_good = False

    def turn(self, number: int) -> None:
        """End the step, and begin the one that is this many behind the first; not within `calibrating`."""
        if self.is_calibrating:
            return
        self._make_gathered(self._next_update)
        self.step, self._stepped = self._first + number, False

    def look_at(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Make the mask of a weight, or gather what it will be made of, where either is due."""
        self._stepped = self._stepped or not self.is_calibrating
        if self._options.of_gradients:
            weight.value = weight.plain(present())
        if self._is_made_at_once(weight):
            update = self._schedule.latest(self.step)
            if update is not None and weight.precedes(update):
                self._gather(weight, present)
                self._make_masks([weight], update)
        elif weight.magnitudes is None and self.is_gathering(weight):
            self._check_prepared()
            self._gather(weight, present)

    def is_gathering(self, weight: PrunedWeight) -> bool:
        """Return True if a mask of the weight is made as the step ends; reads may come in any order."""
        return weight.precedes(self._next_update)

    def gather_for_good(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Gather, within `prepare`, what the mask of the last step is made of; else no mask is made.

        Raises PruneError for an importance that a file says nothing of.
        """
        if not weight.is_ready:
            if self._options.of_gradients or self._options.of_inputs:
                raise PruneError(
                    f"importance={self._options.importance!r} is computed while a model runs, not of a file: "
                    "prune the running model, and give tool.load_state_dict its state to write its masks"
                )
            self._for_good = self.is_calibrating
            if weight.magnitudes is None:
                weight.gather(present())

    def _gather(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        value = present()
        if weight.is_ready and not self._options.ranks_anew:
            weight.start_grown(present)
            value = weight.transformed(self._tool, value)
        weight.gather(value)
        if self._options.importance == "sparsegpt":
            weight.value = weight.plain(value) * 1

    def _check_prepared(self) -> None:
        is_first = self._schedule.begin == self.step == 0 and not self.is_calibrating
        if not is_first or any(one.is_ready for one in self._tool.weights):
            return
        importance = self._options.importance
        if self._options.of_gradients or self._options.of_inputs:
            raise PruneError(
                f"importance={importance!r} is computed of {needs(importance)}, or give begin=1: step 0 is "
                "dense then"
            )
        raise PruneError(
            'scope="global" ranks all weights of the model, and the first masks are due before they '
            "are known: call tool.prepare(model, example), or give begin=1: step 0 is dense then"
        )

    def _is_made_at_once(self, weight: PrunedWeight) -> bool:
        """Return True if a mask needs no more than the weight's own present value."""
        return self._options.of_weight_alone and not (self._options.regrow == "gradient" and weight.is_ready)

    @property
    def _next_update(self) -> int | None:
        """The update for which this step gathers; a step of preparation for itself, another for the next."""
        return self._schedule.latest(self.step + (not self.is_calibrating))

    def _make_gathered(self, update: int | None) -> None:
        """Make the masks for which the step has gathered what they need."""
        waiting = [one for one in self._tool.weights if one.magnitudes is not None]
        lacking = [one for one in waiting if self._lacks(one)]
        importance = self._options.importance
        if self.is_calibrating and waiting and len(lacking) == len(waiting):
            raise PruneError(
                f"importance={importance!r} is computed of {needs(importance)}; no finite ones came"
            )
        why = "the inputs that it multiplies" if self._options.of_inputs else "finite gradients of it"
        for one in waiting:
            place = f"{one.type} of {one.name}"
            if one in lacking:
                self._tool.weights.reasons[place] = f"{why} were not met"
            else:
                self._tool.weights.reasons.pop(place, None)
        waiting = [one for one in waiting if one not in lacking]
        if update is not None and waiting:
            for group in [waiting] if self._options.is_global else [[one] for one in waiting]:
                self._make_masks(group, update)
        for one in self._tool.weights:
            one.forget()

    def _lacks(self, weight: PrunedWeight) -> bool:
        """Return True if a step has brought no gradient or no input of which a mask is made."""
        regrows = self._options.regrow == "gradient" and weight.is_ready
        return (
            (regrows and weight.gradient is None)
            or (self._options.of_gradients and weight.product is None)
            or (self._options.of_inputs and weight.inputs is None)
        )

    def _make_masks(self, weights: Sequence[PrunedWeight], update: int) -> None:
        """Give weights that share a budget, of which a step has gathered enough, the masks of a step."""
        options, sparsity = self._options, self._schedule.at(update)
        for one in weights:
            one.check_inputs()
        if options.importance == "sparsegpt":
            for one in weights:
                self._compensate(one, sparsity, update)
            return
        worth = [self._scores(one, update) for one in weights]
        if options.exchanges and all(one.is_ready for one in weights):
            growth = [self._growth(one, update) for one in weights]
            fraction = self._schedule.regrown(update, options.fraction)
            kept = regrown_kept(worth, growth, sparsity, fraction)
        else:
            kept = options.kept(worth, sparsity)
        for one, own in zip(weights, kept, strict=True):
            stays_dropped = options.regrow is None and one.is_ready
            one.keep_only(own & one.kept_like(own) if stays_dropped else own, update)

    def _scores(self, weight: PrunedWeight, update: int) -> Array:
        """Return what is dropped first, in the order of the pattern."""
        options = self._options
        found = scores(weight, options.importance, options.seed, update)
        if options.pattern.vectors and weight.permutation is not None and not weight.is_ready:
            found = weight.permute(found, *options.pattern.vectors)
        return found if options.ranks_anew else weight.alive(found)

    def _compensate(self, weight: PrunedWeight, sparsity: float, update: int) -> None:
        """Make a mask once, and note what the weight changes by."""
        value = weight.ordered(weight.value)
        if not is_finite(value):
            raise PruneError(f"NaN or Inf in {weight.name}: importance='sparsegpt' is of finite numbers")
        kept, new = compensated(value, weight.inputs, sparsity, self._options.pattern.vectors)
        weight["offset"] = weight.restored((value - weight.like(new, value)) * kept)
        weight.keep_only(kept, update)

    def _growth(self, weight: PrunedWeight, update: int) -> Array:
        """Return how much each element of a weight deserves to come back."""
        if self._options.regrow == "gradient":
            return abs(weight.gradient)
        return random_scores(weight, [self._options.seed, weight.number, update])
