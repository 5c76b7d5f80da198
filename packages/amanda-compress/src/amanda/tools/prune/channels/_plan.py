"""The plan of a removal: groups of channels, the budget that keeps the best, and trials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter
from typing import Any, Literal

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError, unit_keep_masks
from amanda.tools.prune.channels._labels import ChannelSets, Family, Work, varying
from amanda.tools.prune.channels._prunable_model import PrunableModel, TracedOp, Tracing, first_unfit_op
from amanda.tools.select import Paths, unmatched


@dataclass(frozen=True)
class Member:
    """The part that an axis of a parameter or buffer has in a group.

    indices: (channels of the group, places along the axis).  is_output: True if these are a layer's outputs.
    """

    name: str
    axis: int
    indices: Any
    is_output: bool

    def __str__(self) -> str:
        """Return name and axis: `layer1.0.conv1.weight:0`."""
        return f"{self.name}:{self.axis}"


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that parameters share.

    roots: the label of each channel.  members: where they lie; the first one is a layer's outputs.
    """

    roots: Any
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """Return the parameter whose outputs are the group's, the first of several."""
        return self.members[0].name

    @property
    def width(self) -> int:
        """Return how many places along the axis a channel has: of a head its features."""
        return int(self.members[0].indices.shape[1])

    def __len__(self) -> int:
        return len(self.roots)

    def channel_slices(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return slices (channels, elements) of weights of more than one axis, by `name:axis`."""
        slices = {}
        for member in self.members:
            tensor = tensors[member.name]
            if tensor.ndim > 1:
                slices[str(member)] = tensor.swapaxes(0, member.axis)[member.indices].reshape(len(self), -1)
        return slices


_WeightAxis = tuple[str, int, bool]
"""Name of a weight, an axis of it, and True if the places along it are outputs of a layer."""


def removable_groups(tracing: Tracing) -> list[ChannelGroup]:
    """Return the groups that can be removed, in the order of their first layers."""
    places_by_root = _removable_places(tracing)
    # Channels with as many places along the same axes are a group.
    roots_by_signature: dict[tuple[tuple[_WeightAxis, int], ...], list[int]] = defaultdict(list)
    for root, places_by_axis in places_by_root.items():
        signature = tuple((weight_axis, len(places)) for weight_axis, places in places_by_axis.items())
        roots_by_signature[signature].append(root)
    groups = []
    for signature, roots in roots_by_signature.items():
        members = []
        for (name, axis, is_output), _ in signature:
            indices = np.array([places_by_root[root][name, axis, is_output] for root in roots])
            members.append(Member(name, axis, indices, is_output))
        # `ChannelGroup` names itself after the first member, which has to be a layer's outputs.
        members.sort(key=lambda member: not member.is_output)
        groups.append(ChannelGroup(np.array(roots), tuple(members)))
    return sorted(groups, key=lambda group: int(group.roots[0]))


def _removable_places(tracing: Tracing) -> dict[int, dict[_WeightAxis, list[int]]]:
    """Return positions along axes of weights by the root, the first label, of each removable channel."""
    labels = tracing.notes.labels
    output_roots, reason_by_whole_root = labels.output_roots(), labels.whole_roots()
    output_labels = labels.output_labels()
    places_by_root: dict[int, dict[_WeightAxis, list[int]]] = defaultdict(dict)
    for name, families in tracing.weight_families.items():
        for family in families:
            (axis,) = varying(family)
            for position, (label, root) in enumerate(_labels_and_roots(labels, family)):
                # A channel that no layer makes, as of an input image, cannot be removed.
                if root in output_roots and root not in reason_by_whole_root:
                    weight_axis = name, axis, label in output_labels
                    places_by_root[root].setdefault(weight_axis, []).append(position)
    return places_by_root


def _labels_and_roots(labels: ChannelSets, family: Family) -> Iterator[tuple[int, int]]:
    """Yield each label of a family with its root, in the order of their places."""
    return zip(family.reshape(-1).tolist(), labels.roots(family).reshape(-1).tolist(), strict=True)


def reasons_left_whole(tracing: Tracing) -> dict[str, str]:
    """Return why outputs of weights are left whole, by the weights' names: the first reason of any output."""
    labels = tracing.notes.labels
    reason_by_whole_root, output_labels = labels.whole_roots(), labels.output_labels()
    reasons: dict[str, str] = {}
    for name, families in tracing.weight_families.items():
        for family in families:
            for label, root in _labels_and_roots(labels, family):
                if label in output_labels and root in reason_by_whole_root:
                    reasons.setdefault(name, reason_by_whole_root[root])
    return reasons


Importance = Literal["l1", "l2", "taylor", "random"] | Callable[[Mapping[str, Any]], Sequence[float]]
Scope = Literal["local", "global"]
BudgetQuantity = Literal["channels", "flops", "latency"]

_HALVINGS = 20  # of the share of channels, which is then found to a millionth


def importance_scores(
    group: ChannelGroup, number: int, tensors: Mapping[str, Any], importance: Importance, seed: int
) -> Any:
    """Return the importance of each channel of a group; the least important is removed first.

    "l1" and "l2" are norms over all weights of more than one axis, over their mean, so that groups compare.
    "taylor" is the sum of (weight * gradient)**2 (Molchanov et al. 2019, eq. 8).  number: of the group, for
    "random".
    Raises PruneError for a function with another result than a number for each channel, and for "taylor"
    without gradients.
    """
    if importance == "random":
        return np.random.Generator(np.random.Philox([seed, number])).random(len(group))
    values = group.channel_slices(tensors)
    if callable(importance):
        return _checked_importances(importance(values), group)
    if importance == "taylor":
        gradients = _gradient_slices(group, tensors)
        rows = np.concatenate([_as_float64(values[name] * gradients[name]) for name in values], 1)
        return np.square(rows).sum(1)
    rows = np.concatenate([_as_float64(tensor) for tensor in values.values()], 1)
    # Means instead of norms: over their mean below, both are the same.
    importances = np.abs(rows).mean(1) if importance == "l1" else np.sqrt(np.square(rows).mean(1))
    return importances / max(importances.mean(), np.finfo(float).tiny)


def _checked_importances(result: Any, group: ChannelGroup) -> Any:
    """Return what a user's function gave as an array; raise PruneError unless it has a number per channel."""
    importances = _as_float64(result) if hasattr(result, "shape") else np.asarray(result, float)
    if importances.shape != (len(group),) or not np.isfinite(importances).all():
        raise PruneError(
            f"importance gave values of shape {importances.shape} for {group.name}; it returns a finite "
            f"number for each of its {len(group)} channels"
        )
    return importances


def _gradient_slices(group: ChannelGroup, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients of weights as `ChannelGroup.channel_slices`; raise PruneError without one."""
    for member in group.members:
        # Vectors, such as biases, do not count, see `ChannelGroup.channel_slices`.
        if tensors[member.name].ndim > 1 and tensors[member.name].grad is None:
            raise PruneError(
                f'importance="taylor" reads gradients, and {member.name} has none: call backward() '
                "before prepare(model, example)"
            )
    return group.channel_slices({member.name: tensors[member.name].grad for member in group.members})


def _as_float64(tensor: Any) -> Any:
    """Return a tensor as an array of float64."""
    tensors = tensors_of(tensor)
    return np.asarray(tensors.to_numpy(tensors.detach(tensor)), float)


class ChannelBudget:
    """A budget of channels, multiplications or time, which chooses the channels that are kept.

    sparsity: the share that is removed, of each group (scope "local") or of all together ("global"), of
    channels or of multiplications.  round_to: what is kept along an axis is a multiple of this.
    A share of the latency is met by `of_channels`, which says what to measure.
    """

    def __init__(self, sparsity: float, scope: Scope, of: BudgetQuantity, round_to: int) -> None:
        self.sparsity, self._scope, self.of, self._round_to = sparsity, scope, of, round_to

    def of_channels(self, sparsity: float) -> ChannelBudget:
        """Return a budget that removes a share of the channels, alike in all else."""
        return ChannelBudget(sparsity, self._scope, "channels", self._round_to)

    def choose_keep_masks(
        self,
        groups: Sequence[ChannelGroup],
        importances: Sequence[Any],
        labels: ChannelSets,
        work: Sequence[Work],
    ) -> list[Any]:
        """Return a keep mask of the channels of each group, at least one of which is kept.

        For a share of the multiplications, the smallest share of channels whose removal suffices is searched.
        """
        if self.of == "channels" or not groups:
            return self._keep_masks_at(self.sparsity, groups, importances)
        too_low, high_enough = 0.0, 1.0  # shares of channels that are removed
        for _ in range(_HALVINGS):
            share = (too_low + high_enough) / 2
            keep_masks = self._keep_masks_at(share, groups, importances)
            kept_label_mask = mask_of_kept_labels(labels, groups, keep_masks)
            if kept_share_of_work(work, kept_label_mask) > 1 - self.sparsity:
                too_low = share
            else:
                high_enough = share
        return self._keep_masks_at(high_enough, groups, importances)

    def _keep_masks_at(
        self, sparsity: float, groups: Sequence[ChannelGroup], importances: Sequence[Any]
    ) -> list[Any]:
        """Return each group's keep mask at a share of removed channels, rounded up; its best one stays."""
        # The best channel of each group is never removed: a layer without channels cannot run.
        guarded_importances = [
            np.where(np.arange(len(scores)) == scores.argmax(), np.inf, scores) for scores in importances
        ]
        # A channel is a unit, see `unit_keep_masks`, of as many elements as it has places along the axis.
        units = [(scores, group.width) for scores, group in zip(guarded_importances, groups, strict=True)]
        if self._scope == "global":
            keep_masks = unit_keep_masks(units, sparsity) if units else []
        else:
            keep_masks = [unit_keep_masks([unit], sparsity)[0] for unit in units]
        return [
            self._round_up(keep_mask, scores, group)
            for keep_mask, scores, group in zip(keep_masks, guarded_importances, groups, strict=True)
        ]

    def _round_up(self, keep_mask: Any, importances: Any, group: ChannelGroup) -> Any:
        """Return a mask that keeps the best further channels until the axis is a multiple of `round_to`."""
        count = max(int(keep_mask.sum()), 1)
        while count < len(group) and count * group.width % self._round_to:
            count += 1
        rounded_mask = np.zeros(len(group), bool)
        rounded_mask[np.argsort(-importances, kind="stable")[:count]] = True
        return rounded_mask


def mask_of_kept_labels(
    labels: ChannelSets, groups: Sequence[ChannelGroup], keep_masks: Sequence[Any]
) -> Any:
    """Return a mask of all labels, True for those whose channel is kept; keep_masks: of each group."""
    dropped_roots = [group.roots[~keep_mask] for group, keep_mask in zip(groups, keep_masks, strict=True)]
    roots = labels.roots(np.arange(labels.count))
    return ~np.isin(roots, np.concatenate([np.zeros(0, np.int64), *dropped_roots]))


def kept_share_of_work(work: Sequence[Work], kept_label_mask: Any) -> float:
    """Return the share of multiplications that remain; 1 without any."""

    def kept_share(channels: Family | None) -> float:
        """Return the share of channels that is kept."""
        return 1.0 if channels is None else float(kept_label_mask[channels].mean())

    total = sum(product.multiplications for product in work)
    remaining = sum(
        product.multiplications * kept_share(product.outputs) * kept_share(product.inputs) for product in work
    )
    return remaining / total if total else 1.0


_TIMED_HALVINGS = 6  # of the share of channels: each tries a removal and takes time
_TIMED_CALLS = 8  # of a model, of which the fastest counts


@dataclass(frozen=True)
class ChannelOptions:
    """Options of the tool that choose channels.

    module, exclude: globs of layers' paths; None for all layers, and for none.
    """

    budget: ChannelBudget
    importance: Any
    seed: int
    module: Sequence[str] | None
    exclude: Sequence[str] | None


@dataclass
class RemovalPlan:
    """Which channels of a model are kept and which removed, from a tracing of the model.

    groups, keep_masks: the groups, and masks of their kept channels.  whole_layers: weights whose outputs
    are left whole, and the reasons.  kept_label_mask: by label, True where its channel is kept.
    remaining_work: share of multiplications.  latency: share of the time of a call, where it was measured.
    """

    subject: PrunableModel
    tracing: Tracing
    groups: list[ChannelGroup] = field(default_factory=list)
    keep_masks: list[Any] = field(default_factory=list)
    whole_layers: dict[str, str] = field(default_factory=dict)
    kept_label_mask: Any = None
    remaining_work: float = 1.0
    latency: float | None = None

    def choose_channels(self, choice: ChannelOptions) -> None:
        """Settle blocks; set groups, keep masks, remaining work, and reasons for layers that stay whole."""
        tensors = self.subject.tensors()
        labels, work = self.tracing.notes.labels, self.tracing.notes.work
        # From here on each family varies along one axis: groups are final.
        labels.settle_blocks()
        self.groups = removable_groups(self.tracing)
        importances = [
            importance_scores(group, i, tensors, choice.importance, choice.seed)
            for i, group in enumerate(self.groups)
        ]
        self.keep_masks = choice.budget.choose_keep_masks(self.groups, importances, labels, work)
        self.kept_label_mask = mask_of_kept_labels(labels, self.groups, self.keep_masks)
        self.remaining_work = kept_share_of_work(work, self.kept_label_mask)
        self.whole_layers = reasons_left_whole(self.tracing) | self.tracing.unfollowed

    def axes(self) -> Iterator[tuple[str, int, Any]]:
        """Yield the axes of parameters and buffers that become shorter, and which places on them are kept."""
        for name, families in self.tracing.weight_families.items():
            for family in families:
                (axis,) = varying(family)
                keep_mask = self.kept_label_mask[family].reshape(-1)
                if not keep_mask.all():
                    yield name, axis, keep_mask


def leave_unselected(plan: RemovalPlan, choice: ChannelOptions) -> None:
    """Leave whole what the options do not select; raise PruneError for an option that fits no weight."""
    labels = plan.tracing.notes.labels
    output_families_by_layer = _outputs_by_layer(plan.tracing)
    is_chosen, is_excluded = Paths("module", choice.module), Paths("exclude", choice.exclude or ())
    chosen_paths = {path for path in output_families_by_layer if is_chosen(path)}
    excluded_paths = {path for path in output_families_by_layer if is_excluded(path)}
    noun = "layer with channels"
    texts = [*unmatched([is_chosen], noun=noun), *unmatched([is_excluded], "excluded", noun)]
    if texts:
        raise PruneError("; ".join(texts))
    for path, output_families in output_families_by_layer.items():
        if path in excluded_paths:
            labels.leave_whole(output_families, f"{path} is excluded")
    if choice.module is None:
        return
    # Layers that share channels with a selected layer lose them too.
    chosen_roots: set[int] = set()
    for path in chosen_paths:
        for family in output_families_by_layer[path]:
            chosen_roots.update(labels.roots(family).reshape(-1).tolist())
    for family in chain.from_iterable(output_families_by_layer.values()):
        unselected = family[~np.isin(labels.roots(family), list(chosen_roots))]
        labels.leave_whole(unselected, "`module` does not select it")


def _outputs_by_layer(tracing: Tracing) -> dict[str, list[Family]]:
    """Return the families of the channels that layers compute, by the layers' paths."""
    output_labels = tracing.notes.labels.output_labels()
    outputs_by_layer: dict[str, list[Family]] = {}
    for name, families in tracing.weight_families.items():
        outputs = [family for family in families if output_labels.issuperset(family.reshape(-1).tolist())]
        if outputs:
            outputs_by_layer.setdefault(tracing.layer(name), []).extend(outputs)
    return outputs_by_layer


def make_plan(
    subject: PrunableModel, example: Sequence[Any], kwargs: Mapping[str, Any], choice: ChannelOptions
) -> tuple[RemovalPlan, Any]:
    """Return a plan, and the smaller model's result; channels that an op needs are left whole.

    Runs both models.  Raises PruneError where the smaller one cannot run whatever is left whole.
    """
    subject(*example, **kwargs)  # some models keep tensors of their first call
    tracing = subject.tracing()
    tracing.follow(example, kwargs)
    plan = RemovalPlan(subject, tracing)
    leave_unselected(plan, choice)
    if choice.budget.of == "latency":
        return plan, _meet_latency(plan, choice, example, kwargs)
    return plan, _try_until_it_runs(plan, choice, example, kwargs)


def _meet_latency(
    plan: RemovalPlan, choice: ChannelOptions, example: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Choose the smallest share of channels whose removal saves the budget's share of the time.

    Sets `plan.latency`; returns the smaller model's result.
    """
    labels = plan.tracing.notes.labels

    def try_sparsity(sparsity: float) -> Any:
        """Choose channels for a share of them, with no more left whole than at first; return the result."""
        # Channels that cannot be removed at one share may be removable at another.
        plan.tracing.notes.labels = deepcopy(labels)
        budget = choice.budget.of_channels(sparsity)
        return _try_until_it_runs(plan, replace(choice, budget=budget), example, kwargs)

    too_low, high_enough = 0.0, 1.0  # shares of channels that are removed
    for _ in range(_TIMED_HALVINGS):
        share = (too_low + high_enough) / 2
        try_sparsity(share)
        if _share_of_time(plan, example, kwargs) > 1 - choice.budget.sparsity:
            too_low = share
        else:
            high_enough = share
    result = try_sparsity(high_enough)
    plan.latency = _share_of_time(plan, example, kwargs)
    return result


def _try_until_it_runs(
    plan: RemovalPlan, choice: ChannelOptions, example: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Choose channels, and leave whole what the model needs; return the smaller model's result.

    Raises PruneError where nothing further can be left whole.
    """
    tracing = plan.tracing
    while True:  # each round leaves more channels whole
        plan.choose_channels(choice)
        trial_ops: Sequence[TracedOp] = ()
        result, error = None, ""  # error: of the trial, "" for one that ran
        removal = plan.subject.removal(plan)
        try:
            removal.apply()
            trial = plan.subject.tracing()
            trial_ops = trial.traced_ops  # also of a trial that fails: the ops until then
            result = trial.follow(example, kwargs)
        except Exception as raised:  # of any kind: the model's code does not suit the sizes
            error = f"{type(raised).__name__}: {raised}"
        finally:
            removal.undo()
        unfit_op = first_unfit_op(tracing, plan.kept_label_mask, trial_ops)
        if unfit_op is None and not error:
            return result
        if unfit_op is None or not _leave_op_whole(tracing, unfit_op, error):
            where = "" if unfit_op is None else f" at {unfit_op.place}"
            raise PruneError(
                f"ChannelPruneTool cannot remove channels of this model: it fails{where}: {error}"
            )


def _share_of_time(plan: RemovalPlan, example: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Run both models, and return the time of a call of the smaller one as a share of the whole one's."""
    whole_seconds = _seconds_of_call(plan.subject, example, kwargs)
    removal = plan.subject.removal(plan)
    try:
        removal.apply()
        return _seconds_of_call(plan.subject, example, kwargs) / whole_seconds
    finally:
        removal.undo()


def _seconds_of_call(subject: PrunableModel, example: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the time of the fastest of several calls without tools: other work disturbs that one least."""
    seconds = []
    for _ in range(_TIMED_CALLS):
        start = perf_counter()
        with amanda.disabled():
            subject.run_to_completion(*example, **kwargs)
        seconds.append(perf_counter() - start)
    return min(seconds)


def _leave_op_whole(tracing: Tracing, unfit_op: TracedOp, error: str) -> bool:
    """Leave the channels whole that an op reads and makes, and those of other ops of its type and line.

    Where these are whole already, leave those of all ops of its module, or of the innermost module around
    it that has channels to leave.  Returns False if every channel is whole already.
    """
    labels = tracing.notes.labels
    whole_count = len(labels.whole_roots())
    why = error.splitlines()[0] if error else "its result would have other channels"
    reason = f"{unfit_op.place} at {unfit_op.source} does not suit fewer of them ({why})"
    type_and_line = unfit_op.type, unfit_op.source
    ops = [op for op in tracing.traced_ops if (op.type, op.source) == type_and_line]
    path = unfit_op.module
    while True:
        for op in ops:
            for families, _ in (*op.inputs, *op.outputs):
                labels.leave_whole(families, reason)
        labels.settle_blocks()
        if len(labels.whole_roots()) > whole_count:
            return True
        if len(ops) == len(tracing.traced_ops):
            return False
        # No channel of these ops was left to leave: next come all ops of the module, then of the one around.
        prefix = f"{path}." if path else ""
        ops = [op for op in tracing.traced_ops if f"{op.module}.".startswith(prefix)]
        path = path.rpartition(".")[0]
