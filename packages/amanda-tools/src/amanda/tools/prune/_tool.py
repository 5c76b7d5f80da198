"""The tool: weights are masked before each op that reads them, and their gradients behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import amanda
from amanda.tools.mapping import MOVED, StandardMapping, weight_gradient
from amanda.tools.prune._finalizing import finalize
from amanda.tools.prune._making import Making
from amanda.tools.prune._met import Met
from amanda.tools.prune._moved import Find, MovedWeights
from amanda.tools.prune._options import Budget, Options, Regrow
from amanda.tools.prune._patterns import pattern_of
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._result import PruneResult
from amanda.tools.prune._schedule import Kind, Schedule
from amanda.tools.prune._selection import Selection
from amanda.tools.prune._weight import Weight, masked_for_good
from amanda.tools.select import as_remarks
from amanda.tools.steps import Steps

_numbers = count()


class PruneTool(amanda.Tool):
    """Prunes the weights of convolutions and products; `result` tells which, `finalize` writes it into them.

    sparsity: the share that is dropped, of each weight (scope "op") or of all together ("global").
    pattern: "element"; "2:4" and its like, of consecutive input channels, whatever the sparsity; "tile";
        "channel", output filters by their norm.
    schedule: "constant", or "cubic" from `initial_sparsity` at step `begin` to `sparsity` at step `end`.
    begin, end, frequency: masks are made at step begin, each `frequency`th after it, and end; with a constant
        schedule and no frequency at begin alone.  A step is a call of the model, or what `step()` says.
    regrow: whether what is dropped may come back when masks are made again: "magnitude" ranks all anew,
        "gradient" (RigL) and "random" (SET) exchange the share `regrow_fraction` of what is kept.
    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.
    norm: of channels, 1 or 2.  granularity: columns of a tile.  permute: look for the order of the input
        channels in which n:m keeps most.  mask_gradients: also mask weights' gradients.  seed: of "random".

    Raises PruneError for options that do not go together.
    """

    def __init__(
        self,
        sparsity: float = 0.5,
        pattern: str = "element",
        scope: Budget = "op",
        schedule: Kind = "constant",
        begin: int = 0,
        end: int | None = None,
        frequency: int | None = None,
        initial_sparsity: float = 0.0,
        regrow: Regrow | None = None,
        regrow_fraction: float = 0.3,
        type: list[str] | str | None = None,
        module: list[str] | str | None = None,
        exclude: list[str] | str | None = None,
        norm: int = 2,
        granularity: int = 128,
        permute: bool = False,
        mask_gradients: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        steps = Schedule(sparsity, schedule, initial_sparsity, begin, end, frequency)
        self._options = Options(
            steps, pattern_of(pattern, granularity, norm), pattern, scope, regrow, regrow_fraction, permute,
            mask_gradients, seed,
        )  # fmt: skip
        self._selection = Selection(type, module, exclude)
        self._met = Met(self._options, self._selection, self.keep, self.place)
        self._moved = MovedWeights(self._met)
        self._key = f"pruned by {next(_numbers)}"
        self._mask_key = f"{self._key}, for good"
        self._making = Making(self._options, self._met)
        self._steps = Steps()
        self._steps.on_step(self._making.turn)
        self.depends_on(StandardMapping(), MOVED)
        if self._options.needs_steps:
            self.depends_on(self._steps)
        self.add_inst_for_op(self._forward)
        if mask_gradients or regrow == "gradient":
            self.add_inst_for_op(self._backward, backward=True)

    # ---- for the user ----

    @property
    def result(self) -> PruneResult:
        """The weights that were met, and what is dropped of them."""
        met = self._met
        waiting = [name for name in self.waiting_state() if "/mask" in name] if met.weights else []
        left = sum(met.left.values())
        result = PruneResult(met.weights.values(), self._options.name, met.reasons, met.passed, waiting, left)
        result.remarks = as_remarks(self.unmatched())
        return result

    def unmatched(self) -> list[str]:
        """Say which options no op fitted."""
        return [*super().unmatched(), *self._selection.unmatched()]

    def clear(self) -> None:
        """Forget masks and steps: the next step is the first."""
        self.load_state_dict({})

    @property
    def step_number(self) -> int:
        """Which step is under way; 0 is the first."""
        return self._making.step

    def step(self) -> None:
        """Begin a step here, and at no call of a model any more."""
        self._steps.step()

    def finalize(self, model: Any) -> PruneResult:
        """Write the masks into the weights of a model, which then computes alone what it did with the tool.

        model: a module of PyTorch, a model of Keras, a tf.Module, or a list of parameters or variables; those
        of a session's graph within `with session.as_default()`.
        Raises PruneError where a weight is computed, so that nothing holds it, and where the model has no
        weight that the tool has met; `amanda.tools.kit.HeldError` for what has no parameters.
        """
        finalize(model, [one for one in self._met.weights.values() if one.is_masked], self._met.passed)
        return self.result

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around `prepare`, which makes the masks of the first step; it is none itself."""
        try:
            with self._making.preparing():
                yield
        finally:
            self._steps.restart()

    def state_dict(self) -> dict[str, Any]:
        """Masks by "module path/op/name", what else belongs to them, and "step", the next one."""
        retracted = {id(array) for one in self._met.retracted for array in one.state}
        kept = {name: value for name, value in super().state_dict().items() if id(value) not in retracted}
        return {**kept, "step": self._making.next_step}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take what `state_dict` gave, also in another process; the steps go on."""
        kept = dict(state)
        self._making.begin_at(int(kept.pop("step", 0)))
        super().load_state_dict(kept, strict)
        self._met.clear()
        self._steps.restart()

    # ---- analysis ----

    def _forward(self, context: amanda.OpContext) -> None:
        again = self._met.look_at(context)
        if again:
            self.analyse_again(again)
        if context["phase"] != "forward":
            return
        index = self._moved.weight_index(context)
        if index is None or self._moved.leaves(context, index):
            return
        value = context.get_inputs()[index]
        find = self._moved.finder(context, index)
        if find is None:
            found: Any = self._weight(context, value, context.get_variable(index))
        else:
            found = find(value, MOVED.origins.source(value))
        if found is None and find is None:
            return
        if context.is_static():
            self._inline(context, index, found)
            return
        context[self._key] = found if isinstance(found, Weight | Reading) else None  # else it holds tensors
        mask = context[self._mask_key] = self._final_mask(context, index, found)
        within = self._is_differentiated(context)
        if mask is not None:
            context.insert_before_op(_times, inputs=[index], mask=mask)
        elif find is not None:
            routine = self._mask_part_within_autograd if within else self._mask_part
            context.insert_before_op(routine, inputs=[index], find=find)
        else:
            of_weight = self._mask_within_autograd if within else self._mask
            context.insert_before_op(of_weight, inputs=[index], weight=found)

    def _inline(self, context: amanda.OpContext, index: int, weight: Any) -> None:
        """Mask a weight of a file for good; what it holds is asked for once, when the tool is prepared."""
        if isinstance(weight, Weight) and not weight.is_masked and weight.magnitudes is None:
            weight.magnitudes = weight.gathered(context.get_value(index), revive=False)
        if weight.is_masked:
            context.insert_before_op(masked_for_good, inputs=[index], **weight.inlined())
        else:
            self._making.await_last_masks()

    def _backward(self, context: amanda.OpContext) -> None:
        index = context["weight_grad_index"]
        if self._key not in context or index is None:
            return
        weight, mask = context[self._key], context[self._mask_key]
        within = self._is_differentiated(context)
        if mask is None and (self._options.regrow == "gradient" or not within):
            context.insert_after_backward_op(
                self._mask_gradient, grad_inputs=[index], first=weight,
                is_weights=partial(weight_gradient(context), index),
                masks=self._options.mask_gradients and not within,
            )  # fmt: skip
        elif mask is not None and self._options.mask_gradients:
            context.insert_after_backward_op(_times, grad_inputs=[index], mask=mask)

    def _weight(self, context: amanda.OpContext, value: Any, holder: Any) -> Weight | Reading | None:
        return self._met(context, value, holder, context["weight_layout"])

    def _final_mask(self, context: amanda.OpContext, index: int, weight: Any) -> Any:
        """The mask as a tensor, where a compiler shall have it: no other will be made. None elsewhere."""
        compiles = context.namespace.matches("pytorch/*/graph")
        if (
            weight is None
            or not compiles
            or self._making.is_preparing
            or self._options.schedule.goes_on
            or weight.grown is not None
        ):
            return None
        try:
            value = context.get_value(index)
        except amanda.AmandaError:  # it is computed
            return None
        if not weight.is_masked and isinstance(weight, Weight) and self._making.is_made_at_once(weight):
            self._making.masked(value, weight)
        return weight.mask_like(value) if weight.is_masked else None

    # ---- execution ----

    def _mask(self, value: Any, weight: Weight | Reading) -> Any:
        return self._making.masked(value, weight)

    @amanda.differentiable
    def _mask_within_autograd(self, value: Any, weight: Weight | Reading) -> Any:
        return self._making.masked(value, weight)

    def _mask_part(self, value: Any, find: Find, run: Any) -> Any:
        weight: Any = find(value, MOVED.origin(run))
        run[self._key] = weight
        return None if weight is None else self._making.masked(value, weight)

    @amanda.differentiable
    def _mask_part_within_autograd(self, value: Any, find: Find, run: Any) -> Any:
        return self._mask_part(value, find, run)

    def _is_differentiated(self, context: amanda.OpContext) -> bool:
        """Whether autograd masks gradients, those of gradients too; in graphs it would cost a call each."""
        return self._options.mask_gradients and context.namespace.matches("pytorch/*/eager")

    def _mask_gradient(
        self, gradient: Any, first: Weight | Reading, is_weights: Callable[[Any], bool], masks: bool, run: Any
    ) -> Any:
        weight = run.get(self._key, first)
        if weight is None or not is_weights(gradient):
            return None
        if self._options.regrow == "gradient":
            weight.gather_gradient(gradient)
        return weight.masked_gradient(gradient) if masks else None


@amanda.traceable
def _times(value: Any, mask: Any) -> Any:
    return None if value is None else value * mask
