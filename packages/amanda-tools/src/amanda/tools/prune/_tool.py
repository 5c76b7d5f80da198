"""The tool: weights are masked before each op that reads them, and their gradients behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import amanda
from amanda.tools.mapping import Moved, StandardMapping, holder_of, may_vary, weight_gradient
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._making import make_masks
from amanda.tools.prune._met import Met
from amanda.tools.prune._moved import ELSEWHERE, MovedWeights
from amanda.tools.prune._options import Budget, Options, Regrow
from amanda.tools.prune._patterns import pattern_of
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._result import PruneResult
from amanda.tools.prune._schedule import Kind, Schedule
from amanda.tools.prune._selection import Selection
from amanda.tools.prune._weight import Weight, masked_for_good
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
        self._schedule = steps
        self._met = Met(self._options, Selection(type, module, exclude), self.keep, self.place)
        moved = Moved()
        self._moved = MovedWeights(self._met, moved)
        self._key = f"pruned by {next(_numbers)}"
        self._mask_key = f"{self._key}, for good"
        self._preparing = self._stepped = self._static = False
        self._first, self.step_number = 0, 0
        self._steps = Steps()
        self._steps.on_step(self._turn)
        self.depends_on(StandardMapping(), moved)
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
        return PruneResult(met.weights.values(), self._options.name, met.reasons, met.passed, waiting)

    def clear(self) -> None:
        """Forget masks and steps: the next step is the first."""
        self.load_state_dict({})

    def step(self) -> None:
        """Begin a step here, and at no call of a model any more."""
        self._steps.step()

    def finalize(self, model: Any) -> PruneResult:
        """Write the masks into the weights of a model, which then computes alone what it did with the tool.

        model: a module of PyTorch, a model of Keras, a tf.Module, or a list of parameters or variables; those
        of a session's graph within `with session.as_default()`.
        Raises PruneError where a weight is computed, so that nothing holds it, and where the model has no
        weight that the tool has met.
        """
        met = [one for one in self._met.weights.values() if one.is_masked]
        computed = [one.module or one.source for one in met if one.holder is None]
        if computed:
            raise PruneError(
                f"the weights of {', '.join(computed)} are computed at each call: make them parameters first "
                "(torch.nn.utils.parametrize.remove_parametrizations) and let their masks go with them, by "
                "tool.load_state_dict(tool.state_dict()) and tool.prepare(model, example); or exclude them"
            )
        written = 0
        with amanda.disabled():
            for framework in {one.framework for one in met}:
                for holder, change in framework.variables(model):
                    for one in met:
                        if one.framework is framework and one.holder == holder:
                            change(one.part, one.finalized)
                            written += 1
        if not written:
            passed = f"; {self._met.passed}" if self._met.passed and not met else ""
            raise PruneError(
                f"none of the {len(met)} weights that the tool has pruned is of this {type(model).__name__}"
                f"{passed}; call it in a scope of the tool, or tool.prepare(model, example)"
            )
        return self.result

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around `prepare`, which makes the masks of the first step; it is none itself."""
        self._preparing = True
        try:
            yield
            self._make_gathered(self._schedule.last if self._static else self._next_update)
        finally:
            self._preparing = self._static = False
            self._steps.restart()

    def state_dict(self) -> dict[str, Any]:
        """Masks by "module path/op/name", what else belongs to them, and "step", the next one."""
        retracted = {id(array) for one in self._met.retracted for array in one.state}
        kept = {name: value for name, value in super().state_dict().items() if id(value) not in retracted}
        return {**kept, "step": self.step_number + 1 if self._stepped else self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, also in another process; the steps go on."""
        kept = dict(state)
        self._first, self._stepped = int(kept.pop("step", 0)), False
        super().load_state_dict(kept)
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
        if find is None and context.is_static():
            self._inline(context, index, self._weight(context, value, context.get_variable(index)))
            return
        found = self._weight(context, value, context.get_variable(index)) if find is None else find(value)
        if found is None and find is None:
            return
        context[self._key] = found if isinstance(found, Weight | Reading) else None  # else it holds tensors
        mask = context[self._mask_key] = self._final_mask(context, index, found)
        within = self._is_differentiated(context)
        if mask is not None:
            context.insert_before_op(_times, inputs=[index], mask=mask)
        elif find is not None or may_vary(context, index):
            routine = self._mask_part_within_autograd if within else self._mask_part
            context.insert_before_op(routine, inputs=[index], find=find or partial(self._part, context))
        else:
            of_weight = self._mask_within_autograd if within else self._mask
            context.insert_before_op(of_weight, inputs=[index], weight=found)

    def _inline(self, context: amanda.OpContext, index: int, weight: Weight | Reading | None) -> None:
        """Mask a weight of a file for good; what it holds is asked for once, when the tool is prepared."""
        if weight is None:
            return
        if isinstance(weight, Weight) and not weight.is_masked and weight.magnitudes is None:
            weight.magnitudes = weight.gathered(context.get_value(index), revive=False)
        if weight.is_masked:
            context.insert_before_op(masked_for_good, inputs=[index], **weight.inlined())
        elif self._preparing:
            self._static = True

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

    def _part(self, context: amanda.OpContext, value: Any) -> Weight | Reading | None:
        holder = holder_of(value)
        if holder is None:
            self._met.leave(context, ELSEWHERE)
            return None
        return self._weight(context, value, holder)

    def _final_mask(self, context: amanda.OpContext, index: int, weight: Any) -> Any:
        """The mask as a tensor, where a compiler shall have it: no other will be made. None elsewhere."""
        compiles = context.namespace.matches("pytorch/*/graph")
        if (
            weight is None
            or not compiles
            or self._preparing
            or self._schedule.goes_on
            or weight.grown is not None
        ):
            return None
        try:
            value = context.get_value(index)
        except amanda.AmandaError:  # it is computed
            return None
        if not weight.is_masked and isinstance(weight, Weight) and self._is_made_at_once(weight):
            self._mask(value, weight)
        return weight.mask_like(value) if weight.is_masked else None

    # ---- execution ----

    def _mask(self, value: Any, weight: Weight | Reading) -> Any:
        self._stepped = self._stepped or not self._preparing
        if isinstance(weight, Weight):
            self._look_at(weight, lambda: value)
        else:  # in a graph it may be read ahead of the others
            for one in weight.within:
                self._look_at(one, partial(weight.value_of, one, value))
        return weight.masked(value)

    def _look_at(self, weight: Weight, read: Callable[[], Any]) -> None:
        """Make the mask of a weight, or gather what it will be made of, where either is due."""
        revive = self._options.regrow == "magnitude"
        if self._is_made_at_once(weight):
            update = self._schedule.latest(self.step_number)
            if update is not None and weight.precedes(update):
                weight.magnitudes = weight.gathered(read(), revive)
                make_masks([weight], update, self._options)
        elif weight.magnitudes is None and weight.precedes(self._next_update):
            self._check_prepared()
            weight.magnitudes = weight.gathered(read(), revive)

    def _check_prepared(self) -> None:
        is_first = self._schedule.begin == self.step_number == 0 and not self._preparing
        if is_first and not any(one.is_masked for one in self._met.weights.values()):
            raise PruneError(
                'scope="global" ranks all weights of the model, and the first masks are due before they '
                "are known: call tool.prepare(model, example), or give begin=1: step 0 is dense then"
            )

    @amanda.differentiable
    def _mask_within_autograd(self, value: Any, weight: Weight | Reading) -> Any:
        return self._mask(value, weight)

    def _mask_part(self, value: Any, find: Callable[[Any], Weight | Reading | None], run: Any) -> Any:
        weight = run[self._key] = find(value)
        return None if weight is None else self._mask(value, weight)

    @amanda.differentiable
    def _mask_part_within_autograd(self, value: Any, find: Callable[[Any], Any], run: Any) -> Any:
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

    def _is_made_at_once(self, weight: Weight) -> bool:
        """Whether a mask needs no more than the weight's own present value."""
        return not self._options.is_global and not (self._options.regrow == "gradient" and weight.is_masked)

    @property
    def _next_update(self) -> int | None:
        """The update for which this step gathers; a step of preparation for itself, another for the next."""
        return self._schedule.latest(self.step_number + (not self._preparing))

    def _turn(self, number: int) -> None:
        self._make_gathered(self._next_update)
        self.step_number, self._stepped = self._first + number, False

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
            make_masks(group, update, self._options)


@amanda.traceable
def _times(value: Any, mask: Any) -> Any:
    return None if value is None else value * mask
