"""The tool: masks whole groups of channels while a model runs, and removes them for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from os import PathLike
from typing import Any

import amanda
from amanda.options import PositiveInt, Seed, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._importance import Budget, Importance, Of, Scope
from amanda.tools.prune.channels._plan import Choice, Plan, made_plan
from amanda.tools.prune.channels._result import ChannelPruneResult
from amanda.tools.prune.channels._simulation import masked
from amanda.tools.prune.channels._subject import Masks, Subject
from amanda.tools.select import Globs, listed


class ChannelPruneTool(amanda.Tool):
    """Prunes channels of PyTorch, Keras and ONNX models with all that depends on them, and removes them.

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
    module, exclude: globs of paths of modules: the output channels of the layers in them are pruned, or not.
    seed: of "random".

    Raises PruneError for options that make no sense.
    """

    is_copied_when_used = False

    @checked(error=PruneError)
    def __init__(
        self,
        sparsity: Share = 0.5,
        importance: Importance = "l2",
        scope: Scope = "local",
        of: Of = "channels",
        round_to: PositiveInt = 1,
        module: Globs = None,
        exclude: Globs = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self._choice = Choice(
            Budget(sparsity, scope, of, round_to), importance, seed,
            listed("module", module, PruneError), listed("exclude", exclude, PruneError),
        )  # fmt: skip
        self._plan: Plan | None = None
        self._finalized: ChannelPruneResult | None = None
        self._masks: Masks = _no_mask
        self._reductions: dict[Any, list[tuple[str, int, Any]]] = {}
        self._simulations: list[ExitStack] = []
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)

    @property
    def result(self) -> ChannelPruneResult:
        """The groups, how many channels are kept, and what is left whole; after `finalize`, what it did."""
        return ChannelPruneResult(self._plan) if self._finalized is None else self._finalized

    def prepare(self, model: Any, *example: Any, **kwargs: Any) -> Any:
        """Find the groups in a call of the model, choose channels, and try the removal out.

        model: a module of PyTorch, a functional or sequential model of Keras on TensorFlow, or an ONNX model
        as a ModelProto or the path of a file.  example: what it is called with; of Keras and ONNX arrays, in
        the order of the inputs, and of ONNX also by their names.
        The model is in evaluation mode meanwhile, and as it was afterwards.  Ops that do not suit fewer
        channels are left whole, see `result.left`.  Returns what the masked model returns.
        Raises PruneError where the smaller model would not compute what the masked one does.
        """
        subject = _subject_of(model)
        if self._choice.importance == "taylor" and not subject.has_gradients:
            raise PruneError(
                'importance="taylor" reads gradients, which parameters of PyTorch alone have: choose "l1", '
                '"l2", "random" or a function'
            )
        self._forget()
        try:
            with subject.evaluating():
                plan, smaller = made_plan(subject, example, kwargs, self._choice)
                self._take(plan)
                with amanda.apply(self):
                    result = subject(*example, **kwargs)
            _check_same(subject.floats(result), subject.floats(smaller))
        except BaseException:
            self._forget()
            raise
        return result

    @checked(error=PruneError)
    def finalize(self, model: Any, remove: bool = False, optimizer: Any = None) -> ChannelPruneResult:
        """Write masks into the weights of a model, or remove the channels.

        A module of PyTorch is changed in place.  A Keras model stays with remove=True, and `result.model` is
        a new one.  An ONNX model or its file stays, and `result.model` is a new ModelProto, to be saved with
        `onnx.save`.
        remove: weights become smaller, and so do attributes such as `out_channels` and `num_heads`.
        optimizer: one of PyTorch's whose state is to follow; the parameters stay the same objects.
        Returns `result`, whose `model` is the pruned model.  Raises PruneError before `prepare`, for another
        model, and where masks do not compute what removal does.
        """
        plan = self._plan
        if plan is None or not plan.subject.is_of(model):
            raise PruneError(
                "ChannelPruneTool.finalize was given a model that it has not met: call "
                "prepare(model, example)"
            )
        if optimizer is not None and not plan.subject.has_gradients:
            raise PruneError(
                f"ChannelPruneTool.finalize was given the optimizer {type(optimizer).__name__}; only one of "
                "PyTorch can follow: leave it, and compile a smaller model of Keras with a new one"
            )
        result = self.result
        if remove:
            finished = plan.subject.smaller(plan, optimizer)
        elif self._reductions:
            places = ", ".join(sorted({one.type for one in plan.tracing.notes.reductions}))
            raise PruneError(
                f"zeros in the parameters do not compute what is masked: {places} is over the channels that "
                "are kept alone; give remove=True, or exclude the layers whose channels it is over"
            )
        else:
            finished = plan.subject.with_zeros(self._masks)
        self._forget()
        result.model = finished
        self._finalized = result
        return result

    def clear(self) -> None:
        """Forget the groups and what was chosen; call `prepare` again."""
        self._forget()

    def scope_entered(self) -> None:
        """Let the model run in the ops that can be masked."""
        self._simulations.append(ExitStack())
        if self._plan is not None:
            self._simulations[-1].enter_context(self._plan.subject.simulating())

    def scope_left(self) -> None:
        """Let the model run as without the tool."""
        self._simulations.pop().close()

    def _forget(self) -> None:
        self._plan, self._masks, self._reductions = None, _no_mask, {}
        self._finalized = None
        self.analyse_again()

    def _take(self, plan: Plan) -> None:
        """Make the masks of a plan."""
        self._plan = plan
        self._masks = plan.subject.masks(plan.axes())
        for one in plan.tracing.notes.reductions:
            kept = plan.alive[one.labels]
            if not kept.all():
                self._reductions.setdefault(one.key, []).append((one.type, one.axis, np.flatnonzero(kept)))
        self.analyse_again()

    def _forward(self, context: amanda.OpContext) -> None:
        if self._plan is None or context["phase"] != "forward":
            return
        subject = self._plan.subject
        for i, value in enumerate(subject.reads(context)):
            masks = self._masks_of(value)
            if masks is not None:
                context.insert_before_op(masked, inputs=[i], mask=masks)
        for type, axis, indices in self._reductions.get(subject.key(context), ()):
            if type in ("mean", "sum"):
                context.insert_before_op(subject.selected, inputs=[0], axis=axis, indices=indices)
            else:
                compute, names = context.get_computation(), context.get_input_names()
                context.replace_op(
                    subject.over_kept, axis=axis, indices=indices, compute=compute, names=names
                )

    def _masks_of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            found = [self._masks_of(one) for one in value]
            return found if any(one is not None for one in found) else None
        return self._masks(value)


def _subject_of(model: Any) -> Subject:
    """Return a model as pruning sees it, without importing a framework that the model is not of."""
    libraries = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "torch" in libraries:
        import torch

        if isinstance(model, torch.nn.Module):
            from amanda.tools.prune.channels._pytorch import Module

            return Module(model)
    if "keras" in libraries:
        import keras

        if isinstance(model, keras.Model):
            from amanda.tools.prune.channels._keras import KerasModel

            return KerasModel(model)
    if isinstance(model, (str, PathLike)) or type(model).__name__ == "ModelProto":
        from amanda.tools.prune.channels._onnx import OnnxModel

        return OnnxModel(model)
    raise PruneError(
        f"ChannelPruneTool.prepare was given a {type(model).__name__}; it follows and removes the channels "
        "of a torch.nn.Module, a keras.Model, or an ONNX model as a ModelProto or the path of its file: "
        'PruneTool(pattern="structured") masks filters elsewhere'
    )


def _no_mask(value: Any) -> None:
    """Leave every weight as it is."""


def _check_same(masked: Iterator[Any], smaller: Iterator[Any]) -> None:
    """Raise PruneError where two models do not compute the same, within rounding."""
    for (one, epsilon), (other, _) in zip(masked, smaller, strict=True):
        if one.size:
            bound = float(np.abs(one).max()) * epsilon**0.5
            apart = float(np.abs(one - other).max())
            if np.isnan(apart):
                raise PruneError(
                    "a result of the model has NaN or Inf, so that removal cannot be checked: give an "
                    "example and weights of which the model computes numbers"
                )
            if not apart <= max(bound, epsilon):
                raise PruneError(
                    "the model without its channels computes something else than the masked one, by "
                    f"{apart:.3g} in a result: exclude layers whose outputs an op selects by number"
                )
