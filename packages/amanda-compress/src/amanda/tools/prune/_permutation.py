"""A permutation of input channels under which N:M sparsity keeps more of a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from amanda.options import NonNegativeInt, PositiveInt, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Floats: TypeAlias = "NDArray[np.float64]"


@checked(error=PruneError)
def input_permutation(
    weight: Any, n: PositiveInt = 2, m: PositiveInt = 4, rounds: NonNegativeInt = 1000
) -> NDArray[np.intp]:
    """Return an order of the channels along the last axis, by swaps as long as one keeps more magnitude.

    weight: an array (..., k), k divisible by m.  Returns k positions: of `weight[..., permutation]` an n:m
    mask keeps at least as much as of `weight`.  Each round swaps the pairs that gain most, none of them in
    the same group of m as another; no swap gains after the last, or `rounds` are over.
    Raises ShapeError as `n_m_mask` does.
    Source: Pool & Yu 2021, "Channel permutations for N:M sparsity" (greedy channel swaps).
    """
    channels = np.abs(np.asarray(weight, np.float64)).reshape(-1, np.shape(weight)[-1]).T.copy()
    k = len(channels)
    if not 0 < n <= m or k % m:
        raise ShapeError(f"{n}:{m} does not fit {k} channels: their number is a multiple of {m}")
    order = np.arange(k)
    if n == m:
        return order
    group = order // m
    without, joining = np.empty(k), np.empty((k, k))  # kept of a channel's group without it; more with each
    changed = np.arange(k // m)
    for _ in range(rounds):
        for one in changed:
            for i in order[one * m : (one + 1) * m]:
                others = [j for j in order[one * m : (one + 1) * m] if j != i]
                largest = np.sort(channels[others], 0)[-n:]
                without[i], joining[i] = largest.sum(), np.maximum(channels - largest[0], 0).sum(1)
        of_one = without[:, None] + joining - (without + np.diag(joining))[:, None]
        gains = of_one + of_one.T
        gains[group[:, None] >= group[None, :]] = 0
        changed = _swap_best(gains, order, group, 1e-9 * channels.sum())
        if not len(changed):
            break
    return order


def _swap_best(
    gains: _Floats, order: NDArray[np.intp], group: NDArray[np.intp], least: float
) -> NDArray[np.intp]:
    """Swap pairs in order of what they gain, no group twice; return the groups that changed."""
    place = np.argsort(order)
    left, right = np.nonzero(gains > least)
    touched: set[int] = set()
    for best in np.argsort(-gains[left, right], kind="stable"):
        i, j = left[best], right[best]
        if not {group[i], group[j]} & touched:
            touched |= {group[i], group[j]}
            order[[place[i], place[j]]] = j, i
            group[[i, j]] = group[[j, i]]
    return np.array(sorted(touched), np.intp)
