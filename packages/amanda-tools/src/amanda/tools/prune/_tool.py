"""The tool: weights are masked before each op that reads them, and their gradients behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np

import amanda
from amanda.tools.mapping import StandardMapping, weight_gradient
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._framework import framework_of
from amanda.tools.prune._layout import canonical_extents
from amanda.tools.prune._making import make_masks
from amanda.tools.prune._options import Budget, Options, Regrow
from amanda.tools.prune._patterns import pattern_of
from amanda.tools.prune._result import PruneResult
from amanda.tools.prune._schedule import Kind, Schedule
from amanda.tools.prune._selection import LOOKUPS, WITHIN, Selection
from amanda.tools.prune._weight import NEVER, Weight, masked_for_good
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
        self._selects = Selection(type, module, exclude)
        self._weights: dict[Hashable, Weight] = {}
        self._left: set[Hashable] = set()
        self._reasons: dict[str, str] = {}
        self._key = f"pruned by {next(_numbers)}"
        self._mask_key = f"{self._key}, for good"
        self._preparing = self._stepped = self._static = False
        self._first, self.step_number = 0, 0
        self._steps = Steps()
        self._steps.on_step(self._turn)
        self.depends_on(StandardMapping())
        if self._options.needs_steps:
            self.depends_on(self._steps)
        self.add_inst_for_op(self._forward)
        if mask_gradients or regrow == "gradient":
            self.add_inst_for_op(self._backward, backward=True)

    # ---- for the user ----

    @property
    def result(self) -> PruneResult:
        """The weights that were met, and what is dropped of them."""
        return PruneResult(self._weights.values(), self._options.name, self._reasons)

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
        met = [one for one in self._weights.values() if one.is_masked]
        computed = [one.module or one.source for one in met if one.holder is None]
        if computed:
            raise PruneError(
                f"the weights of {', '.join(computed)} are computed at each call: make them parameters first "
                "(torch.nn.utils.parametrize.remove_parametrizations), or exclude them"
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
            raise PruneError(
                f"none of the {len(met)} weights that the tool has pruned is of this {type(model).__name__}; "
                "call it in a scope of the tool, or tool.prepare(model, example)"
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
        return {**super().state_dict(), "step": self.step_number + 1 if self._stepped else self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, also in another process; the steps go on."""
        kept = dict(state)
        self._first, self._stepped = int(kept.pop("step", 0)), False
        super().load_state_dict(kept)
        self._weights.clear()
        self._left.clear()
        self._reasons.clear()
        self._steps.restart()

    # ---- analysis ----

    def _forward(self, context: amanda.OpContext) -> None:
        index = context["weight_index"]
        if context["type"] in LOOKUPS and (holder := context.get_variable(0)) is not None:
            self._left.add((framework_of(holder).identity(holder), None))
        if context["type"] in WITHIN and self._selects(context):
            self._leave(context, "it multiplies by several weights in one op")
        if index is None or context["phase"] != "forward":
            return
        weight = self._weight(context, index)
        if weight is not None and context.is_static():
            self._inline(context, index, weight)
        elif weight is not None:
            context[self._key] = weight
            mask = context[self._mask_key] = self._final_mask(context, index, weight)
            if mask is None:
                routine = self._mask_within_autograd if self._is_differentiated(context) else self._mask
                context.insert_before_op(routine, inputs=[index], weight=weight)
            else:
                context.insert_before_op(_times, inputs=[index], mask=mask)

    def _inline(self, context: amanda.OpContext, index: int, weight: Weight) -> None:
        """Mask a weight of a file for good; what it holds is asked for once, when the tool is prepared."""
        if not weight.is_masked and weight.magnitudes is None:
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
                self._mask_gradient, grad_inputs=[index], weight=weight,
                is_weights=partial(weight_gradient(context), index),
                masks=self._options.mask_gradients and not within,
            )  # fmt: skip
        elif mask is not None and self._options.mask_gradients:
            context.insert_after_backward_op(_times, grad_inputs=[index], mask=mask)

    def _weight(self, context: amanda.OpContext, index: int) -> Weight | None:
        """The weight of an op; None of one that is not pruned, here or where it was met first."""
        value, holder = context.get_inputs()[index], context.get_variable(index)
        if getattr(value, "is_meta", False):  # it has no numbers yet
            return None
        framework = framework_of(value)
        held = None if holder is None else framework.held(holder, value)
        key: Hashable = self.place(context) if held is None else held
        if key not in self._weights and key not in self._left:
            extents = context["shape"](value)
            if not self._selects(context) or not self._fits(context, extents, value):
                self._left.add(key)
            else:
                self._weights[key] = self._made(context, framework, held, extents, value)
        return self._weights.get(key)

    def _final_mask(self, context: amanda.OpContext, index: int, weight: Weight) -> Any:
        """The mask as a tensor, where a compiler shall have it: no other will be made. None elsewhere."""
        compiles = context.namespace.matches("pytorch/*/graph")
        if not compiles or self._preparing or self._schedule.goes_on or weight.grown is not None:
            return None
        try:
            value = context.get_value(index)
        except amanda.AmandaError:  # it is computed
            return None
        if not weight.is_masked and self._is_made_at_once(weight):
            self._mask(value, weight)
        return weight.mask_like(value) if weight.is_masked else None

    def _fits(self, context: amanda.OpContext, extents: Any, value: Any) -> bool:
        layout = context["weight_layout"]
        if extents is None or None in extents or len(extents) < 2:
            reason: str | None = f"its shape is {extents}"
        elif "float" not in str(context["dtype"](value)):
            reason = f"its type is {context['dtype'](value)}"
        elif context.is_static() and not _is_in_file(context, context["weight_index"]):
            reason = "it is computed when the model runs"
        else:
            reason = self._options.pattern.misfit(canonical_extents(extents, layout), layout is not None)
        if reason is not None:
            self._leave(context, reason)
        return reason is None

    def _leave(self, context: amanda.OpContext, reason: str) -> None:
        self._reasons[f"{context['type']} of {context.get_scope() or context.get_source()}"] = reason

    def _made(self, context: amanda.OpContext, framework: Any, held: Any, extents: Any, value: Any) -> Weight:
        layout = context["weight_layout"]
        kept = self._state(context, framework, "mask", np.ones(extents, bool))
        updated = self._state(context, framework, "updated", np.full(1, NEVER))
        grown = permutation = None
        holder, part = held or (None, None)
        if self._options.exchanges:
            start = np.zeros(extents, "float64" if context["dtype"](value) == "float64" else "float32")
            grown = self._state(context, framework, "grown", start)
        if self._options.permute:
            channels = np.arange(canonical_extents(extents, layout)[1])
            permutation = self._state(context, framework, "permutation", channels)
        if tuple(kept.shape) != tuple(extents):
            raise PruneError(
                f"the mask that was loaded for {context.get_scope()} is of shape {tuple(kept.shape)}, "
                f"its weight of shape {tuple(extents)}"
            )
        return Weight(
            context.get_scope(), context["type"], context.get_source(), tuple(extents), layout, framework,
            holder, part, len(self._weights), kept, updated, grown, permutation,
        )  # fmt: skip

    def _state(self, context: amanda.OpContext, framework: Any, name: str, start: Any) -> Any:
        return self.keep(context, name, lambda: framework.stored(start), framework.stored)

    # ---- execution ----

    def _mask(self, value: Any, weight: Weight) -> Any:
        self._stepped = self._stepped or not self._preparing
        revive = self._options.regrow == "magnitude"
        if self._is_made_at_once(weight):
            update = self._schedule.latest(self.step_number)
            if update is not None and weight.precedes(update):
                weight.magnitudes = weight.gathered(value, revive)
                make_masks([weight], update, self._options)
        elif weight.magnitudes is None and weight.precedes(self._next_update):
            self._check_prepared()
            weight.magnitudes = weight.gathered(value, revive)
        return weight.masked(value)

    def _check_prepared(self) -> None:
        is_first = self._schedule.begin == self.step_number == 0 and not self._preparing
        if is_first and not any(one.is_masked for one in self._weights.values()):
            raise PruneError(
                'scope="global" ranks all weights of the model, and the first masks are due before they '
                "are known: call tool.prepare(model, example), or give begin=1: step 0 is dense then"
            )

    @amanda.differentiable
    def _mask_within_autograd(self, value: Any, weight: Weight) -> Any:
        return self._mask(value, weight)

    def _is_differentiated(self, context: amanda.OpContext) -> bool:
        """Whether autograd masks gradients, those of gradients too; in graphs it would cost a call each."""
        return self._options.mask_gradients and context.namespace.matches("pytorch/*/eager")

    def _mask_gradient(
        self, gradient: Any, weight: Weight, is_weights: Callable[[Any], bool], masks: bool
    ) -> Any:
        if not is_weights(gradient):
            return None
        if self._options.regrow == "gradient" and weight.magnitudes is not None:
            own = weight.canonical(gradient) * 1
            weight.gradient = own if weight.gradient is None else weight.gradient + own
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
        waiting = [one for one in self._weights.values() if one.magnitudes is not None]
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


def _is_in_file(context: amanda.OpContext, index: int) -> bool:
    """Whether an input of an op of a file is known before the model runs."""
    try:
        return context.get_value(index) is not context.get_inputs()[index]
    except amanda.AmandaError:
        return False
