"""PruneTool and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import amanda
from amanda.options import Name, NonNegativeInt, PositiveInt, Seed, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._importance import Importance, sum_of_products, sum_of_squares, why_inputs_unread
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._options import PruneOptions, PruneSchedule, Regrow, ScheduleKind, Scope, pattern_of
from amanda.tools.prune._semi_structured import SemiStructured
from amanda.tools.prune._weight import MaskUpdater, PrunedWeight
from amanda.tools.results import Column
from amanda.tools.select import Globs
from amanda.tools.steps import Steps
from amanda.tools.weights import WeightResult, WeightTool, WeightView, weight_input


class PruneResult(WeightResult):
    """The pruned weights, and the share of each that is dropped.

    zeros: number of dropped elements of pruned weights.  importance: the option of PruneTool.
    dense: weights that `finalize(model, semi_structured=True)` left dense, by path, and the reasons.
    """

    name: ClassVar[str] = "prune"
    title = "Pruned weights"
    state: ClassVar[tuple[str, str]] = ("masks", "/mask")
    columns: ClassVar[Sequence[Column]] = (
        *WeightResult.columns, Column("zeros", show="{:,}".format, total=True),
        Column("sparsity", show="{:.4f}".format, number=True, unit="share"), Column("pattern"),
    )  # fmt: skip

    def __init__(self, tool: PruneTool) -> None:
        self._pattern, self.importance = tool.pattern, tool.importance
        super().__init__(tool)
        self.dense: dict[str, str] = {}
        self.zeros: int = sum(weight.zeros for weight in tool.weights)

    def row(self, weight: Any) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        zeros = weight.zeros
        return *super().row(weight), zeros, zeros / max(weight.size, 1), self._pattern

    @property
    def sparsity(self) -> float:
        """The dropped share of the elements of pruned weights."""
        return self.zeros / max(self.elements, 1)

    @property
    def share(self) -> float:
        """The dropped share of all selected elements, those of skipped weights included."""
        return self.zeros / max(self.elements + self.elements_left, 1)

    def facts(self) -> Mapping[str, Any]:
        """Return totals, and the skipped weights with the reasons."""
        return {
            **super().facts(),
            "zeros": self.zeros,
            "sparsity": self.sparsity,
            "share": self.share,
            "importance": self.importance,
        }

    def notes(self) -> Sequence[str]:
        """Return sentences on totals, and on weights that were skipped."""
        notes = [f"{self.counted}, sparsity {self.sparsity:.4f}."]
        if self.elements_left:
            notes.insert(
                0,
                f"{self.share:.4f} of the {self.elements + self.elements_left:,} elements that were selected "
                f"are zero: {self.elements_left:,} are left as they are.",
            )
        notes += [f"{path} stays dense: {why}." for path, why in self.dense.items()]
        return notes + self.notes_on_skipped()


class PruneTool(WeightTool[PrunedWeight]):
    """Prune weights of convolutions and linear layers by masks; `finalize(model)` makes the zeros permanent.

    sparsity: the dropped share of each weight (scope "local"), or of all weights together ("global").
    pattern: "unstructured"; "2:4" or another n:m, which keeps n of each m consecutive input channels whatever
        the sparsity; "block"; "tile"; "structured", whole output filters by their norm.
    importance: "magnitude"; "gradient", |w * g|; "movement", the sum of -w * g over steps; "wanda", |w| times
        the norm of the input, ranked for each output; "sparsegpt", which also changes the kept elements;
        "random".
    schedule: "constant", or "linear" or "cubic" from `initial_sparsity` at step `begin` to `sparsity` at
        step `end`.
    begin, end, frequency: masks are updated at step `begin`, at each `frequency`th step after it, and at
        `end`; with a constant schedule and no frequency at `begin` alone.  A step is a call of the model,
        unless the program calls `step()`.
    regrow: how dropped elements come back when masks are updated.  None: never.  "importance": all elements
        are ranked again.  "gradient" (RigL), "random" (SET): the share `regrow_fraction` of the kept
        elements is exchanged for dropped ones.
    type, module, exclude: globs of types of ops and of module paths; None for every convolution and product.
    norm: of filters and blocks, 1 or 2.  block: outputs and inputs of a block.  granularity: columns of a
        tile.  permute: search the order of input channels in which n:m keeps most.  mask_gradients: also mask
        the gradients of weights.  seed: of importance and regrow "random".

    Raises PruneError for options that contradict each other.
    """

    elementwise = True
    calibrates_when_prepared = True
    error = PruneError
    weight_type = PrunedWeight

    @checked(error=PruneError)
    def __init__(
        self,
        sparsity: Share = 0.5,
        pattern: Name = "unstructured",
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
            PruneSchedule(sparsity, schedule, initial_sparsity, begin, end, frequency),
            pattern_of(pattern, granularity, norm, block), scope, importance, regrow, regrow_fraction,
            permute, mask_gradients, seed,
        )  # fmt: skip
        self.pattern, self.importance = pattern, importance
        self.wants_gradients = regrow == "gradient" or self._options.uses_gradients
        if self.wants_gradients or self._options.uses_inputs:
            self.leaves_rows = "gradients and inputs are not followed to rows that an index selects"
        super().__init__(type, module, exclude)
        if self._options.uses_inputs:
            self.add_inst_for_op(self._insert_gather_inputs)
        self._mask_updater = MaskUpdater(self._options, self)
        self._steps = Steps()
        self._steps.on_step(self._mask_updater.end_step)
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
        """Return a context whose calls of the model gather data for the first masks, and are no steps.

        Use it inside of a scope: `with amanda.apply(tool), tool.calibrating(): ...`.  `prepare` opens it.
        """
        try:
            with self._mask_updater.calibrating():
                yield
        finally:
            self._steps.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return masks and offsets of weights as "path of the weight/mask", and the next step as "step"."""
        return {**super().state_dict(), "step": self._mask_updater.next_step}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` returned, also in another process; steps continue from there."""
        weight_state = dict(state)
        self._mask_updater.set_next_step(int(weight_state.pop("step", 0)))
        super().load_state_dict(weight_state, strict)
        self._steps.clear()

    @property
    def transforms_gradients(self) -> bool:
        """True if the gradients of weights are masked."""
        return self._options.mask_gradients

    @property
    def is_settled(self) -> bool:
        """True if no mask changes any more once it is set."""
        options = self._options
        return not (self._mask_updater.is_calibrating or options.schedule.repeats or options.exchanges)

    def on_weight(self, weight: PrunedWeight) -> str | None:
        """Add the state of a weight; return why it cannot be pruned, or None."""
        options = self._options
        reason = options.pattern.why_unsupported(weight.canonical_shape, weight.layout is not None)
        if reason is None and options.uses_inputs:
            reason = why_inputs_unread(weight.type, weight.layout)
        if reason is None:
            weight.keep_elements("mask", True, "bool")
            dtype = "float64" if weight.dtype == "float64" else "float32"
            if options.exchanges or options.importance == "sparsegpt":
                weight.keep_elements("offset", 0, dtype)
            if options.importance == "movement":
                weight.keep_elements("movement", 0, dtype)
            if options.permute:
                weight.keep("permutation", np.arange(weight.canonical_shape[1]))
        return reason

    def on_read(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Update the mask if that is due, or gather data for the update."""
        if weight.is_loaded:
            weight.reset_offset_if_finalized(present)
        self._mask_updater.update_if_due(weight, present)
        weight.zero_regrown(present)

    def on_file(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Gather data for the mask of a weight in a file."""
        if weight.is_loaded:
            weight.reset_offset_if_finalized(present)
        self._mask_updater.gather_for_file(weight, present)

    def on_gradient(self, weight: PrunedWeight, gradient: Any) -> None:
        """Gather the gradient, where importance or regrowth needs it."""
        if self._options.regrow == "gradient":
            weight.gather_gradient(gradient)
        if self._options.uses_gradients:
            weight.gather_product(gradient)

    def _insert_gather_inputs(self, context: amanda.OpContext) -> None:
        """Insert a routine that gathers the inputs which an op multiplies by its weight."""
        read = weight_input(context) if context["phase"] == "forward" else None
        if read is None or context.is_static():
            return
        data = read.multiplied_input(context)
        if data is not None and self._key in context:
            form = context[self._key]
            context.insert_before_op(
                self._gather_inputs, inputs=[data.position], form=form, rows_of=data.rows
            )

    @amanda.observer
    def _gather_inputs(
        self, value: Any, form: WeightView | None, rows_of: Callable[..., Any], run: dict[str, Any]
    ) -> None:
        weight = run.get(self._key, form)
        if isinstance(weight, PrunedWeight) and self._mask_updater.is_gathering(weight):
            rows = rows_of(value, weight.canonical_shape)
            weight.gather_inputs(
                sum_of_squares(rows) if self._options.importance == "wanda" else sum_of_products(rows)
            )

    @amanda.traceable
    def transform(self, value: Any, mask: Any, offset: Any = None) -> Any:
        """Return the weight minus the offset, with 0 where it is dropped."""
        return value * mask if offset is None else (value - offset) * mask

    def transform_gradient(self, gradient: Any, mask: Any, offset: Any = None) -> Any:
        """Return the gradient with 0 where the weight is dropped."""
        return gradient * mask

    @checked(error=PruneError)
    def finalize(self, model: Any, semi_structured: bool = False) -> Any:
        """Write the masks into the weights of a model, which then computes the same without the tool.

        semi_structured: also compress weights that are pruned 2:4 by torch.sparse.to_sparse_semi_structured,
        for inference on GPUs; `result.dense` lists the weights that stay dense.
        Returns `result`, see `WeightTool.finalize`.  Raises PruneError as that method does, and where no
        weight can be compressed; without a GPU before any weight is changed.
        """
        if not semi_structured:
            return super().finalize(model)
        if self.pattern != "2:4" or self._options.permute:
            with_order = " with permute=True" if self._options.permute else ""
            raise PruneError(f"semi_structured=True is for pattern 2:4, not {self.pattern}{with_order}")
        semi_structured_layers = SemiStructured(model, self.weights)
        result = super().finalize(model)
        semi_structured_layers.compress()
        result.dense = semi_structured_layers.dense
        return result

    def on_finalized(self, weight: PrunedWeight) -> None:
        """Set the offset of a weight to 0: `finalize` has subtracted it."""
        if weight.offset is not None:
            weight["offset"] = 0
