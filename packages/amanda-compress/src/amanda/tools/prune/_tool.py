"""The tool: weights are masked before each op that reads them, and their gradients behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import amanda
from amanda.options import Name, NonNegativeInt, PositiveInt, Seed, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._importance import Importance
from amanda.tools.prune._inputs import products, squares, unread
from amanda.tools.prune._making import Making
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._options import Budget, Options, Regrow
from amanda.tools.prune._patterns import pattern_of
from amanda.tools.prune._result import PruneResult
from amanda.tools.prune._schedule import Kind, Schedule
from amanda.tools.prune._semi_structured import SemiStructured
from amanda.tools.prune._weight import PrunedWeight
from amanda.tools.select import Globs
from amanda.tools.steps import Steps
from amanda.tools.weights import WeightTool, WeightView, weight_input


class PruneTool(WeightTool[PrunedWeight]):
    """Prunes the weights of convolutions and products; `result` tells which, `finalize` writes it into them.

    sparsity: the share that is dropped, of each weight (scope "local") or of all together ("global").
    pattern: "unstructured"; "2:4" and its like, of consecutive input channels, whatever the sparsity;
        "block"; "tile"; "structured", output filters by their norm.
    importance: "magnitude"; "gradient", |w * g|; "movement", the sum of -w * g over steps; "wanda", by the
        norms of inputs, each output for itself; "sparsegpt", which changes what it keeps; "random".
    schedule: "constant", or "linear" or "cubic" from `initial_sparsity` at step `begin` to `sparsity` at
        step `end`.
    begin, end, frequency: masks are made at step begin, each `frequency`th after it, and end; with a constant
        schedule and no frequency at begin alone.  A step is a call of the model, or what `step()` says.
    regrow: whether what is dropped may come back when masks are made again: "importance" ranks all anew,
        "gradient" (RigL) and "random" (SET) exchange the share `regrow_fraction` of what is kept.
    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.
    norm: of filters and blocks, 1 or 2.  block: outputs and inputs of a block.  granularity: columns of a
        tile.  permute: look for the order of the input channels in which n:m keeps most.  mask_gradients:
        also mask weights' gradients.  seed: of "random".

    Raises PruneError for options that do not go together.
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
        scope: Budget = "local",
        importance: Importance = "magnitude",
        schedule: Kind = "constant",
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
        steps = Schedule(sparsity, schedule, initial_sparsity, begin, end, frequency)
        self._options = Options(
            steps, pattern_of(pattern, granularity, norm, block), scope, importance, regrow, regrow_fraction,
            permute, mask_gradients, seed,
        )  # fmt: skip
        self.pattern, self.importance = pattern, importance
        self.wants_gradients = regrow == "gradient" or self._options.of_gradients
        if self.wants_gradients or self._options.of_inputs:
            self.leaves_rows = "gradients and inputs are not followed to rows that an index selects"
        super().__init__(type, module, exclude)
        if self._options.of_inputs:
            self.add_inst_for_op(self._note_inputs)
        self._making = Making(self._options, self)
        self._steps = Steps()
        self._steps.on_step(self._making.turn)
        if self._options.needs_steps:
            self.depends_on(self._steps)

    @property
    def result(self) -> PruneResult:
        """The weights that were met, and how many elements of each are dropped."""
        return PruneResult(self)

    @property
    def needs_preparation(self) -> bool:
        """True if the first masks are made of what `calibrating` gathers, not of each weight alone."""
        return not self._options.of_weight_alone

    def step(self) -> None:
        """Begin a step here, and at no call of a model any more."""
        self._steps.step()

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Return a context whose executions gather what the first masks are made of, and are no steps.

        Use it inside of a scope: `with amanda.apply(tool), tool.calibrating(): ...`.  `prepare` opens it.
        """
        try:
            with self._making.calibrating():
                yield
        finally:
            self._steps.clear()

    def state_dict(self) -> dict[str, Any]:
        """Masks by "path of the weight/mask", what else belongs to them, and "step", the next one."""
        return {**super().state_dict(), "step": self._making.next_step}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take what `state_dict` gave, also in another process; the steps go on."""
        kept = dict(state)
        self._making.begin_at(int(kept.pop("step", 0)))
        super().load_state_dict(kept, strict)
        self._steps.clear()

    @property
    def transforms_gradients(self) -> bool:
        """True if weights' gradients are masked."""
        return self._options.mask_gradients

    @property
    def is_settled(self) -> bool:
        """True if masks that are made stay."""
        options = self._options
        return not (self._making.is_calibrating or options.schedule.goes_on or options.exchanges)

    def on_weight(self, weight: PrunedWeight) -> str | None:
        """Make the mask of a weight, unless the pattern does not fit."""
        options = self._options
        misfit = options.pattern.misfit(weight.canonical_shape, weight.layout is not None)
        if misfit is None and options.of_inputs:
            misfit = unread(weight.type, weight.layout)
        if misfit is None:
            weight.keep_elements("mask", True, "bool")
            dtype = "float64" if weight.dtype == "float64" else "float32"
            if options.exchanges or options.importance == "sparsegpt":
                weight.keep_elements("offset", 0, dtype)
            if options.importance == "movement":
                weight.keep_elements("movement", 0, dtype)
            if options.permute:
                weight.keep("permutation", np.arange(weight.canonical_shape[1]))
        return misfit

    def on_read(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Make the mask that is due, or gather what it is made of."""
        if weight.is_loaded:
            weight.fit_loaded(present)
        self._making.look_at(weight, present)
        weight.start_grown(present)

    def on_file(self, weight: PrunedWeight, present: Callable[[], Any]) -> None:
        """Gather what the mask of a weight in a file is made of."""
        if weight.is_loaded:
            weight.fit_loaded(present)
        self._making.gather_for_good(weight, present)

    def on_gradient(self, weight: PrunedWeight, gradient: Any) -> None:
        """Gather what decides what comes back, or what is dropped."""
        if self._options.regrow == "gradient":
            weight.gather_gradient(gradient)
        if self._options.of_gradients:
            weight.gather_product(gradient)

    def _note_inputs(self, context: amanda.OpContext) -> None:
        """Read the inputs that a weight multiplies, where the importance is computed of them."""
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
        if isinstance(weight, PrunedWeight) and self._making.is_gathering(weight):
            rows = rows_of(value, weight.canonical_shape)
            weight.gather_inputs(squares(rows) if self._options.importance == "wanda" else products(rows))

    @amanda.traceable
    def transform(self, value: Any, mask: Any, offset: Any = None) -> Any:
        """Return the weight with 0 where it is dropped, and less the offset."""
        return value * mask if offset is None else (value - offset) * mask

    def transform_gradient(self, gradient: Any, mask: Any, offset: Any = None) -> Any:
        """Return the gradient with 0 where the weight is dropped."""
        return gradient * mask

    @checked(error=PruneError)
    def finalize(self, model: Any, semi_structured: bool = False) -> Any:
        """Write the masks into the weights of a model, which then computes the same without the tool.

        semi_structured: also turn weights that are pruned 2:4 into those of
        torch.sparse.to_sparse_semi_structured, for inference on GPUs; `result.dense` has those that are not.
        Returns `result`, see `WeightTool.finalize`.  Raises PruneError as that does, and where no weight can
        be turned: before anything is written where there is no GPU.
        """
        if not semi_structured:
            return super().finalize(model)
        if self.pattern != "2:4" or self._options.permute:
            with_order = " with permute=True" if self._options.permute else ""
            raise PruneError(f"semi_structured=True is for pattern 2:4, not {self.pattern}{with_order}")
        made = SemiStructured(model, self.weights)
        result = super().finalize(model)
        made.compress()
        result.dense = made.dense
        return result

    def on_finalized(self, weight: PrunedWeight) -> None:
        """Subtract nothing from a weight any more."""
        if weight.offset is not None:
            weight["offset"] = 0
