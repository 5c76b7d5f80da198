"""Masks: against torch.nn.utils.prune, against a search over all patterns, against plain loops."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import prune

from amanda.tools.prune import (
    PruneError,
    ShapeError,
    channel_mask,
    cubic_sparsity,
    element_mask,
    input_permutation,
    n_m_mask,
    tile_mask,
)
from amanda.tools.prune._masks import (
    channel_keep_masks,
    element_keep_masks,
    regrown_keep_masks,
    tile_keep_masks,
)
from amanda.tools.prune._tool import PruneSchedule

Array = NDArray[Any]


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 8, 3, 3)


def test_a_mask_of_elements_is_that_of_l1_unstructured(weight: Tensor) -> None:
    for sparsity in (0, 0.013, 0.5, 0.97, 1):
        layer = nn.Conv2d(8, 16, 3)
        layer.weight.data = weight.clone()
        prune.l1_unstructured(layer, "weight", float(sparsity))
        assert torch.equal(element_mask(weight, sparsity), layer.weight_mask)


def test_random_scores_give_the_mask_of_random_unstructured(weight: Tensor) -> None:
    layer = nn.Conv2d(8, 16, 3)
    torch.manual_seed(7)
    prune.random_unstructured(layer, "weight", 0.4)
    torch.manual_seed(7)
    (kept,) = element_keep_masks([-torch.rand_like(weight)], 0.4)
    assert torch.equal(kept.float(), layer.weight_mask)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_mask_of_channels_is_that_of_ln_structured(weight: Tensor, norm: int, axis: int) -> None:
    layer = nn.Conv2d(8, 16, 3)
    layer.weight.data = weight.clone()
    prune.ln_structured(layer, "weight", 0.3, n=norm, dim=axis)
    assert torch.equal(channel_mask(weight, 0.3, norm, axis), layer.weight_mask)


def best_pattern(group: Array, n: int) -> Array:
    """Of all patterns that keep n, the one that keeps most."""
    patterns = [np.isin(np.arange(len(group)), kept) for kept in combinations(range(len(group)), n)]
    return max(patterns, key=lambda pattern: abs(group)[pattern].sum())


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (3, 3)])
def test_an_n_m_mask_keeps_most_of_all_patterns(n: int, m: int) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 2 * m * 3))
    wanted = np.concatenate([best_pattern(group, n) for group in weight.reshape(-1, m)])
    assert np.array_equal(n_m_mask(weight, n, m).reshape(-1), wanted)
    assert torch.equal(n_m_mask(torch.tensor(weight), n, m).view(-1), torch.tensor(wanted).double())


def tiles_by_loops(matrix: Array, sparsity: float, granularity: int) -> Array:
    """Columns, then rows of tiles, one after another."""
    k, n = matrix.shape
    share = 1 - (1 - sparsity) ** 0.5
    by_norm = sorted(range(n), key=lambda j: sum(matrix[i, j] ** 2 for i in range(k)))
    columns = sorted(by_norm[round(share * n) :])
    tiles = [columns[i : i + granularity] for i in range(0, len(columns), granularity)]
    segments = [(t, i) for t in range(len(tiles)) for i in range(k)]
    segments.sort(key=lambda one: np.mean([matrix[one[1], j] ** 2 for j in tiles[one[0]]]))
    total, dropped, best = k * len(columns), 0, (float("inf"), 0)
    for count, (t, _) in enumerate([*segments, (0, 0)]):
        best = min(best, (abs(dropped - share * total), count))
        dropped += len(tiles[t])
    mask = np.zeros((k, n))
    for t, i in segments[best[1] :]:
        mask[i, tiles[t]] = 1
    return mask


@pytest.mark.parametrize(("shape", "granularity"), [((12, 16), 4), ((12, 16), 128), ((9, 14), 5)])
def test_a_mask_of_tiles_is_what_loops_find(shape: tuple[int, int], granularity: int) -> None:
    matrix = np.random.default_rng(1).standard_normal(shape)
    mask = tile_mask(matrix, 0.75, granularity)
    assert np.array_equal(mask, tiles_by_loops(matrix, 0.75, granularity))
    assert abs(1 - mask.mean() - 0.75) < 0.06
    kept = mask[:, mask.any(0)]
    for first in range(0, kept.shape[1], granularity):
        tile = kept[:, first : first + granularity]
        assert (tile == tile[:, :1]).all()


def test_masks_are_of_the_weights_kind_type_and_shape(weight: Tensor) -> None:
    functions = (element_mask, lambda one: n_m_mask(one, 1, 3), channel_mask)
    for function in functions:
        mask = function(weight)
        assert np.array_equal(function(weight.numpy()), mask.numpy())
        assert np.array_equal(function(tf.constant(weight.numpy())).numpy(), mask.numpy())
        half = function(weight.half())
        assert (half.dtype, half.shape) == (torch.float16, weight.shape)
        assert function(tf.cast(weight.numpy(), tf.bfloat16)).dtype == tf.bfloat16
        assert function(nn.Parameter(weight)).requires_grad is False


def test_of_equal_magnitudes_the_first_are_dropped() -> None:
    assert element_mask(np.ones(5), 0.4).tolist() == [0, 0, 1, 1, 1]
    for ones in (np.ones((1, 8)), torch.ones(1, 8)):
        assert n_m_mask(ones).tolist() == [[0, 0, 1, 1] * 2]


def test_a_common_budget_drops_the_smallest_of_all(weight: Tensor) -> None:
    small, large = abs(weight), abs(weight) * 100
    kept_small, kept_large = element_keep_masks([small, large], 0.5)
    assert not kept_small.any() or kept_large.float().mean() > 0.95
    assert int(kept_small.sum() + kept_large.sum()) == weight.numel()
    one, other = channel_keep_masks([small, large[:8, :2]], 0.8)
    dropped = int((~one).sum() + (~other).sum())
    assert abs(dropped - 0.8 * (1152 + 144)) <= 72  # a filter of the first weight has 72 elements
    assert other.all()
    weak, _ = channel_keep_masks([small / 1e6, large], 0.5)
    assert weak.sum() == 72  # the best filter of each weight stays
    assert [kept.shape for kept in tile_keep_masks([small[0, 0], large[:, :, 0, 0]], 0.5)] == [
        (3, 3),
        (16, 8),
    ]


def test_a_permutation_of_channels_lets_more_be_kept() -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((32, 16)) * np.repeat([4.0, 1.0], 8)  # the large ones side by side
    order = input_permutation(weight)
    assert sorted(order) == list(range(16))

    def kept(one: Array) -> float:
        return float((abs(one) * n_m_mask(one)).sum())

    assert kept(weight[:, order]) > 1.1 * kept(weight)
    small = random.standard_normal((5, 8))
    best = max(kept(small[:, [*group, *(set(range(8)) - set(group))]]) for group in combinations(range(8), 4))
    assert kept(small[:, input_permutation(small)]) >= 0.99 * best
    assert input_permutation(weight, 4, 4).tolist() == list(range(16))


def test_what_is_exchanged_is_what_rigl_says() -> None:
    random = np.random.default_rng(2)
    magnitudes, gradient = random.random(40), random.random(40)
    magnitudes[20:] = -np.inf
    (kept,) = regrown_keep_masks([magnitudes], [gradient], 0.5, 0.3)
    smallest = sorted(range(20), key=lambda i: magnitudes[i])[:6]
    candidates = [*smallest, *range(20, 40)]
    grown = sorted(candidates, key=lambda i: -gradient[i])[:6]
    assert set(np.flatnonzero(kept)) == (set(range(20)) - set(smallest)) | set(grown)
    (sparser,) = regrown_keep_masks([magnitudes], [gradient], 0.75, 0.0)
    assert set(np.flatnonzero(sparser)) == set(sorted(range(20), key=lambda i: magnitudes[i])[10:])


def test_the_cubic_schedule_is_that_of_zhu_and_gupta() -> None:
    schedule = PruneSchedule(0.8, "cubic", 0.2, begin=10, end=50, frequency=15)
    updates = [schedule.last_update(step) for step in (9, 10, 24, 25, 40, 49, 50, 90)]
    assert updates == [None, 10, 10, 25, 40, 40, 50, 50]
    assert schedule.sparsity_at(10) == pytest.approx(0.2)
    assert schedule.sparsity_at(25) == pytest.approx(0.8 - 0.6 * (1 - 15 / 40) ** 3)
    assert schedule.sparsity_at(50) == cubic_sparsity(99, 10, 50, 0.2, 0.8) == 0.8
    assert [PruneSchedule(begin=3).last_update(step) for step in (2, 3, 100)] == [None, 3, 3]
    assert [PruneSchedule(frequency=4).last_update(step) for step in (0, 3, 9)] == [0, 0, 8]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: n_m_mask(np.ones((2, 6))), ["2:4", "(2, 6)", "multiple of 4"]),
        (lambda: n_m_mask(np.ones((2, 8)), 5, 4), ["5:4"]),
        (lambda: tile_mask(np.ones((2, 2, 2))), ["(2, 2, 2)", "matrix"]),
        (lambda: tile_mask(np.ones((2, 2)), 0.5, 0), ["granularity is 0"]),
        (lambda: element_mask(np.ones(3), 1.5), ["1.5", "0 to 1"]),
        (lambda: channel_mask(np.ones((3, 3)), 0.5, 3), ["norm is 3"]),
        (lambda: input_permutation(np.ones((2, 6))), ["2:4", "6 channels"]),
        (lambda: PruneSchedule(kind="cubic"), ["cubic", "end"]),
        (lambda: PruneSchedule(begin=5, end=5), ["end is 5", "begin 5"]),
        (lambda: PruneSchedule(frequency=0), ["frequency is 0"]),
        (lambda: PruneSchedule(begin=-1), ["begin is -1"]),
        (lambda: PruneSchedule(kind="square"), ["square", "'constant', 'linear' or 'cubic'"]),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_said(call: Any, words: list[str]) -> None:
    with pytest.raises(PruneError) as raised:
        call()
    assert all(word in str(raised.value) for word in words)
    assert issubclass(ShapeError, PruneError)
