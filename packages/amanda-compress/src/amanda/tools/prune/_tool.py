"""PruneTool: its options, the schedule of its masks, and the routines of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi
from typing import Any, Literal

import amanda
from amanda.options import NonNegativeInt, PositiveInt, Seed, Share, checked
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._importance import (
    OF_GRADIENTS,
    OF_INPUTS,
    Importance,
    sum_of_products,
    sum_of_squares,
    why_inputs_unread,
)
from amanda.tools.prune._masks import Array, Pattern, PatternName, PruneError, pattern_of, row_keep_masks
from amanda.tools.prune._result import PruneResult, SemiStructured
from amanda.tools.prune._weight import MaskUpdater, PrunedWeight
from amanda.tools.select import Globs
from amanda.tools.steps import Steps
from amanda.tools.weights import WeightTool, WeightView, weight_input

ScheduleKind = Literal["constant", "linear", "cubic"]


@checked(error=PruneError)
def cubic_sparsity(
    step: NonNegativeInt, begin: NonNegativeInt, end: NonNegativeInt, initial: Share, final: Share
) -> float:
    """Return the sparsity at a step between begin and end, which rises fast at first and then slower.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", eq. 1.

    Args:
        step: Number of the step; before `begin` and after `end` the sparsity is that of these.
        begin: Step with the initial sparsity.
        end: Step with the final sparsity.
        initial: Sparsity at `begin`.
        final: Sparsity at `end`.

    Raises:
        PruneError: For an end that does not come after `begin`.
    """
    # The cube drops most while the network has most redundancy, and little at the end.
    share_left = 1 - _progress(step, begin, end)
    return final + (initial - final) * share_left**3


@checked(error=PruneError)
def linear_sparsity(
    step: NonNegativeInt, begin: NonNegativeInt, end: NonNegativeInt, initial: Share, final: Share
) -> float:
    """Return the sparsity at a step between begin and end, which rises by the same amount at each step.

    Args:
        step: As in `cubic_sparsity`.
        begin: As in `cubic_sparsity`.
        end: As in `cubic_sparsity`.
        initial: As in `cubic_sparsity`.
        final: As in `cubic_sparsity`.

    Raises:
        PruneError: For an end that does not come after `begin`.
    """
    return initial + (final - initial) * _progress(step, begin, end)


def _progress(step: int, begin: int, end: int) -> float:
    """Return the share, in [0, 1], of the steps that have passed; raise PruneError unless begin < end."""
    if end <= begin:
        raise PruneError(f"end is {end}, begin {begin}: the end comes after the beginning")
    return min(max((step - begin) / (end - begin), 0.0), 1.0)


@checked(error=PruneError)
@dataclass(frozen=True)
class PruneSchedule:
    """The steps at which masks are updated: `begin`, then each `frequency`th, and `end`.

    Args:
        sparsity: The dropped share, from `end` on.
        kind: "constant", or "linear" or "cubic" from `initial` at begin to `sparsity` at end.
        initial: The dropped share at `begin`, unless "constant".
        begin: Step of the first update.
        end: Step of the last update; None for one update at begin, or for updates without end where a
            frequency is set.
        frequency: Steps from one update to the next; None for 1, or with "constant" for one update.

    Raises:
        PruneError: For options that contradict each other.
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
        # One update at `begin`, whichever step is asked for: a model that is first called at step 10 gets the
        # mask too.
        if not self.repeats:
            return self.begin
        if self.end is not None and step >= self.end:
            return self.end
        interval = self.frequency or 1  # a schedule with an end and no frequency updates at each step
        # The last update that was due, also if the program missed that step: weights of conditional branches
        # are not read at each.
        return step - (step - self.begin) % interval

    @property
    def final_update(self) -> int:
        """Return the step whose masks stay, or the first update of a schedule without an end."""
        step = self.last_update(self.begin if self.end is None else self.end)
        return self.begin if step is None else step

    @cached_property
    def repeats(self) -> bool:
        """True if masks are updated more than once."""
        return self.kind != "constant" or self.frequency is not None

    def sparsity_at(self, step: int) -> float:
        """Return the sparsity of masks that are updated at a step."""
        if self.kind == "constant" or self.end is None:
            return self.sparsity
        rising_sparsity = cubic_sparsity if self.kind == "cubic" else linear_sparsity
        return rising_sparsity(step, self.begin, self.end, self.initial, self.sparsity)

    def exchanged_share(self, step: int, fraction: float) -> float:
        """Return the share of kept elements that is exchanged at a step: `fraction`, annealed to 0 at `end`.

        Source: Evci et al. 2020, "Rigging the lottery" (RigL), eq. 1.
        """
        if self.end is None:
            return fraction
        progress = min(step / self.end, 1.0)  # after `end` the cosine would rise again
        return fraction / 2 * (1 + cos(pi * progress))


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
        # Raised when the tool is made: a training of days would otherwise find them at its first update.
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
        """Raise PruneError for options that do not go with SparseGPT."""
        if not (self.pattern.is_elementwise or is_n_m):
            raise PruneError(f"importance sparsegpt drops elements or n:m, not {self.pattern.name}")
        if self.is_global or self.schedule.repeats or self.permute:
            raise PruneError(
                "importance sparsegpt makes each mask once, as it changes the weight: it has no global "
                "budget, no other schedule than the constant one, no frequency and no permute"
            )

    def keep_masks(self, scores: Sequence[Array], sparsity: float) -> list[Array]:
        """Return keep masks of weights with one budget; local Wanda of elements has one for each output."""
        # Scores of different outputs have different scales under Wanda, so that a rank over a whole weight
        # means little.
        if self.importance == "wanda" and self.pattern.is_elementwise and not self.is_global:
            return row_keep_masks(scores, sparsity)
        return self.pattern.keep_masks(scores, sparsity)

    @cached_property
    def uses_gradients(self) -> bool:
        """True if the importance is computed of gradients."""
        return self.importance in OF_GRADIENTS

    @cached_property
    def uses_inputs(self) -> bool:
        """True if the importance is computed of the inputs of ops."""
        return self.importance in OF_INPUTS

    @cached_property
    def uses_weight_alone(self) -> bool:
        """True if a mask is computed from the weight's own values alone."""
        return not (self.is_global or self.uses_gradients or self.uses_inputs)

    @cached_property
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


class PruneTool(WeightTool[PrunedWeight]):
    """Prune convolutions and linear layers by masks; `finalize(model)` writes the zeros into the weights.

    Args:
        sparsity: The dropped share of each weight (scope "local"), or of all weights together ("global").
        pattern: "unstructured"; "2:4" or another n:m, which keeps n of each m consecutive input channels
            whatever the sparsity; "block"; "tile"; "structured", whole output filters by their norm.
        scope: "local" ranks the elements of each weight by themselves, "global" those of all weights
            together.
        importance: "magnitude"; "gradient", |w * g|; "movement", the sum of -w * g over steps; "wanda", |w|
            times the norm of the input, ranked for each output; "sparsegpt", which also changes the kept
            elements; "random".
        schedule: "constant", or "linear" or "cubic" from `initial_sparsity` at step `begin` to `sparsity` at
            step `end`.
        begin: Masks are updated at step `begin`, at each `frequency`th step after it, and at `end`; with a
            constant schedule and no frequency at `begin` alone.  A step is a call of the model, unless the
            program calls `step()`.
        end: See `begin`.
        frequency: See `begin`.
        initial_sparsity: Sparsity at step `begin` of a schedule that rises.
        regrow: How dropped elements come back when masks are updated.  None: never.  "importance": all
            elements are ranked again.  "gradient" (RigL), "random" (SET): the share `regrow_fraction` of the
            kept elements is exchanged for dropped ones.
        regrow_fraction: Share of the kept elements that an update exchanges.
        type: Globs of types of ops and of module paths; None for every convolution and product.
        module: See `type`.
        exclude: See `type`.
        norm: Of filters and blocks, 1 or 2.
        block: Outputs and inputs of a block.
        granularity: Columns of a tile.
        permute: Search the order of input channels in which n:m keeps most.
        mask_gradients: Also mask the gradients of weights.
        seed: Of importance and regrow "random".

    Raises:
        PruneError: For options that contradict each other.
    """

    purpose = "compress"
    elementwise = True
    calibrates_when_prepared = True
    error = PruneError
    weight_type = PrunedWeight

    @checked(error=PruneError)
    def __init__(
        self,
        sparsity: Share = 0.5,
        pattern: PatternName = "unstructured",
        scope: Scope = "local",
        importance: Importance = "magnitude",
        schedule: ScheduleKind = "constant",
        begin: NonNegativeInt = 0,
        end: NonNegativeInt | None = None,
        frequency: PositiveInt | None = None,
        initial_sparsity: Share = 0.0,
        regrow: Regrow | None = None,
        regrow_fraction: Share = 0.3,
        type: Globs = None,
        module: Globs = None,
        exclude: Globs = None,
        norm: Literal[1, 2] = 2,
        block: tuple[PositiveInt, PositiveInt] = (4, 4),
        granularity: PositiveInt = 128,
        permute: bool = False,
        mask_gradients: bool = True,
        seed: Seed = 0,
    ) -> None:
        self._options = PruneOptions(
            schedule=PruneSchedule(sparsity, schedule, initial_sparsity, begin, end, frequency),
            pattern=pattern_of(pattern, granularity, norm, block), scope=scope, importance=importance,
            regrow=regrow, fraction=regrow_fraction, permute=permute, mask_gradients=mask_gradients,
            seed=seed,
        )  # fmt: skip
        self.pattern, self.importance = pattern, importance
        # Before `super().__init__`, which inserts routines into the backward pass if this is true.
        self.wants_gradients = regrow == "gradient" or self._options.uses_gradients
        if self.wants_gradients or self._options.uses_inputs:
            self.leaves_rows = "gradients and inputs are not followed to rows that an index selects"
            self.leaves_samples = "gradients and inputs are not followed to the samples of a vmap"
        super().__init__(type, module, exclude)
        if self._options.uses_inputs:
            # After the base class's routine: inputs are read for weights that it has just met.
            self.add_inst_for_op(self._insert_gather_inputs)
        self._steps = Steps()
        self._mask_updater = MaskUpdater(self._options, self, self._steps)
        # A mask of the weight alone needs no steps, and no tool has to count them.
        if self._options.needs_steps:
            self.depends_on(self._steps)

    @property
    def result(self) -> PruneResult:
        """The weights that ops have read, and how many elements of each are dropped."""
        return PruneResult(self)

    @property
    def needs_preparation(self) -> bool:
        """True if the first masks need inputs, gradients or other weights, which `calibrating` gathers."""
        return not self._options.uses_weight_alone

    def step(self) -> None:
        """Begin a step; from now on calls of the model begin none."""
        self._steps.step()

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Return a context whose calls of the model gather data for the first masks, and are not steps.

        Use it inside of a scope: `with amanda.apply(tool), tool.calibrating(): ...`.  `prepare` opens it.
        Its end makes the masks; the next call is the step that it would have been without the calibration.
        """
        with self._mask_updater.calibrating():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return masks and other state as "path of the weight/mask", and the next step as "step"."""
        return {**super().state_dict(), "step": self._mask_updater.next_step}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` returned, also in another process; steps continue from there."""
        # A copy: `pop` must not change the caller's dict, which may be saved again.
        weight_state = {**state}
        next_step = int(weight_state.pop("step", 0))
        super().load_state_dict(weight_state, strict)
        self._mask_updater.set_next_step(next_step)

    @property
    def transforms_gradients(self) -> bool:
        """True if the gradients of weights are masked."""
        return self._options.mask_gradients

    @property
    def is_settled(self) -> bool:
        """True if no mask changes any more once it is set."""
        options = self._options
        # Otherwise a compiler would make a constant of a mask that the next update replaces.
        return not (self._mask_updater.is_calibrating or options.schedule.repeats or options.exchanges)

    def on_weight(self, weight: PrunedWeight) -> str | None:
        """Add the state of a weight; return why it cannot be pruned, or None."""
        options = self._options
        reason = options.pattern.why_unsupported(weight.canonical_shape, weight.layout is not None)
        if reason is None and options.uses_inputs:
            reason = why_inputs_unread(weight.type, weight.layout)
        if reason is None:
            weight.keep_elements("mask", True, "bool")
            # Offsets and sums in half precision would lose small steps.
            dtype = "float64" if weight.dtype == "float64" else "float32"
            if options.exchanges or options.importance == "sparsegpt":
                weight.keep_elements("offset", 0, dtype)
            if options.importance == "movement":
                weight.keep_elements("movement", 0, dtype)
            if options.permute:
                weight.keep("permutation", np.arange(weight.canonical_shape[1]))
        return reason

    def on_read(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Update the mask or gather data for it, if due; make elements 0 that have come back."""
        # Once after a load: whether `finalize` was called before saving is seen from the values.
        if weight.is_loaded:
            weight.reset_offset_if_finalized(present)
        self._mask_updater.update_if_due(weight, present)
        # At each read, as elements come back at the end of the step before, without the value at hand.
        weight.zero_regrown(present)

    def on_file(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Gather data for the mask of a weight in a file, unless it has one."""
        if weight.is_loaded:
            weight.reset_offset_if_finalized(present)
        self._mask_updater.gather_for_file(weight, present)

    def on_gradient(self, weight: PrunedWeight, gradient: Any) -> None:
        """Gather the gradient, where importance or regrowth needs it."""
        if self._options.regrow == "gradient":
            weight.gather_gradient(gradient)
        if self._options.uses_gradients:
            weight.gather_weight_times_gradient(gradient)

    def _insert_gather_inputs(self, context: amanda.OpContext) -> None:
        """Insert a routine that gathers the inputs of a weight; none in files and where none are followed."""
        read = weight_input(context) if context["phase"] == "forward" else None
        if read is None or context.is_static():
            return
        multiplied = read.multiplied_input(context)
        if multiplied is not None and self._view_key in context:
            view = context[self._view_key]
            context.insert_before_op(
                self._gather_inputs, inputs=[multiplied.position], view=view, make_rows=multiplied.rows
            )

    @amanda.observer
    def _gather_inputs(
        self, value: Any, view: WeightView | None, make_rows: Callable[..., Any], run: dict[str, Any]
    ) -> None:
        """Add inputs, as rows of `MultipliedInput`, to the weight's sums; of a vmap sample by sample."""
        # An op in a loop may read another weight at each execution, which the forward routine has noted.
        weight = run.get(self._view_key, view)
        if not isinstance(weight, PrunedWeight) or not self._mask_updater.is_gathering(weight):
            return
        samples = tensors_of(value).samples(value)
        if samples is None:
            self._gather_rows(weight, make_rows(value, weight.canonical_shape))
            return
        with samples.outside():
            for sample_index in np.ndindex(samples.sizes):
                self._gather_rows(weight, make_rows(samples.data[sample_index], weight.canonical_shape))

    def _gather_rows(self, weight: PrunedWeight, rows: Any) -> None:
        weight.gather_inputs(
            sum_of_squares(rows) if self._options.importance == "wanda" else sum_of_products(rows)
        )

    @amanda.traceable
    def transform(self, value: Any, mask: Any, offset: Any = None) -> Any:
        """Return the weight minus the offset, with 0 where it is dropped.

        Args:
            value: The weight as the op reads it.
            mask: Of the weight's shape, 0 where it is dropped.
            offset: Change of the kept elements by importance "sparsegpt"; None without one.
        """
        return value * mask if offset is None else (value - offset) * mask

    def transform_gradient(self, gradient: Any, mask: Any, offset: Any = None) -> Any:
        """Return the gradient with 0 where the weight is dropped.

        Args:
            gradient: Gradient of the masked weight.
            mask: As in `transform`.
            offset: As in `transform`.
        """
        return gradient * mask

    @checked(error=PruneError)
    def finalize(self, model: Any, semi_structured: bool = False) -> Any:
        """Write the masks into the weights of a model, which then computes the same without the tool.

        Args:
            model: As in `WeightTool.finalize`.
            semi_structured: Also compress weights that are pruned 2:4 by
                torch.sparse.to_sparse_semi_structured, for inference on GPUs; `result.dense` lists the
                weights that stay dense.

        Returns:
            `result`, see `WeightTool.finalize`.

        Raises:
            PruneError: As that method does, and where no weight can be compressed; without a GPU before any
                weight is changed.
        """
        if not semi_structured:
            return super().finalize(model)
        if self.pattern != "2:4" or self._options.permute:
            with_order = " with permute=True" if self._options.permute else ""
            raise PruneError(f"semi_structured=True is for pattern 2:4, not {self.pattern}{with_order}")
        # Made first: it raises where nothing can be compressed, before a weight has changed.
        semi_structured_layers = SemiStructured(model, self.weights)
        result = super().finalize(model)
        semi_structured_layers.compress()
        result.dense = semi_structured_layers.dense
        return result

    def on_finalized(self, weight: PrunedWeight) -> None:
        """Set the offset of a weight to 0: `finalize` has subtracted it."""
        if weight.offset is not None:
            weight["offset"] = 0
