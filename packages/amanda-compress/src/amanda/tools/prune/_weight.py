"""A pruned weight, the importance of its elements, and the updates of its mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._importance import DATA_AND_REMEDY, sparsegpt
from amanda.tools.prune._masks import Array, PruneError, input_permutation, regrown_keep_masks
from amanda.tools.weights import Weight, WeightTool

if TYPE_CHECKING:
    from amanda.tools.prune._tool import PruneOptions
    from amanda.tools.steps import Steps


class PrunedWeight(Weight):
    """A weight with its mask, and with the data that a step gathers for the next mask.

    State: "mask", true where an element is kept; "offset", subtracted from the weight before it is masked:
    the value of an element when it came back, so that it starts at 0, or the change by SparseGPT;
    "permutation", the order of the input channels; "movement", the sum of weight times gradient.
    Data of a step: magnitudes, gradient and weight_times_gradient, in the order of `ordered`;
    inputs, sums as `sum_of_squares` or `sum_of_products` returns them.
    """

    # None where the step has gathered no such data.
    magnitudes: Array = None
    gradient: Array = None
    weight_times_gradient: Array = None
    inputs: Array = None
    value: Array = None
    _regrown_mask: Array = None  # of elements that come back at the next read

    @property
    def mask(self) -> Array:
        """True where an element is kept."""
        return self["mask"]

    @property
    def offset(self) -> Array | None:
        """Array subtracted from a weight before masking; None without one."""
        return self.get("offset")

    @property
    def permutation(self) -> Array | None:
        """The order in which n:m counts input channels; None for the order of the weight."""
        return self.get("permutation")

    @property
    def zeros(self) -> int:
        """Number of elements that are dropped."""
        return self.size - int(self.mask.sum())

    def is_older_than(self, update_step: int | None) -> bool:
        """Return True if the mask is older than the update of a step; False for a skipped weight."""
        return not self.is_skipped and update_step is not None and self.updated < update_step

    def reset_offset_if_finalized(self, present: Callable[[], Any]) -> None:
        """Set the offset to 0 if `finalize` wrote the loaded mask into the weight: its dropped values are 0.

        `finalize` has subtracted the offset already, be it of regrown elements or of SparseGPT.
        Called once after a load; resets `is_loaded`.
        """
        self.is_loaded = False
        if self.offset is None or self.is_skipped:
            return
        value = self.plain(present())
        is_dropped = ~self.like(self.mask, value)
        # Zeros at all dropped places are the trace of `finalize`; a weight of a training has values there,
        # which the mask hides.
        if bool(is_dropped.any()) and not bool(((value != 0) & is_dropped).any()):
            self["offset"] = 0

    def zero_regrown(self, present: Callable[[], Any]) -> None:
        """Make elements that have just come back 0, if any: subtract their present values from now on."""
        if self._regrown_mask is None:
            return
        present_value = self.plain(present())
        regrown, offset = self.like(self._regrown_mask, present_value), self.like(self.offset, present_value)
        self["offset"] = do("where", regrown, present_value, offset)
        # A regrown element starts at 0 once: from then on the offset holds, and the optimizer moves the
        # element.
        self._regrown_mask = None

    def ordered(self, value: Any) -> Array:
        """Return a value as an array (outputs, inputs, window), inputs in the order of `permutation`."""
        return self.permuted(self.canonical(self.plain(value)))

    def permuted(self, array: Array) -> Array:
        """Return an array (outputs, inputs, ...) with its inputs in the order of `permutation`."""
        return array if self.permutation is None else array[:, self.permutation]

    def keep_mask_like(self, array: Array) -> Array:
        """Return the mask in the order of `ordered`, on the device of an array."""
        return self.permuted(self.canonical(self.like(self.mask, array)))

    def gather_magnitudes(self, value: Any) -> None:
        """Store the magnitudes of a value, in the order of `ordered`."""
        self.magnitudes = abs(self.ordered(value))

    def without_dropped(self, scores: Array) -> Array:
        """Return scores with -inf for dropped elements; before the first mask as they are."""
        if not self.is_ready:
            return scores
        # Below every score: dropped elements are dropped again first, so that masks of rising sparsity are
        # nested.
        return do("where", self.keep_mask_like(scores), scores, do("full_like", scores, -inf))

    def choose_permutation(self, scores: Array, n: int, m: int) -> Array:
        """Choose and store the order of inputs in which n:m keeps the highest scores; return these in it."""
        # The search runs on the host, once for each weight: it is a loop over pairs of channels.
        inputs_last = np.moveaxis(self.to_numpy(scores), 1, -1)
        self["permutation"] = input_permutation(inputs_last, n, m)
        return scores[:, self.permutation]

    def gather_gradient(self, gradient: Any) -> None:
        """Add a finite gradient to the data of the step, if the step gathers."""
        # A gradient scaler of mixed precision skips steps with Inf; their gradients would rank elements at
        # random.
        if self.magnitudes is not None and is_finite(self.plain(gradient)):
            self.gradient = _add_to(self.gradient, self.ordered(gradient))

    def gather_weight_times_gradient(self, gradient: Any) -> None:
        """Add the weight times a gradient to the data of the step, and to the movement, if it is finite.

        Does nothing in a step that does not gather.
        """
        if self.value is None:
            return
        product = self.value * self.plain(gradient)
        if not is_finite(product):  # a gradient scaler skips the step too
            return
        self.weight_times_gradient = _add_to(self.weight_times_gradient, self.ordered(product))
        if self.get("movement") is not None:
            self["movement"] = self["movement"] + self.like(product, self["movement"])

    def gather_inputs(self, inputs: Array) -> None:
        """Add sums of squares or products of inputs to the data of the step."""
        self.inputs = _add_to(self.inputs, inputs)

    def check_inputs(self) -> None:
        """Raise PruneError for NaN and infinity in the gathered sums of inputs; nothing without sums."""
        if self.inputs is not None and not is_finite(self.inputs):
            raise PruneError(
                f"NaN or Inf in the inputs of the {self.type} of {self.name}, or in the sums of their squares"
            )

    def release_gathered(self) -> None:
        """Release the arrays gathered in a step."""
        self.magnitudes = self.gradient = self.weight_times_gradient = self.inputs = self.value = None

    def set_mask(self, keep_mask: Array, update_step: int) -> None:
        """Store a mask, in the order of `ordered`, of the update at a step; release the data of the step.

        A weight with an offset also notes the elements that come back, for `zero_regrown` at the next read.
        """
        if self.permutation is not None:
            # Back into the order of the weight, in which ops read it.
            keep_mask = keep_mask[:, self.permutation.argsort()]
        mask = self.restored(keep_mask)
        if self.offset is not None and self.is_ready:
            # Their present values are subtracted at the next read, when the optimizer's step has been taken.
            self._regrown_mask = mask & ~self.like(self.mask, mask)
        # `updated` comes last, because it marks the weight as ready.
        self["mask"], self.updated = mask, update_step
        self.release_gathered()


def is_finite(array: Array) -> bool:
    """Return True if an array has no NaN and no infinity."""
    return bool((abs(array) < inf).all())


def _add_to(total: Array | None, array: Array) -> Array:
    """Return the sum; without a total a copy of the array."""
    # A copy, since frameworks reuse the memory of gradients for the next step.
    return array * 1 if total is None else total + array


def element_importances(weight: PrunedWeight, importance: str, seed: int, update_step: int) -> Array:
    """Return the importance of each element of a weight, in the order of `PrunedWeight.ordered`.

    "magnitude": |w| (Han et al. 2015).  "gradient": |w * g|, the change of the loss to first order (Molchanov
    et al. 2019, eq. 8).  "movement": the sum of -w * g over all steps (Sanh et al. 2020, sec. 3).  "wanda":
    |w| * ||x||_2 (Sun et al. 2023, eq. 1).  "random": seeded by the weight's number and the step alone, so
    that every framework draws the same.
    """
    magnitudes = weight.magnitudes
    if importance == "gradient":
        return abs(weight.weight_times_gradient)
    if importance == "movement":
        # Negative: a weight that gradient descent moves away from 0 has a gradient of the other sign.
        return weight.like(-weight.ordered(weight["movement"]), magnitudes)
    if importance == "wanda":
        return magnitudes * weight.permuted(_input_norms(weight))
    if importance == "random":
        # The 1 gives other numbers than those by which dropped elements come back.
        return random_scores(weight, [seed, weight.number, update_step, 1])
    return magnitudes  # importance "magnitude"


def random_scores(weight: PrunedWeight, key: list[int]) -> Array:
    """Return random numbers between 0 and 1 in the shape of a weight's magnitudes."""
    # Counter-based, so that the numbers of a weight do not depend on which weights were drawn before.
    random = np.random.Generator(np.random.Philox(key))
    uniform = random.random(tuple(weight.magnitudes.shape), np.float32)
    return weight.like(uniform, weight.magnitudes)


def _input_norms(weight: PrunedWeight) -> Array:
    """Return the norm of the inputs that each element (outputs, inputs, window) multiplies."""
    squares = weight.inputs  # (groups, inputs * window)
    groups, outputs = shape(squares)[0], weight.canonical_shape[0]
    # Sums of squares are gathered, and the root is taken once: norms of batches do not add up.
    norms = do("reshape", squares**0.5, (groups, 1, -1))
    per_output = do("broadcast_to", norms, (groups, outputs // groups, shape(norms)[-1]))
    return do("reshape", per_output, weight.canonical_shape)


class MaskUpdater:
    """Updates masks on schedule: at the op that reads a weight, or of all weights at the end of a step.

    Masks of a weight's own values are updated where an op reads the weight.  Masks that need other weights,
    inputs or gradients wait for the end of the step that gathers these.
    step: number of the current step.  next_step: of the step after the last one that read a weight.
    is_calibrating: True within `calibrating`, whose calls are not steps.
    """

    def __init__(self, options: PruneOptions, tool: WeightTool[PrunedWeight], steps: Steps) -> None:
        self._options, self._schedule, self._tool, self._steps = options, options.schedule, tool, steps
        self.step = self.next_step = self._first_step = 0
        # _calibrates_file: True once data of a file were gathered in this calibration.
        self.is_calibrating = self._calibrates_file = False
        steps.on_step(self.end_step)

    def set_next_step(self, step: int) -> None:
        """End the current step, and set the number of the next one."""
        self._first_step = self.next_step = step
        self._steps.clear()

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Return a context whose calls of the model gather data for the first masks, and are not steps.

        Its end makes the masks; after an error the data are released instead.  Then comes the step that
        would have come without the calibration.
        """
        # The step before ends here, so that its data are not those of the calibration.
        self.set_next_step(self.next_step)
        self.is_calibrating = True
        try:
            yield
            # A file has no steps: its masks are those with which the schedule ends.
            self._update_gathered_masks(
                self._schedule.final_update if self._calibrates_file else self._gathered_update
            )
        except BaseException:
            # Data of half a calibration would count in the next one.
            for weight in self._tool.weights:
                weight.release_gathered()
            raise
        finally:
            self.is_calibrating = self._calibrates_file = False
            # Steps has counted the calls of the calibration, which are not steps of a training.
            self.set_next_step(self.next_step)

    def end_step(self, number: int) -> None:
        """End the step, updating masks that are due; the step `number` after the first one begins.

        Within `calibrating` nothing ends.
        """
        # Calls of a calibration are not steps of the training.
        if self.is_calibrating:
            return
        self._update_gathered_masks(self._gathered_update)
        self.step = self._first_step + number

    def update_if_due(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Update the mask of a weight that an op reads, or gather data for the update, if either is due.

        Also notes that the step reads a weight, and so counts.  Raises PruneError as
        `_check_first_masks_have_data`.
        """
        # A step counts once a weight is read in it: steps of a model that runs nothing are not steps of the
        # schedule.
        if not self.is_calibrating:
            self.next_step = self.step + 1
        if self._options.uses_gradients:
            # `on_gradient` receives the gradient alone, which is multiplied by this value.
            weight.value = weight.plain(present())
        # At the op and not at the end of the step, so that step 0 computes with masks already and no weight's
        # magnitudes are kept.
        if self._can_update_now(weight):
            update_step = self._schedule.last_update(self.step)
            if update_step is not None and weight.is_older_than(update_step):
                self._gather_values(weight, present)
                self._update_masks([weight], update_step)
        # Once in a step: a weight that several ops read has one value.
        elif weight.magnitudes is None and self.is_gathering(weight):
            self._check_first_masks_have_data()
            self._gather_values(weight, present)

    def is_gathering(self, weight: PrunedWeight) -> bool:
        """Return True if the end of this step updates the mask of the weight."""
        return weight.is_older_than(self._gathered_update)

    def gather_for_file(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Gather data for the final mask of a weight in a file, unless it has one; `prepare` sets the mask.

        Raises PruneError for an importance that is computed while a model runs.
        """
        if not weight.is_ready:
            if self._options.uses_gradients or self._options.uses_inputs:
                raise PruneError(
                    f"importance={self._options.importance!r} is computed while a model runs, not of a file: "
                    "prune the running model, and give tool.load_state_dict its state to write its masks"
                )
            # The end of `calibrating` makes the masks of a file by the end of the schedule.
            self._calibrates_file = self.is_calibrating
            if weight.magnitudes is None:
                weight.gather_magnitudes(present())

    def _gather_values(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Gather the magnitudes of a weight as ops read it, masked unless dropped elements rank again.

        Elements that come back are zeroed before.  SparseGPT gets a copy of the value too.
        """
        value = present()
        if weight.is_ready and not self._options.ranks_dropped:
            weight.zero_regrown(present)
            # As ops read the weight, so that offsets of regrown elements count.
            value = weight.transformed(self._tool, value)
        weight.gather_magnitudes(value)
        if self._options.importance == "sparsegpt":
            # A copy: SparseGPT runs after the step, in which an optimizer may write.
            weight.value = weight.plain(value) * 1

    def _check_first_masks_have_data(self) -> None:
        """Raise PruneError if the first masks are due at step 0, and nothing was gathered for them."""
        is_first = self._schedule.begin == self.step == 0 and not self.is_calibrating
        if not is_first or any(weight.is_ready for weight in self._tool.weights):
            return
        importance = self._options.importance
        if self._options.uses_gradients or self._options.uses_inputs:
            raise PruneError(
                f"importance={importance!r} is computed of {DATA_AND_REMEDY[importance]}, "
                "or give begin=1: step 0 is dense then"
            )
        raise PruneError(
            'scope="global" ranks all weights of the model, and the first masks are due before all weights '
            "have been read: call tool.prepare(model, example), or give begin=1: step 0 is dense then"
        )

    def _can_update_now(self, weight: PrunedWeight) -> bool:
        """Return True if the mask is computed from the weight's value alone, so that no step has to end."""
        return self._options.uses_weight_alone and not (
            self._options.regrow == "gradient" and weight.is_ready
        )

    @property
    def _gathered_update(self) -> int | None:
        """The last update of the schedule up to the step for which data are gathered; None before the first.

        A calibration gathers for the current step, a step for the next one.
        """
        # The data of a step are complete when it ends, which is when the next one begins.
        return self._schedule.last_update(self.step if self.is_calibrating else self.step + 1)

    def _update_gathered_masks(self, update_step: int | None) -> None:
        """Update the masks whose data the step has gathered, and release the data.

        A weight without data keeps its mask; `weights.reasons` tells why.
        update_step: the step of the schedule that the masks are of; None to change no mask.
        Raises PruneError where a calibration has data for none.
        """
        gathered_weights = [weight for weight in self._tool.weights if weight.magnitudes is not None]
        due_weights = [weight for weight in gathered_weights if not self._lacks_data(weight)]
        importance = self._options.importance
        # In a training a step without finite gradients is normal, and masks wait for the next; a calibration
        # has no next step.
        if self.is_calibrating and gathered_weights and not due_weights:
            raise PruneError(
                f"importance={importance!r} is computed of {DATA_AND_REMEDY[importance]}; none was finite"
            )
        reason = "none of its inputs was read" if self._options.uses_inputs else "it had no finite gradient"
        for weight in gathered_weights:
            place = f"{weight.type} of {weight.name}"
            if weight in due_weights:
                self._tool.weights.reasons.pop(place, None)
            else:
                self._tool.weights.reasons[place] = reason
        if update_step is not None and due_weights:
            # A weight without data stays out of a global budget instead of blocking it.
            budgets = [due_weights] if self._options.is_global else [[weight] for weight in due_weights]
            for weights in budgets:
                self._update_masks(weights, update_step)
        for weight in self._tool.weights:
            weight.release_gathered()

    def _lacks_data(self, weight: PrunedWeight) -> bool:
        """Return True if the step has gathered no finite gradient, or no input, that the mask needs."""
        # Before its first mask a weight has nothing dropped that could grow again.
        regrows = self._options.regrow == "gradient" and weight.is_ready
        return (
            (regrows and weight.gradient is None)
            or (self._options.uses_gradients and weight.weight_times_gradient is None)
            or (self._options.uses_inputs and weight.inputs is None)
        )

    def _update_masks(self, weights: Sequence[PrunedWeight], update_step: int) -> None:
        """Update the masks of weights that share a budget; unless they regrow, dropped elements stay so.

        Raises PruneError for inputs, and with SparseGPT for values, that are not finite.
        """
        options, sparsity = self._options, self._schedule.sparsity_at(update_step)
        for weight in weights:
            weight.check_inputs()  # before any mask is set, so that an error leaves all masks of one step
        if options.importance == "sparsegpt":
            for weight in weights:
                self._prune_by_sparsegpt(weight, sparsity, update_step)
            return
        importances = [self._importances(weight, update_step) for weight in weights]
        # The first masks have nothing to exchange.
        if options.exchanges and all(weight.is_ready for weight in weights):
            growth_scores = [self._growth_scores(weight, update_step) for weight in weights]
            fraction = self._schedule.exchanged_share(update_step, options.fraction)
            keep_masks = regrown_keep_masks(importances, growth_scores, sparsity, fraction)
        else:
            keep_masks = options.keep_masks(importances, sparsity)
        for weight, keep_mask in zip(weights, keep_masks, strict=True):
            if options.regrow is None and weight.is_ready:
                # Dropped elements rank lowest, but where sparsity falls some would return.
                keep_mask = keep_mask & weight.keep_mask_like(keep_mask)
            weight.set_mask(keep_mask, update_step)

    def _importances(self, weight: PrunedWeight, update_step: int) -> Array:
        """Return the importance of a weight's elements, the lowest of which are dropped.

        Before the first mask of a weight its permutation is chosen too, if it has one.
        """
        options = self._options
        importances = element_importances(weight, options.importance, options.seed, update_step)
        if options.pattern.n_m and weight.permutation is not None and not weight.is_ready:
            importances = weight.choose_permutation(importances, *options.pattern.n_m)
        return importances if options.ranks_dropped else weight.without_dropped(importances)

    def _prune_by_sparsegpt(self, weight: PrunedWeight, sparsity: float, update_step: int) -> None:
        """Set the mask of SparseGPT, and as offset the kept elements' change; PruneError for NaN and Inf."""
        value = weight.ordered(weight.value)
        if not is_finite(value):
            raise PruneError(f"NaN or Inf in {weight.name}: importance='sparsegpt' is of finite numbers")
        keep_mask, new_value = sparsegpt(value, weight.inputs, sparsity, self._options.pattern.n_m)
        # The change is an offset, so that the parameter itself stays as it is until `finalize`.
        weight["offset"] = weight.restored((value - weight.like(new_value, value)) * keep_mask)
        weight.set_mask(keep_mask, update_step)

    def _growth_scores(self, weight: PrunedWeight, update_step: int) -> Array:
        """Return scores by which dropped elements come back: magnitudes of gradients, or random numbers."""
        if self._options.regrow == "gradient":
            return abs(weight.gradient)
        return random_scores(weight, [self._options.seed, weight.number, update_step])
