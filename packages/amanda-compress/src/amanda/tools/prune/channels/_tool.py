"""ChannelPruneTool and its result: channels are masked while a model runs, and removed for good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from os import PathLike
from typing import Any, ClassVar

import amanda
from amanda.options import PositiveInt, Seed, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._plan import (
    BudgetQuantity,
    ChannelBudget,
    ChannelOptions,
    Importance,
    RemovalPlan,
    Scope,
    make_plan,
)
from amanda.tools.prune.channels._prunable_model import Masks, PrunableModel, masked
from amanda.tools.results import NOTHING, Column, Result, shortened
from amanda.tools.select import Globs, listed


class ChannelPruneResult(Result):
    """The groups of channels, and how many of each are kept.

    parameters, kept_parameters: elements of the model's parameters, and how many are kept.  flops: the share
    of multiplications of convolutions and products with weights that is kept.  latency: the share of the
    time of a call, where the budget is of that; else None.  left: weights whose output
    channels are left whole, and why.  unread: parameters that the call of `prepare` did not read.
    model: what `finalize` has changed.  extents: of tensors and attributes of a module of PyTorch whose
    channels `finalize` has removed, before and after, by name.
    """

    model: Any = None
    name: ClassVar[str] = "channel_prune"
    title = "Pruned channels"
    columns: ClassVar[Sequence[Column]] = (
        Column("module", show=partial(shortened, width=44)), Column("weights", number=True),
        Column("width", number=True), Column("channels", show="{:,}".format, total=True),
        Column("kept", show="{:,}".format, total=True),
        Column("sparsity", show="{:.4f}".format, number=True, unit="share"),
    )  # fmt: skip

    def __init__(self, plan: RemovalPlan | None) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self.parameters = self.kept_parameters = 0
        self.flops, self.left, self.unread = 1.0, dict[str, str](), list[str]()
        self.latency: float | None = None
        self.extents: dict[str, tuple[Any, Any]] = {}
        if plan is None:
            return
        self.flops, self.left, self.latency = plan.remaining_work, plan.whole_layers, plan.latency
        for group, keep_mask in zip(plan.groups, plan.keep_masks, strict=True):
            count, kept_count = len(group) * group.width, int(keep_mask.sum()) * group.width
            weights = len({member.name for member in group.members if member.is_output})
            path = plan.tracing.layer(group.name)
            self._rows.append((path, weights, group.width, count, kept_count, 1 - kept_count / count))
        # Parameters that the example did not reach, such as those of a head for training: they stay whole and
        # may no longer fit.
        self.unread = [name for name in plan.subject.parameters() if name not in plan.tracing.weight_families]
        self._count_parameters(plan)

    def _count_parameters(self, plan: RemovalPlan) -> None:
        """Count the elements of all parameters, and those that stay."""
        kept_shares: dict[str, float] = {}  # of a parameter's elements: the product over its axes
        for name, _, keep_mask in plan.axes():
            kept_shares[name] = kept_shares.get(name, 1.0) * float(keep_mask.mean())
        for name, parameter in plan.subject.parameters().items():
            self.parameters += prod(parameter.shape)
            self.kept_parameters += round(prod(parameter.shape) * kept_shares.get(name, 1.0))

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each group: its first layer, and how many layers' outputs share the channels."""
        return self._rows

    def _facts(self) -> Mapping[str, Any]:
        """Return totals, and what was left whole."""
        return {
            "parameters": self.parameters, "kept_parameters": self.kept_parameters, "flops": self.flops,
            "latency": self.latency, "left": self.left, "unread": self.unread,
        }  # fmt: skip

    @property
    def _leading(self) -> int:
        """The totals come first."""
        return 1

    def notes(self) -> Sequence[str]:
        """Return totals, and what was left whole."""
        if not self.parameters:
            return [NOTHING]
        notes = [
            f"{self.kept_parameters:,} of {self.parameters:,} parameters and {self.flops:.1%} of the "
            "multiplications by weights are kept."
        ]
        if self.latency is not None:
            notes.append(f"A call takes {self.latency:.1%} of the time that it took with all channels.")
        if self.unread:
            notes.append(f"Not read in the call of prepare, and left: {', '.join(self.unread)}.")
        for name, why in self.left.items():
            notes.append(f"The output channels of {name} are left whole: {why}.")
        return notes


class ChannelPruneTool(amanda.Tool):
    """Prune channels of PyTorch, Keras and ONNX models; `finalize(model, remove=True)` makes a smaller model.

    Channels that layers share, by residual additions, concatenation, normalisation or heads of attention, are
    one group: `prepare` finds the groups in a call of the model.  In a scope of the tool the removed channels
    are masked in all parameters of their group, until `finalize` removes them for good.

    Args:
        sparsity: The removed share of each group (scope "local"), or of all groups together ("global").
        importance: "l2", "l1", "taylor" (of gradients that the parameters have), "random", or a function that
            is given the weights of a group, {"path of the weight:axis": (channels, elements)}, and returns a
            number for each channel; the smallest are removed first.
        scope: "local" removes the same share of each group, "global" ranks the channels of all groups
            together.
        of: What the sparsity is the share of: "channels", "flops" of convolutions and products with weights,
            or "latency", the time of the call that `prepare` is given, measured on the device where the model
            is.
        round_to: Keep a multiple of so many along an axis.
        module: Globs of paths of modules: the output channels of the layers in them are pruned, or not.
        exclude: See `module`.
        seed: Of "random".

    Raises:
        PruneError: For options that make no sense.
    """

    # The plan refers to the tensors of one model, which a copy or a pickled tool would not share.
    is_copied_when_used = False

    @checked(error=PruneError)
    def __init__(
        self,
        sparsity: Share = 0.5,
        importance: Importance = "l2",
        scope: Scope = "local",
        of: BudgetQuantity = "channels",
        round_to: PositiveInt = 1,
        module: Globs = None,
        exclude: Globs = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self._choice = ChannelOptions(
            ChannelBudget(sparsity, scope, of, round_to), importance, seed,
            listed("module", module, PruneError), listed("exclude", exclude, PruneError),
        )  # fmt: skip
        self._plan: RemovalPlan | None = None
        self._finalized: ChannelPruneResult | None = None
        self._masks: Masks = _no_mask
        self._reductions: dict[Any, list[tuple[str, int, Any]]] = {}  # by op key: type, axis, kept indices
        # One for each open scope: scopes of one tool nest.
        self._simulations: list[ExitStack] = []
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._insert_masks)

    @property
    def result(self) -> ChannelPruneResult:
        """The groups, how many channels are kept, and what is left whole; after `finalize`, what it did."""
        return ChannelPruneResult(self._plan) if self._finalized is None else self._finalized

    def prepare(self, model: Any, *example: Any, **kwargs: Any) -> Any:
        """Find the groups in a call of the model, choose channels, and try the removal out.

        The model is in evaluation mode meanwhile, and as it was afterwards; it runs several times.  Ops that
        do not suit fewer channels are left whole, see `result.left`.  An earlier plan is forgotten, also
        where this call raises.

        Args:
            model: A module of PyTorch, a functional or sequential model of Keras on TensorFlow, or an ONNX
                model as a ModelProto or the path of a file.
            *example: What it is called with; of Keras and ONNX arrays, in the order of the inputs, and of
                ONNX also by their names.
            **kwargs: Inputs of the model by name.

        Returns:
            What the masked model returns.

        Raises:
            PruneError: Where the smaller model would not compute what the masked one does, for another kind
                of model, and for importance "taylor" without gradients.
        """
        subject = _prunable_model(model)
        if self._choice.importance == "taylor" and not subject.has_gradients:
            raise PruneError(
                'importance="taylor" reads gradients, which parameters of PyTorch alone have: choose "l1", '
                '"l2", "random" or a function'
            )
        # A plan of an earlier model is of no use, also if the new one fails.
        self._reset()
        try:
            # Batch statistics and dropout would make masked and smaller model differ.
            with subject.evaluating():
                plan, smaller = make_plan(subject, example, kwargs, self._choice)
                self._set_plan(plan)
                with amanda.apply(self):
                    result = subject(*example, **kwargs)
            _check_same_results(subject.float_arrays(result), subject.float_arrays(smaller))
        except BaseException:
            self._reset()
            raise
        return result

    @checked(error=PruneError)
    def finalize(self, model: Any, remove: bool = False, optimizer: Any = None) -> ChannelPruneResult:
        """Write masks into the weights of a model, or remove the channels.

        A module of PyTorch is changed in place.  A Keras model stays with remove=True, and `result.model` is
        a new one.  An ONNX model or its file stays, and `result.model` is a new ModelProto, to be saved with
        `onnx.save`.  The tool then masks nothing until the next `prepare`.

        Args:
            model: The model that `prepare` was called with.
            remove: Weights become smaller, and so do attributes such as `out_channels` and `num_heads`.
            optimizer: One of PyTorch's whose state is to follow; the parameters stay the same objects.

        Returns:
            `result`, whose `model` is the pruned model.

        Raises:
            PruneError: Before `prepare`, for another model, and where masks do not compute what removal does.
        """
        plan, result = self._checked_plan(model, optimizer), self.result
        if remove:
            extents = plan.subject.extents()
            pruned_model = plan.subject.make_smaller(plan, optimizer)
            smaller_extents = plan.subject.extents()
            result.extents = {
                name: (extent, smaller_extents[name])
                for name, extent in extents.items()
                if smaller_extents[name] != extent
            }
        # Zeros count in a mean over channels; the routines of the scope left them out.
        elif self._reductions:
            types = ", ".join(sorted({reduction.type for reduction in plan.tracing.notes.reductions}))
            raise PruneError(
                f"zeros in the parameters do not compute what is masked: {types} is over the channels that "
                "are kept alone; give remove=True, or exclude the layers whose channels it is over"
            )
        else:
            pruned_model = plan.subject.write_masks(self._masks)
        self._reset()
        result.model = pruned_model
        self._finalized = result
        return result

    def _checked_plan(self, model: Any, optimizer: Any) -> RemovalPlan:
        """Return the plan; raise PruneError for another model, and for an optimizer that cannot follow."""
        plan = self._plan
        if plan is None or not plan.subject.is_same_model(model):
            raise PruneError(
                "ChannelPruneTool.finalize was given a model that it has not met: call "
                "prepare(model, example)"
            )
        if optimizer is not None and not plan.subject.has_gradients:
            raise PruneError(
                f"ChannelPruneTool.finalize was given the optimizer {type(optimizer).__name__}; only one of "
                "PyTorch can follow: leave it, and compile a smaller model of Keras with a new one"
            )
        return plan

    def clear(self) -> None:
        """Forget the groups and what was chosen; call `prepare` again."""
        self._reset()

    def scope_entered(self) -> None:
        """Start to simulate the removal: the planned channels are masked in the ops that can be masked."""
        self._simulations.append(ExitStack())
        if self._plan is not None:
            self._simulations[-1].enter_context(self._plan.subject.simulating())

    def scope_left(self) -> None:
        """Stop the simulation, so that the model runs as without the tool."""
        self._simulations.pop().close()

    def _reset(self) -> None:
        """Forget the plan with its masks, and analyse ops anew."""
        self._plan, self._masks, self._reductions = None, _no_mask, {}
        self._finalized = None
        # Masks are constants of the routines.
        self.analyse_again()

    def _set_plan(self, plan: RemovalPlan) -> None:
        """Set a plan, its masks, and in `_reductions` ops over channels, some removed; analyse ops anew."""
        self._plan = plan
        self._masks = plan.subject.masks(plan.axes())
        for reduction in plan.tracing.notes.reductions:
            keep_mask = plan.kept_label_mask[reduction.labels]
            if not keep_mask.all():
                kept_indices = np.flatnonzero(keep_mask)
                self._reductions.setdefault(reduction.key, []).append(
                    (reduction.type, reduction.axis, kept_indices)
                )
        self.analyse_again()

    def _insert_masks(self, context: amanda.OpContext) -> None:
        """Insert the masks of a forward op's weights, or replace an op that computes over channels."""
        if self._plan is None or context["phase"] != "forward":
            return
        subject = self._plan.subject
        for i, value in enumerate(subject.inputs_for_masks(context)):
            masks = self._masks_of(value)
            if masks is not None:
                context.insert_before_op(masked, inputs=[i], mask=masks)
        for op_type, axis, kept_indices in self._reductions.get(subject.op_key(context), ()):
            if op_type in ("mean", "sum"):
                context.insert_before_op(subject.selected, inputs=[0], axis=axis, indices=kept_indices)
            else:
                # Replaced and not masked: mean and variance of a normalisation over channels would include
                # the zeros.
                compute, names = context.get_computation(), context.get_input_names()
                context.replace_op(
                    subject.compute_over_kept, axis=axis, indices=kept_indices, compute=compute, names=names
                )

    def _masks_of(self, value: Any) -> Any:
        """Return the mask of a value; for a list a list, None for whole tensors; None if all are whole."""
        if isinstance(value, (list, tuple)):
            masks = [self._masks_of(item) for item in value]
            return masks if any(item is not None for item in masks) else None
        return self._masks(value)


def _prunable_model(model: Any) -> PrunableModel:
    """Return a model as pruning sees it, importing no other framework; raise PruneError for other models."""
    # The classes of the model name its framework, so that no framework is imported to ask.
    libraries = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "torch" in libraries:
        import torch

        if isinstance(model, torch.nn.Module):
            from amanda.tools.prune.channels._pytorch import TorchModel

            return TorchModel(model)
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
    """Return None: before `prepare` every weight stays as it is."""


def _check_same_results(
    masked_arrays: Iterator[tuple[Any, float]], smaller_arrays: Iterator[tuple[Any, float]]
) -> None:
    """Raise PruneError where masked and smaller results differ by more than rounding, or have NaN.

    Both are arrays, each with the epsilon of its type.
    """
    for (masked_output, epsilon), (smaller_output, _) in zip(masked_arrays, smaller_arrays, strict=True):
        if masked_output.size:
            # Sums over fewer channels are added in another order: half of the digits may differ, which a
            # wrong removal exceeds by far.
            bound = float(np.abs(masked_output).max()) * epsilon**0.5
            difference = float(np.abs(masked_output - smaller_output).max())
            if np.isnan(difference):
                raise PruneError(
                    "a result of the model has NaN or Inf, so that removal cannot be checked: give an "
                    "example and weights of which the model computes numbers"
                )
            if not difference <= max(bound, epsilon):
                raise PruneError(
                    "the model without its channels computes something else than the masked one, by "
                    f"{difference:.3g} in a result: exclude layers whose outputs an op selects by number"
                )
