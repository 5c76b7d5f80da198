"""The tool: masks whole groups of channels while a model runs, and removes them for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import amanda
from amanda.tools._libraries import numpy as np
from amanda.tools.kit import TensorMap, check_one_of
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune._masks import PruneError, check_sparsity
from amanda.tools.prune.channels._importance import Budget, Importance, Of, Scope
from amanda.tools.prune.channels._plan import Choice, Plan, evaluating, made_plan
from amanda.tools.prune.channels._result import ChannelPruneResult
from amanda.tools.prune.channels._simulation import masked, over_kept, selected
from amanda.tools.prune.channels._tracing import tensors_in


class ChannelPruneTool(amanda.Tool):
    """Prunes channels of PyTorch models with all that depends on them, and removes them.

    Channels that layers share, by residual additions, concatenation, normalisation or heads of attention, are
    one group: `prepare` finds the groups in a call of the model.  In a scope of the tool they are masked in
    all parameters of the group; `finalize(model, remove=True)` makes the model smaller.

    sparsity: the share that is removed, of each group (scope "local") or of all together ("global").
    importance: "l2", "l1", "taylor" (of gradients that the parameters have), "random", or a function that is
        given the weights of a group, {"path of the weight:axis": (channels, elements)}, and returns a number
        for each channel; the smallest are removed first.
    of: what the sparsity is the share of: "channels", "flops" of convolutions and products with weights, or
        "latency", the time of the call that `prepare` is given, measured on the device where the model is.
    round_to: keep a multiple of so many along an axis.
    module, exclude: globs of paths of layers whose output channels are pruned.  seed: of "random".

    Raises PruneError for options that make no sense.
    """

    def __init__(
        self,
        sparsity: float = 0.5,
        importance: Importance = "l2",
        scope: Scope = "local",
        of: Of = "channels",
        round_to: int = 1,
        module: list[str] | str | None = None,
        exclude: list[str] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_sparsity(sparsity)
        if not callable(importance):
            check_one_of("importance", importance, ("l1", "l2", "taylor", "random"), PruneError)
        check_one_of("scope", scope, get_args(Scope), PruneError)
        check_one_of("of", of, get_args(Of), PruneError)
        if not isinstance(round_to, int) or round_to < 1:
            raise PruneError(f"round_to is {round_to!r}; it is a whole number of channels, 1 or more")
        globs = [[one] if isinstance(one, str) else one for one in (module, exclude)]
        self._choice = Choice(
            Budget(sparsity, scope, of, round_to), importance, seed, globs[0], globs[1] or ()
        )
        self._plan: Plan | None = None
        self._finalized: ChannelPruneResult | None = None
        self._masks: TensorMap[Any] = TensorMap()
        self._reductions: dict[int, tuple[str, int, Any]] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)

    @property
    def result(self) -> ChannelPruneResult:
        """The groups, how many channels are kept, and what is left whole; after `finalize`, what it did."""
        return ChannelPruneResult(self._plan) if self._finalized is None else self._finalized

    def prepare(self, model: Any, *example: Any, **kwargs: Any) -> Any:
        """Find the groups in a call of the model, choose channels, and try the removal out.

        The model is in evaluation mode meanwhile, and as it was afterwards.  Ops that do not suit fewer
        channels are left whole, see `result.left`.  Returns what the masked model returns.
        Raises PruneError where the smaller model would not compute what the masked one does.
        """
        import torch

        if not isinstance(model, torch.nn.Module):
            raise PruneError(
                f"ChannelPruneTool.prepare was given a {type(model).__name__}; it follows and removes the "
                'channels of a torch.nn.Module alone: PruneTool(pattern="structured") masks filters elsewhere'
            )
        self._forget()
        with evaluating(model), torch.no_grad():
            plan, smaller = made_plan(model, example, kwargs, self._choice)
            self._take(plan)
            with amanda.apply(self):
                result = model(*example, **kwargs)
        _check_same(tensors_in(result), tensors_in(smaller))
        return result

    def finalize(self, model: Any, remove: bool = False, optimizer: Any = None) -> ChannelPruneResult:
        """Write masks into the parameters of a model, or remove the channels, in place.

        remove: parameters become smaller, and so do attributes such as `out_channels` and `num_heads`.
        optimizer: one of PyTorch's whose state is to follow; the parameters stay the same objects.
        Returns `result`, whose `model` is the model.  Raises PruneError before `prepare`, for another model,
        and where masks do not compute what removal does.
        """
        import torch

        plan = self._plan
        if plan is None or plan.model is not model:
            raise PruneError(
                "ChannelPruneTool.finalize was given a model that it has not met: call "
                "prepare(model, example)"
            )
        result = self.result
        if remove:
            removal = plan.removal()
            try:
                removal.apply(model, optimizer)
            except BaseException:
                removal.undo()
                raise
        elif self._reductions:
            places = ", ".join(sorted({one.type for one in plan.tracing.notes.reductions}))
            raise PruneError(
                f"zeros in the parameters do not compute what is masked: {places} is over the channels that "
                "are kept alone; give remove=True, or exclude the layers whose channels it is over"
            )
        else:
            with torch.no_grad(), amanda.disabled():
                for parameter in model.parameters():
                    mask = self._masks.get(parameter)
                    if mask is not None:
                        parameter.mul_(mask)
        self._forget()
        result.model = model
        self._finalized = result
        return result

    def _forget(self) -> None:
        self._plan, self._masks, self._reductions = None, TensorMap(), {}
        self._finalized = None
        self.analyse_again()

    def _take(self, plan: Plan) -> None:
        """Make the masks of a plan."""
        import torch

        self._plan = plan
        parameters = dict(plan.model.named_parameters(remove_duplicate=False))
        for name, axis, kept in plan.axes():
            parameter = parameters.get(name)
            if parameter is not None:
                extents = [-1 if i == axis else 1 for i in range(parameter.ndim)]
                own = torch.from_numpy(kept).to(parameter.device).reshape(extents)
                former = self._masks.get(parameter)
                self._masks[parameter] = own if former is None else former & own
        for one in plan.tracing.notes.reductions:
            kept = plan.alive[one.labels]
            if not kept.all():
                self._reductions[one.op_id] = one.type, one.axis, torch.from_numpy(np.flatnonzero(kept))
        self.analyse_again()

    def _forward(self, context: amanda.OpContext) -> None:
        if self._plan is None or context["phase"] != "forward":
            return
        for i, value in enumerate(context.get_inputs()):
            masks = self._masks_of(value)
            if masks is not None:
                context.insert_before_op(masked, inputs=[i], mask=masks)
        if context.get_op_id() in self._reductions:
            type, axis, indices = self._reductions[context.get_op_id()]
            if type in ("mean", "sum"):
                context.insert_before_op(selected, inputs=[0], axis=axis, indices=indices)
            else:
                compute, names = context.get_computation(), context.get_input_names()
                context.replace_op(over_kept, axis=axis, indices=indices, compute=compute, names=names)

    def _masks_of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            found = [self._masks_of(one) for one in value]
            return found if any(one is not None for one in found) else None
        return self._masks.get(value) if hasattr(value, "requires_grad_") else None


def _check_same(masked: Iterator[Any], smaller: Iterator[Any]) -> None:
    """Raise PruneError where two models do not compute the same, within rounding."""
    for one, other in zip(masked, smaller, strict=True):
        if one.is_floating_point() and one.numel():
            one, other = one.detach(), other.detach()
            bound = float(one.abs().max()) * float(np.sqrt(_epsilon(one)))
            apart = float((one - other).abs().max())
            if np.isnan(apart):
                raise PruneError(
                    "a result of the model has NaN or Inf, so that removal cannot be checked: give an "
                    "example and weights of which the model computes numbers"
                )
            if not apart <= max(bound, _epsilon(one)):
                raise PruneError(
                    "the model without its channels computes something else than the masked one, by "
                    f"{apart:.3g} in a result: exclude layers whose outputs an op selects by number"
                )


def _epsilon(tensor: Any) -> float:
    import torch

    return float(torch.finfo(tensor.dtype).eps)
