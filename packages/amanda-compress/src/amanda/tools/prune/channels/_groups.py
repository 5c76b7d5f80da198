"""Groups of channels that are removed together, their importance, and the budget that keeps the best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError, unit_keep_masks
from amanda.tools.prune.channels._labels import ChannelSets, Work, varying
from amanda.tools.prune.channels._tracing import Tracing


@dataclass(frozen=True)
class Member:
    """The part that an axis of a parameter or buffer has in a group.

    indices: (channels of the group, places along the axis).  is_made: whether these are a layer's outputs.
    """

    name: str
    axis: int
    indices: Any
    is_made: bool

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

    def values(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return for each weight of the group its slices (channels, elements), by `name:axis`."""
        slices = {}
        for member in self.members:
            tensor = tensors[member.name]
            if tensor.ndim > 1:
                slices[str(member)] = tensor.swapaxes(0, member.axis)[member.indices].reshape(len(self), -1)
        return slices


def groups_of(tracing: Tracing) -> list[ChannelGroup]:
    """Return the groups that can be removed, in the order of their first layers."""
    labels = tracing.notes.labels
    produced, whole_roots, output_labels = labels.output_roots(), labels.whole_roots(), labels.output_labels()
    places: dict[int, dict[tuple[str, int, bool], list[int]]] = defaultdict(dict)
    for name, families in tracing.channels.items():
        for family in families:
            (axis,) = varying(family)
            for i, (label, root) in enumerate(
                zip(family.reshape(-1).tolist(), labels.roots(family).reshape(-1).tolist(), strict=True)
            ):
                if root in produced and root not in whole_roots:
                    places[root].setdefault((name, axis, label in output_labels), []).append(i)
    roots_by_axes: dict[Any, list[int]] = defaultdict(list)
    for root, axes in places.items():
        roots_by_axes[tuple((*key, len(positions)) for key, positions in axes.items())].append(root)
    groups = []
    for key, roots in roots_by_axes.items():
        members = [
            Member(name, axis, np.array([places[root][name, axis, is_made] for root in roots]), is_made)
            for name, axis, is_made, _ in key
        ]
        members.sort(key=lambda member: not member.is_made)
        groups.append(ChannelGroup(np.array(roots), tuple(members)))
    return sorted(groups, key=lambda group: int(group.roots[0]))


def reasons_left_whole(tracing: Tracing) -> dict[str, str]:
    """Return why the outputs of weights are left whole, by the weights' names."""
    labels = tracing.notes.labels
    whole_roots, output_labels = labels.whole_roots(), labels.output_labels()
    reasons: dict[str, str] = {}
    for name, families in tracing.channels.items():
        for family in families:
            for label, root in zip(
                family.reshape(-1).tolist(), labels.roots(family).reshape(-1).tolist(), strict=True
            ):
                if label in output_labels and root in whole_roots:
                    reasons.setdefault(name, whole_roots[root])
    return reasons


Importance = Literal["l1", "l2", "taylor", "random"] | Callable[[Mapping[str, Any]], Sequence[float]]
Scope = Literal["local", "global"]
Of = Literal["channels", "flops", "latency"]

_HALVINGS = 20


def scores(
    group: ChannelGroup, number: int, tensors: Mapping[str, Any], importance: Importance, seed: int
) -> Any:
    """Return what each channel of a group is worth: the least is removed first.

    "l1" and "l2" are norms over all weights of the group, over their mean, so that groups compare.  "taylor"
    is the sum of (weight * gradient)**2 (Molchanov et al. 2019, eq. 8).
    """
    if importance == "random":
        return np.random.Generator(np.random.Philox([seed, number])).random(len(group))
    values = group.values(tensors)
    if callable(importance):
        result = importance(values)
        importances = _exact(result) if hasattr(result, "shape") else np.asarray(result, float)
        if importances.shape != (len(group),) or not np.isfinite(importances).all():
            raise PruneError(
                f"importance gave values of shape {importances.shape} for {group.name}; it returns a finite "
                f"number for each of its {len(group)} channels"
            )
        return importances
    if importance == "taylor":
        for member in group.members:
            if tensors[member.name].ndim > 1 and tensors[member.name].grad is None:
                raise PruneError(
                    f'importance="taylor" reads gradients, and {member.name} has none: call backward() '
                    "before prepare(model, example)"
                )
        gradients = group.values({member.name: tensors[member.name].grad for member in group.members})
        rows = np.concatenate([_exact(values[name] * gradients[name]) for name in values], 1)
        return np.square(rows).sum(1)
    rows = np.concatenate([_exact(tensor) for tensor in values.values()], 1)
    importances = np.abs(rows).mean(1) if importance == "l1" else np.sqrt(np.square(rows).mean(1))
    return importances / max(importances.mean(), np.finfo(float).tiny)


def _exact(tensor: Any) -> Any:
    """Return a tensor as an array of float64."""
    tensors = tensors_of(tensor)
    return np.asarray(tensors.to_numpy(tensors.detach(tensor)), float)


class Budget:
    """A budget of channels, multiplications or time, which chooses the channels that are kept.

    sparsity: the share that is removed, of each group (scope "local") or of all together ("global"), of
    channels or of multiplications.  round_to: what is kept along an axis is a multiple of this.
    A share of the latency is met by `of_channels`, which says what to measure.
    """

    def __init__(self, sparsity: float, scope: Scope, of: Of, round_to: int) -> None:
        self.sparsity, self._scope, self.of, self._round_to = sparsity, scope, of, round_to

    def of_channels(self, sparsity: float) -> Budget:
        """Return a budget that removes a share of the channels, alike in all else."""
        return Budget(sparsity, self._scope, "channels", self._round_to)

    def choose(
        self,
        groups: Sequence[ChannelGroup],
        importances: Sequence[Any],
        labels: ChannelSets,
        work: Sequence[Work],
    ) -> list[Any]:
        """Return a keep mask of the channels of each group, at least one of which is kept."""
        if self.of == "channels" or not groups:
            return self._keep_masks_at(self.sparsity, groups, importances)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            alive = alive_labels(labels, groups, self._keep_masks_at(middle, groups, importances))
            if share_of_work(work, alive) > 1 - self.sparsity:
                low = middle
            else:
                high = middle
        return self._keep_masks_at(high, groups, importances)

    def _keep_masks_at(
        self, sparsity: float, groups: Sequence[ChannelGroup], importances: Sequence[Any]
    ) -> list[Any]:
        # The best channel of each group is never removed: a layer without channels cannot run.
        guarded = [
            np.where(np.arange(len(scores)) == scores.argmax(), np.inf, scores) for scores in importances
        ]
        units = [(scores, group.width) for scores, group in zip(guarded, groups, strict=True)]
        if self._scope == "global":
            keep_masks = unit_keep_masks(units, sparsity) if units else []
        else:
            keep_masks = [unit_keep_masks([unit], sparsity)[0] for unit in units]
        return [self._round_up(*group) for group in zip(keep_masks, guarded, groups, strict=True)]

    def _round_up(self, keep_mask: Any, importances: Any, group: ChannelGroup) -> Any:
        """Return a mask that keeps the best channels too until their number is a multiple of `round_to`."""
        count = max(int(keep_mask.sum()), 1)
        while count < len(group) and count * group.width % self._round_to:
            count += 1
        rounded_mask = np.zeros(len(group), bool)
        rounded_mask[np.argsort(-importances, kind="stable")[:count]] = True
        return rounded_mask


def alive_labels(labels: ChannelSets, groups: Sequence[ChannelGroup], keep_masks: Sequence[Any]) -> Any:
    """Return a mask of all labels: True for those whose channel is kept."""
    dropped = [group.roots[~keep_mask] for group, keep_mask in zip(groups, keep_masks, strict=True)]
    roots = labels.roots(np.arange(labels.count))
    return ~np.isin(roots, np.concatenate([np.zeros(0, np.int64), *dropped]))


def share_of_work(work: Sequence[Work], alive: Any) -> float:
    """Return the share of multiplications that remain."""
    total = sum(product.multiplications for product in work)
    remaining = sum(
        product.multiplications
        * (1.0 if product.outputs is None else float(alive[product.outputs].mean()))
        * (1.0 if product.inputs is None else float(alive[product.inputs].mean()))
        for product in work
    )
    return remaining / total if total else 1.0
