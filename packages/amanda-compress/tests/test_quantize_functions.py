"""Fake quantisation, observers and LSQ beside those of torch.ao and TensorFlow, and beside their formulas."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from amanda.tools.quantize import (
    Grid,
    HistogramObserver,
    MinMaxObserver,
    MseObserver,
    PercentileObserver,
    QuantizeError,
    choose_qparams,
    fake_quantize,
    fake_quantize_gradient,
    gradient_scale,
    lsq_gradients,
    lsq_plus_scale,
    lsq_quantize,
    lsq_scale,
    make_observer,
    sqnr,
)
from amanda.tools.quantize._fake_quantize import _straight_through_rounding

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import FakeQuantize, observer

BITS = range(2, 9)
FRAMEWORKS = {"numpy": np.asarray, "torch": torch.as_tensor, "tensorflow": tf.constant}


def values(scale: Any, seed: int = 0, shape: tuple[int, ...] = (4, 500)) -> Any:
    """Numbers inside and outside of a grid of eight bits, a quarter of them halfway between integers."""
    random = np.random.default_rng(seed)
    found = random.normal(size=shape).astype(np.float32) * np.float32(100) * scale
    halves = (random.integers(-200, 200, shape) + np.float32(0.5)).astype(np.float32) * scale
    return np.where(random.random(shape) < 0.25, halves, found).astype(np.float32)


def as_numpy(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_fake_quantised_values_and_gradients_are_those_of_torch(
    framework: str, symmetric: bool, per_channel: bool
) -> None:
    make = FRAMEWORKS[framework]
    for bits in BITS:
        grid, axes = Grid.of(bits, symmetric), (0,) if per_channel else ()
        kind = "channel" if per_channel else "tensor"
        scheme = getattr(torch, f"per_{kind}_{'symmetric' if symmetric else 'affine'}")
        theirs = FakeQuantize(
            observer.PerChannelMinMaxObserver if per_channel else observer.MinMaxObserver,
            grid.low, grid.high, dtype=torch.qint8 if symmetric else torch.quint8, qscheme=scheme,
            **({"ch_axis": 0} if per_channel else {}),
        )  # fmt: skip
        seen = values(np.float32(0.01), bits) * np.array([[1], [0.5], [3], [0.1]], np.float32)
        theirs(torch.from_numpy(seen))
        theirs.disable_observer()
        x = torch.from_numpy(values(np.float32(0.013), bits + 1)).requires_grad_()
        wanted = theirs(x)
        wanted.backward(torch.ones_like(wanted))
        mine = make_observer("minmax", grid, axes)
        mine.observe(seen)
        scale, zero_point = choose_qparams(*mine.range(), grid)
        shape = (4,) if per_channel else ()
        np.testing.assert_array_equal(np.reshape(scale, -1), theirs.scale.numpy())
        np.testing.assert_array_equal(np.reshape(zero_point, -1), theirs.zero_point.numpy())
        given = [make(np.asarray(one).reshape(shape)) for one in (scale, zero_point)]
        found = fake_quantize(make(x.detach().numpy()), *given, grid, axes)
        np.testing.assert_array_equal(as_numpy(found), wanted.detach().numpy())
        gradient = fake_quantize_gradient(
            make(np.ones(x.shape, np.float32)), make(x.detach().numpy()), *given, grid, axes
        )
        assert x.grad is not None
        np.testing.assert_array_equal(as_numpy(gradient), x.grad.numpy())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("axes", [(), (0,)])
@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away"])
def test_nan_stays_and_infinity_goes_to_the_end_of_the_grid(
    framework: str, axes: tuple[int, ...], rounding: Any
) -> None:
    """As in TensorFlow's ops, which say so of NaN; torch's kernels take it for the least number."""
    make, row = FRAMEWORKS[framework], [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.5, 200.0]
    x, shape = np.array([row, row], np.float32), (2,) if axes else ()
    parameters = [make(np.full(shape, one, np.float32)) for one in (0.5, 3)]
    found = as_numpy(fake_quantize(make(x), *parameters, Grid(-128, 127), axes, rounding))
    low, high = (-128 - 3) * 0.5, (127 - 3) * 0.5
    np.testing.assert_array_equal(found, [[np.nan, high, low, high, low, 0.5, high]] * 2)
    op = tf.quantization.fake_quant_with_min_max_vars(x, low, high)
    np.testing.assert_array_equal(found, op.numpy())


@pytest.mark.parametrize("axes", [(), (1,)])
def test_gradients_of_every_order_and_of_functions_are_those_of_torch(axes: tuple[int, ...]) -> None:
    x = torch.from_numpy(values(np.float32(0.013), shape=(5, 4, 6)))
    scale, zero_point = torch.full((4,) if axes else (), 0.01), torch.full((4,) if axes else (), 3.0)

    def ours(x: torch.Tensor) -> torch.Tensor:
        found = fake_quantize(x, scale, zero_point, Grid(-8, 7), axes)
        assert isinstance(found, torch.Tensor)
        return found.pow(3).sum()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        integers = zero_point.int()
        if axes:
            return torch.fake_quantize_per_channel_affine(x, scale, integers, axes[0], -8, 7).pow(3).sum()
        return torch.fake_quantize_per_tensor_affine(x, scale, integers, -8, 7).pow(3).sum()

    found = []
    for function in (ours, theirs):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        found.append((first.detach(), second))
    assert all(map(torch.equal, *found))
    assert torch.equal(torch.func.grad(ours)(x), found[1][0])
    if not axes:
        assert torch.equal(torch.func.vmap(torch.func.grad(ours))(x), found[1][0])


@pytest.mark.parametrize("axes", [(), (0,), (3,), (2, 3), (1, 2)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_tensors_in_host_memory_are_quantised_as_by_operators_of_tensorflow(
    axes: tuple[int, ...], symmetric: bool
) -> None:
    array = values(np.float32(0.05), shape=(9, 20, 16, 32))
    array.reshape(-1)[::997] = np.resize(np.float32([np.nan, np.inf, -np.inf, -0.0, 1e-40]), 93)
    grid, random = Grid.of(8, symmetric), np.random.default_rng(1)
    channels = (math.prod(array.shape[axis] for axis in axes),) if axes else ()
    scale = random.uniform(0.02, 0.08, channels).astype(np.float32)
    zero_point = np.float32(random.integers(-3 if symmetric else 0, 4, channels))
    x, gradient = tf.constant(array), tf.constant(random.normal(size=array.shape).astype(np.float32))
    with tf.GradientTape() as outer:
        outer.watch(gradient)
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = fake_quantize(x, scale, zero_point, grid, axes)
        passed = tape.gradient(made, x, gradient)
    wanted = fake_quantize(x, scale, zero_point, grid, axes, kernel=False)
    np.testing.assert_array_equal(np.asarray(made).view(np.int32), np.asarray(wanted).view(np.int32))
    for found, given in ((passed, gradient), (outer.gradient(passed, gradient), tf.ones_like(gradient))):
        through = fake_quantize_gradient(given, x, scale, zero_point, grid, axes)
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), np.asarray(through).view(np.int32))


def test_nan_passes_no_gradient_and_leaves_those_of_others() -> None:
    x = torch.tensor([torch.nan, 0.5, 1000.0], requires_grad=True)
    for axes, shape in (((), ()), ((0,), (3,))):
        x.grad = None
        y = fake_quantize(x, torch.full(shape, 0.5), torch.zeros(shape), Grid(-128, 127), axes)
        y.backward(torch.ones(3))
        assert y.isnan().tolist() == [True, False, False]
        assert x.grad is not None
        assert x.grad.tolist() == [0, 1, 0]


@pytest.mark.parametrize("axes", [(), (1,)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_values_and_gradients_have_the_bits_of_the_estimator(axes: tuple[int, ...], symmetric: bool) -> None:
    grid, special = Grid.of(8, symmetric), [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e38, -0.0, 1e-40]
    x = torch.from_numpy(values(np.float32(0.05), shape=(64, 16)))
    x[::9, :8] = torch.tensor(special)
    scale = torch.linspace(0.001, 0.3, 16) if axes else torch.tensor(0.03)
    zero_point = torch.zeros_like(scale) if symmetric else torch.full_like(scale, 77.0)
    gradient = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    gradient[0] = np.inf
    found = []
    for make in (
        lambda x: fake_quantize(x, scale, zero_point, grid, axes),
        lambda x: _straight_through_rounding().apply(x, scale, zero_point, grid.low, grid.high)[0],
        lambda x: fake_quantize(x, scale, zero_point, grid, axes, kernel=False),
    ):
        leaf = x.clone().requires_grad_()
        made = make(leaf)
        (passed,) = torch.autograd.grad(made, leaf, gradient)
        found.append([one.detach().contiguous().view(torch.int32) for one in (made, passed)])
    assert all(map(torch.equal, found[0], found[1]))
    assert torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_rounded_half_up_values_and_gradients_are_those_of_tensorflow(
    framework: str, per_channel: bool
) -> None:
    make, random = FRAMEWORKS[framework], np.random.default_rng(1)
    tied = 0
    for bits in BITS:
        grid = Grid.of(bits, symmetric=False)
        zero_point = random.integers(0, grid.high + 1, 4).astype(np.float32)
        # Scales of which TensorFlow, which is given a range, finds just these again.
        scale = (random.integers(1, 100, 4) / np.float32(512)).astype(np.float32)
        x = values(scale, bits, (500, 4))
        least, most = (grid.low - zero_point) * scale, (grid.high - zero_point) * scale
        with tf.GradientTape() as tape:
            given = tf.constant(x)
            tape.watch(given)
            if per_channel:
                wanted = tf.quantization.fake_quant_with_min_max_vars_per_channel(given, least, most, bits)
            else:
                scale, zero_point, least, most = (one[0] for one in (scale, zero_point, least, most))
                wanted = tf.quantization.fake_quant_with_min_max_vars(given, least, most, bits)
        axes = (1,) if per_channel else ()
        qparams = make(scale), make(zero_point)
        found = fake_quantize(make(x), *qparams, grid, axes, "half_up")
        np.testing.assert_array_equal(as_numpy(found), wanted.numpy())
        tied += int((as_numpy(fake_quantize(make(x), *qparams, grid, axes)) != wanted.numpy()).sum())
        gradient = fake_quantize_gradient(make(np.ones_like(x)), make(x), *qparams, grid, axes, "half_up")
        np.testing.assert_array_equal(as_numpy(gradient), tape.gradient(wanted, given).numpy())
        chosen = choose_qparams(make(np.asarray(least)), make(np.asarray(most)), grid, "half_up")
        np.testing.assert_array_equal([as_numpy(one) for one in chosen], [scale, zero_point])
    assert tied > 0


def test_ties_are_rounded_three_ways() -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], np.float32)
    grid, one, zero = Grid.of(4, symmetric=True), np.float32(1), np.float32(0)
    found = {name: fake_quantize(x, one, zero, grid, (), name).tolist() for name in
             ("half_even", "half_up", "half_away")}  # fmt: skip
    assert found == {
        "half_even": [-2, -2, 0, 0, 2, 2], "half_up": [-2, -1, 0, 1, 2, 3],
        "half_away": [-3, -2, -1, 1, 2, 3],
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_element_type_stays(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 50).to(dtype)
    grid, scale, zero_point = Grid.of(4, symmetric=True), torch.tensor(0.125), torch.tensor(0.0)
    found = fake_quantize(x, scale, zero_point, grid)
    assert found.dtype == dtype
    wanted = (x.double() / 0.125).round().clamp(-8, 7) * 0.125
    assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_observers_find_the_scales_of_torch(positive: bool, symmetric: bool) -> None:
    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    dtype = torch.qint8 if symmetric else torch.quint8
    grid = Grid.of(8, symmetric)
    for seed in range(4):
        pairs = [
            (MinMaxObserver(), observer.MinMaxObserver(dtype=dtype, qscheme=scheme)),
            (HistogramObserver(), observer.HistogramObserver(dtype=dtype, qscheme=scheme)),
        ]
        random = np.random.default_rng(seed)
        for batch in range(5):
            x = (random.standard_t(3, (16, 300)) * (1 + batch % 3) + batch).astype(np.float32)
            x = np.maximum(x, 0) if positive else x
            for mine, theirs in pairs:
                mine.observe(x)
                theirs(torch.from_numpy(x))
        for mine, theirs in pairs:
            wanted = theirs.calculate_qparams()
            assert [float(one) for one in choose_qparams(*mine.range(), grid)] == [
                float(one) for one in wanted
            ]


def test_a_constant_and_then_others_make_the_histogram_of_torch() -> None:
    mine, theirs = HistogramObserver(), observer.HistogramObserver()
    for x in (np.full(7, 2.0, np.float32), np.linspace(-1, 4, 100, dtype=np.float32)):
        mine.observe(x)
        theirs(torch.from_numpy(x))
    np.testing.assert_array_equal(mine.histogram.counts, theirs.histogram.numpy())


def test_percentiles_leave_outliers_out() -> None:
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    x[0] = 1000.0
    one = PercentileObserver(99.0, bins=1 << 18)
    one.observe(x)
    np.testing.assert_allclose(one.range(), np.percentile(x, [1, 99]), atol=0.01)


@pytest.mark.parametrize("name", ["percentile", "mse", "histogram"])
def test_each_channel_is_observed_as_if_alone(name: Any) -> None:
    grid = Grid.of(4, symmetric=True)
    x = np.random.default_rng(0).standard_t(2, (5, 3, 40)).astype(np.float32)
    together = make_observer(name, grid, (1,))
    together.observe(x)
    for channel in range(3):
        alone = make_observer(name, grid)
        alone.observe(x[:, channel])
        assert [side[channel] for side in together.range()] == list(map(np.float32, alone.range()))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_least_squared_error_is_that_of_a_search(bits: int, symmetric: bool) -> None:
    x = np.random.default_rng(bits).standard_t(3, 4000).astype(np.float32)
    grid = Grid.of(bits, symmetric)
    one = MseObserver(grid, bins=1 << 14)
    one.observe(x)

    def error(range_: Any) -> float:
        scale, zero_point = choose_qparams(*(np.float32(end) for end in range_), grid)
        return float(np.square(fake_quantize(x, scale, zero_point, grid) - x, dtype=np.float64).sum())

    best = min(error((x.min() * share, x.max() * share)) for share in np.linspace(0.2, 1, 81))
    assert error(one.range()) <= best * 1.002  # numbers count as the middle of their bin
    assert bits == 8 or error(one.range()) < error((x.min(), x.max())) / 2


def test_what_is_not_finite_is_refused() -> None:
    for wrong in (np.nan, np.inf):
        with pytest.raises(QuantizeError, match=r"NaN or Inf .*\(2,\)"):
            MinMaxObserver().observe(np.array([1.0, wrong], np.float32))


@pytest.mark.parametrize("bits", [1, 17, 2.5, True, "e3m4"])
def test_bits_that_are_none(bits: Any) -> None:
    with pytest.raises(QuantizeError, match="from 2 to 16"):
        Grid.of(bits, symmetric=False)


def test_sqnr_in_decibels() -> None:
    assert (sqnr(100.0, 1.0), sqnr(1.0, 0.0), sqnr(0.0, 1.0)) == (20.0, math.inf, -math.inf)


def lsq_by_hand(v: Any, s: Any, low: int, high: int, factor: float, offset: Any = None) -> Any:
    """The pseudocode of Esser et al. 2020, appendix B, with the offset of LSQ+."""

    def scaled(x: Any) -> Any:
        return (x - x * factor).detach() + x * factor

    def rounded(x: Any) -> Any:
        return (x.round() - x).detach() + x

    step = scaled(s)
    shift = 0 if offset is None else scaled(offset)
    return rounded(torch.clamp((v - shift) / step, low, high)) * step + shift


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("axes", [(), (1,)])
def test_lsq_gives_values_and_gradients_of_the_pseudocode(
    framework: str, with_offset: bool, axes: tuple[int, ...]
) -> None:
    make, grid = FRAMEWORKS[framework], Grid.of(3, symmetric=True)
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, dtype=torch.float64).requires_grad_()
    shape = (4,) if axes else ()
    scale = (torch.rand(shape, dtype=torch.float64) * 0.3 + 0.1).requires_grad_()
    offset = (torch.randn(shape, dtype=torch.float64) * 0.2).requires_grad_() if with_offset else None
    factor = gradient_scale(30, grid)
    assert factor == 1 / math.sqrt(30 * 3)

    def shaped(one: Any) -> Any:
        return one.view(1, 4, 1) if axes and one is not None else one

    wanted = lsq_by_hand(x, shaped(scale), grid.low, grid.high, factor, shaped(offset))
    gradient = torch.randn(x.shape, dtype=torch.float64)
    wanted.backward(gradient)
    mine = [None if one is None else make(one.detach().numpy()) for one in (x, scale, offset)]
    found = lsq_quantize(mine[0], mine[1], grid, mine[2], axes)
    np.testing.assert_allclose(as_numpy(found), wanted.detach().numpy(), atol=1e-14)
    gradients = lsq_gradients(make(gradient.numpy()), mine[0], mine[1], grid, mine[2], axes, factor)
    for one, other in zip(gradients, [x, scale, offset], strict=False):
        np.testing.assert_allclose(as_numpy(one), other.grad.numpy(), atol=1e-13)
    assert len(gradients) == 2 + with_offset


@pytest.mark.parametrize("with_offset", [False, True])
def test_lsq_gradients_are_finite_differences_where_rounding_is_held(with_offset: bool) -> None:
    random = np.random.default_rng(2)
    grid, x, s, beta = Grid.of(4, symmetric=False), random.normal(size=400) * 2, 0.21, -0.7 * with_offset
    held = np.rint((x - beta) / s) - (x - beta) / s

    def output(s: float, beta: float) -> Any:
        v = (x - beta) / s
        inside = (v > grid.low) & (v < grid.high)
        return np.where(inside, v + held, np.clip(v, grid.low, grid.high)) * s + beta

    gradient, h = random.normal(size=400), 1e-7
    by_scale = ((output(s + h, beta) - output(s - h, beta)) / (2 * h) * gradient).sum()
    by_offset = ((output(s, beta + h) - output(s, beta - h)) / (2 * h) * gradient).sum()
    offset = np.array(beta) if with_offset else None
    _, *found = lsq_gradients(gradient, x, np.array(s), grid, offset)
    np.testing.assert_allclose(found, [by_scale, by_offset][: len(found)], rtol=1e-5)


@pytest.mark.parametrize("axes", [(), (0,)])
def test_lsq_starts_from_the_magnitudes_and_lsq_plus_from_the_moments(axes: tuple[int, ...]) -> None:
    x, grid = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) + 0.3, Grid.of(4, symmetric=True)
    over = (1,) if axes else (0, 1)
    mean, std = x.mean(over), x.std(over, correction=0)
    torch.testing.assert_close(lsq_scale(x, grid, axes), 2 * x.abs().mean(over) / math.sqrt(7))
    wanted = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / 8
    torch.testing.assert_close(lsq_plus_scale(x, grid, axes), wanted)


@pytest.mark.parametrize("name", ["minmax", "percentile", "mse", "histogram"])
def test_numbers_near_the_end_of_float32_have_a_range(name: Any) -> None:
    """Such as the least number, by which masks of attention hide what is not to be seen."""
    least = np.finfo(np.float32).min
    observer = make_observer(name, Grid.of(8, symmetric=False), percentile=100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (np.array([least, 0, 1], np.float32), np.array([least, 0, 2], np.float32)):
            observer.observe(array)
        low, high = observer.range()
    assert low == pytest.approx(least, rel=1e-2)
    assert np.isfinite(high)
