"""Importance of channels, and the budget that chooses which are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError, lowest_units_dropped
from amanda.tools.prune.channels._call import Work
from amanda.tools.prune.channels._groups import ChannelGroup
from amanda.tools.prune.channels._labels import Labels

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
        given = importance(values)
        found = _exact(given) if hasattr(given, "shape") else np.asarray(given, float)
        if found.shape != (len(group),) or not np.isfinite(found).all():
            raise PruneError(
                f"importance gave values of shape {found.shape} for {group.name}; it gives a finite number "
                f"for each of its {len(group)} channels"
            )
        return found
    if importance == "taylor":
        for member in group.members:
            if tensors[member.name].ndim > 1 and tensors[member.name].grad is None:
                raise PruneError(
                    f'importance="taylor" reads gradients, and {member.name} has none: call backward() '
                    "before prepare(model, example)"
                )
        gradients = group.values({one.name: tensors[one.name].grad for one in group.members})
        rows = np.concatenate([_exact(values[name] * gradients[name]) for name in values], 1)
        return np.square(rows).sum(1)
    rows = np.concatenate([_exact(one) for one in values.values()], 1)
    found = np.abs(rows).mean(1) if importance == "l1" else np.sqrt(np.square(rows).mean(1))
    return found / max(found.mean(), np.finfo(float).tiny)


def _exact(tensor: Any) -> Any:
    """Return a tensor as an array of float64."""
    tensors = tensors_of(tensor)
    return np.asarray(tensors.to_numpy(tensors.detach(tensor)), float)


class Budget:
    """Chooses the channels that are kept.

    sparsity: the share that is removed, of each group (scope "local") or of all together ("global"), of
    channels or of multiplications.  round_to: what is kept along an axis is a multiple of this.
    A share of the latency is met by `of_channels`, which says what to measure.
    """

    def __init__(self, sparsity: float, scope: Scope, of: Of, round_to: int) -> None:
        self.sparsity, self._scope, self.of, self._round_to = sparsity, scope, of, round_to

    def of_channels(self, sparsity: float) -> Budget:
        """Return a budget that removes a share of the channels, alike in all else."""
        return Budget(sparsity, self._scope, "channels", self._round_to)

    def kept(
        self, groups: Sequence[ChannelGroup], worth: Sequence[Any], labels: Labels, work: Sequence[Work]
    ) -> list[Any]:
        """Return for each group which of its channels are kept; of each at least one is."""
        if self.of == "channels" or not groups:
            return self._at(self.sparsity, groups, worth)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            alive = alive_labels(labels, groups, self._at(middle, groups, worth))
            if share_of_work(work, alive) > 1 - self.sparsity:
                low = middle
            else:
                high = middle
        return self._at(high, groups, worth)

    def _at(self, sparsity: float, groups: Sequence[ChannelGroup], worth: Sequence[Any]) -> list[Any]:
        guarded = [np.where(np.arange(len(one)) == one.argmax(), np.inf, one) for one in worth]
        units = [(one, group.width) for one, group in zip(guarded, groups, strict=True)]
        if self._scope == "global":
            kept = lowest_units_dropped(units, sparsity) if units else []
        else:
            kept = [lowest_units_dropped([one], sparsity)[0] for one in units]
        return [self._rounded(*one) for one in zip(kept, guarded, groups, strict=True)]

    def _rounded(self, kept: Any, worth: Any, group: ChannelGroup) -> Any:
        """Return which channels are kept, the best of the others too, so that their number is a multiple."""
        count = max(int(kept.sum()), 1)
        while count < len(group) and count * group.width % self._round_to:
            count += 1
        found = np.zeros(len(group), bool)
        found[np.argsort(-worth, kind="stable")[:count]] = True
        return found


def alive_labels(labels: Labels, groups: Sequence[ChannelGroup], kept: Sequence[Any]) -> Any:
    """Return for each label whether its channel is kept."""
    dropped = [group.roots[~own] for group, own in zip(groups, kept, strict=True)]
    roots = labels.roots(np.arange(labels.count))
    return ~np.isin(roots, np.concatenate([np.zeros(0, np.int64), *dropped]))


def share_of_work(work: Sequence[Work], alive: Any) -> float:
    """Return the share of multiplications that are left."""
    total = sum(one.multiplications for one in work)
    left = sum(
        one.multiplications
        * (1.0 if one.outputs is None else float(alive[one.outputs].mean()))
        * (1.0 if one.inputs is None else float(alive[one.inputs].mean()))
        for one in work
    )
    return left / total if total else 1.0
