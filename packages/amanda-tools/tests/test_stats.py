"""Statistics of streams: against numpy on everything at once."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit._tensors_torch import TorchTensorLibrary
from amanda.tools.results import Mergeable
from amanda.tools.select import select
from amanda.tools.stats import (
    Accumulator,
    Bins,
    Measured,
    Statistics,
    StatsResult,
    StatsTool,
    _accumulator,
)

QUANTILES = (0.0, 0.001, 0.05, 0.25, 0.5, 0.9, 0.999, 1.0)


def measured(program: Callable[[], Any], **options: Any) -> StatsResult:
    tool = StatsTool(**options)
    with amanda.apply(tool):
        program()
    return tool.result


def only_entry(result: StatsResult, **labels: str) -> Measured:
    (entry,) = [m for m in result.measured if all(getattr(m, key) == value for key, value in labels.items())]
    return entry


def accumulated(parts: Sequence[Any], bins: int = 4096) -> Accumulator:
    accumulator = Accumulator(Bins.of(bins))
    for part in parts:
        accumulator.add(part)
    return accumulator


def assert_moments(statistics: Statistics, numbers: np.ndarray) -> None:
    finite = numbers.astype(np.float64).reshape(-1)
    exact = {"rtol": 1e-13, "atol": 0.0}
    assert (statistics.count, statistics.least, statistics.most) == (finite.size, finite.min(), finite.max())
    assert statistics.zeros == int((finite == 0).sum())
    spread = np.abs(finite).max()
    np.testing.assert_allclose(statistics.mean, finite.mean(), rtol=1e-13, atol=1e-15 * spread)
    np.testing.assert_allclose(statistics.std, finite.std(), rtol=1e-12, atol=1e-15 * spread)
    np.testing.assert_allclose(statistics.l1, np.abs(finite).sum(), **exact)
    np.testing.assert_allclose(statistics.l2, np.linalg.norm(finite), **exact)
    assert statistics.largest == spread


def assert_quantiles(accumulator: Accumulator, numbers: np.ndarray, bins: int) -> None:
    sketch, statistics = accumulator.sketch(), accumulator.statistics()
    assert sketch is not None
    sorted_numbers = np.sort(numbers.astype(np.float64).reshape(-1))
    assert sketch.total == sorted_numbers.size
    for q in QUANTILES:
        quantile = sketch.quantile(q, statistics.least, statistics.most)
        rank = q * (sorted_numbers.size - 1)
        around = abs(sorted_numbers[[math.floor(rank), math.ceil(rank)]]).max()
        assert abs(quantile - np.quantile(sorted_numbers, q)) <= 128 / bins * around * (1 + 1e-12)


DISTRIBUTIONS = {
    "normal": lambda g: g.normal(3.0, 0.2, 5000),
    "far from zero": lambda g: g.normal(1e8, 1e-3, 5000),
    "lognormal": lambda g: g.lognormal(0, 9, 5000) * g.choice([-1, 1], 5000),
    "sparse": lambda g: g.normal(size=5000) * (g.random(5000) > 0.9),
    "tiny": lambda g: g.normal(size=5000) * 1e-20,
    "constant": lambda g: np.full(77, -2.5),
}


@pytest.mark.parametrize("bins", [256, 4096, 65536])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_moments_and_quantiles_are_numpys_on_everything_at_once(name: str, bins: int) -> None:
    numbers = DISTRIBUTIONS[name](np.random.default_rng(0))
    parts = [torch.from_numpy(part) for part in np.split(numbers, [1, 2, 60, 61])]
    accumulator = accumulated(parts, bins)
    assert_moments(accumulator.statistics(), numbers)
    assert_quantiles(accumulator, numbers, bins)


def test_arrays_of_numpy_are_measured_too() -> None:
    numbers = np.random.default_rng(2).normal(size=(3, 70_001)).astype(np.float32)
    assert_moments(accumulated([numbers]).statistics(), numbers)
    assert_quantiles(accumulated([numbers]), numbers, 4096)


def test_memory_does_not_grow_and_many_parts_are_exact() -> None:
    numbers = np.random.default_rng(1).normal(1e4, 1.0, 300 * 7)
    accumulator = accumulated([torch.from_numpy(part) for part in np.split(numbers, 300)])
    assert all(len(vectors) <= 64 for vectors in accumulator._vectors_by_device.values())
    assert_moments(accumulator.statistics(), numbers)


def test_a_tensor_larger_than_a_block_is_measured_in_parts() -> None:
    numbers = torch.randn(3, 70_001)
    accumulator = accumulated([numbers.t()])
    assert_moments(accumulator.statistics(), numbers.numpy())
    assert_quantiles(accumulator, numbers.numpy(), 4096)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64,
     torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
)  # fmt: skip
def test_every_element_type_is_measured(dtype: torch.dtype) -> None:
    numbers = (torch.randn(1000) * 5).abs().to(dtype)
    accumulator = accumulated([numbers])
    assert_moments(accumulator.statistics(), numbers.double().numpy())
    assert_quantiles(accumulator, numbers.double().numpy(), 4096)


def test_complex_numbers_are_measured_by_their_magnitudes() -> None:
    numbers = torch.randn(500, dtype=torch.complex128)
    assert_moments(accumulated([numbers]).statistics(), numbers.abs().numpy())


def test_nan_and_inf_are_counted_apart() -> None:
    numbers = torch.tensor([1.0, math.nan, math.inf, 3.0, -math.inf, math.nan, 0.0])
    accumulator = accumulated([numbers, torch.full((2,), math.nan)])
    statistics = accumulator.statistics()
    assert (statistics.nan, statistics.inf, statistics.negative_inf, statistics.elements) == (4, 1, 1, 9)
    assert_quantiles(accumulator, np.array([1.0, 3.0, 0.0]), 4096)
    assert (statistics.mean, statistics.most, statistics.zeros) == (4 / 3, 3.0, 1)
    nothing = accumulated([torch.full((2,), math.nan)])
    assert nothing.sketch().quantile(0.5, 0.0, 0.0) is None
    assert nothing.statistics().count == 0


def test_empty_and_meta_tensors_count_for_nothing() -> None:
    accumulator = accumulated([torch.empty(0, 3), torch.empty(3, device="meta")])
    assert accumulator.statistics() == Statistics()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_sparse_and_nested_tensors_are_measured_as_what_they_stand_for() -> None:
    dense = torch.randn(20, 30) * (torch.rand(20, 30) > 0.8)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        statistics = accumulated([sparse]).statistics()
        assert_moments(statistics, dense.numpy())
        assert statistics.sparsity == (dense == 0).double().mean().item()
        assert_quantiles(accumulated([sparse]), dense.numpy(), 4096)
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        assert_moments(accumulated([nested]).statistics(), torch.cat(parts).numpy())


def test_what_lies_beyond_all_bins_is_told_by_the_extremes() -> None:
    sketch = accumulated([torch.tensor([-3e38, 1.0, 1e20, 1e-40])]).sketch()
    assert [count for *_, count in sketch.histogram()] == [1, 1, 1, 1]
    assert sketch.quantile(0.0, -3e38, 1e20) == -3e38
    assert sketch.quantile(1.0, -3e38, 1e20) == 1e20
    assert sketch.quantile(1 / 3, -3e38, 1e20) == 0.0


def test_sketches_of_other_bins_merge_into_the_wider_ones() -> None:
    numbers = torch.randn(1000)
    fine, coarse = accumulated([numbers], 16384).sketch(), accumulated([numbers], 512).sketch()
    assert accumulated([numbers], 512).sketch().merged(accumulated([], 512).sketch()) == coarse
    both = fine.merged(coarse)
    assert both.bins == coarse.bins
    assert both.counts == {index: 2 * count for index, count in coarse.counts.items()}


def test_a_histogram_is_numpys_over_its_edges() -> None:
    numbers = torch.randn(1000, dtype=torch.float64)
    rows = accumulated([numbers], 512).sketch().histogram()
    lower, upper, counts = (np.array(column) for column in zip(*rows, strict=True))
    assert (lower[1:] >= upper[:-1]).all()
    for low, high, count in zip(lower, upper, counts, strict=True):
        inside = ((numbers > low) & (numbers <= high)) if high <= 0 else (numbers >= low) & (numbers < high)
        assert int(inside.sum()) == count


@pytest.mark.parametrize("bins", [-1, 100, 3000, 128])
def test_other_numbers_of_bins_are_refused(bins: int) -> None:
    with pytest.raises(AmandaError, match=f"bins is {bins}; give"):
        StatsTool(bins=bins)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_a_device_computes_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TorchTensorLibrary, "blocks", lambda _, row: torch.split(row.double().reshape(-1), 1000)
    )
    numbers = DISTRIBUTIONS[name](np.random.default_rng(0))
    odd = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    accumulator = accumulated([torch.from_numpy(numbers), odd])
    assert_moments(accumulator.statistics(), numbers)
    assert_quantiles(accumulator, numbers, 4096)
    statistics = accumulator.statistics()
    assert (statistics.nan, statistics.inf, statistics.negative_inf) == (2, 1, 1)
    host = accumulated([numbers, odd.numpy()])
    assert accumulator.sketch() == host.sketch()


def test_adding_does_not_wait_for_the_device() -> None:
    # A fake tensor has no numbers: whatever asks for one, as a wait for the device would, raises.
    with FakeTensorMode() as mode:
        accumulator = Accumulator(Bins.of(4096))
        for shape in ((3, 5), (1 << 23,)):
            accumulator.add(torch.empty(shape, device="cuda"))
        with pytest.raises(DataDependentOutputException):
            torch.empty(3, device="cuda").sum().item()
    assert mode is not None


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_weights_activations_and_gradients_of_training_are_those_that_hooks_see(model: nn.Module) -> None:
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    weights: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[1].register_forward_hook(lambda module, given, made: outputs.append(made.detach().clone()))

    def train() -> None:
        for batch in torch.randn(4, 8, 6).unbind():
            weights.append(model[0].weight.detach().clone())
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            gradients.append(model[0].weight.grad.clone())
            optimizer.step()

    result = measured(train)
    relu = only_entry(result, phase="forward", type="relu", tensor="output 0")
    assert relu.executions == 4
    assert relu.module == "1"
    assert_moments(relu.statistics, torch.stack(outputs).numpy())
    assert relu.statistics.sparsity == (torch.stack(outputs) == 0).double().mean().item()
    weight = only_entry(result, module="0", tensor="weight")
    assert_moments(weight.statistics, torch.stack(weights).numpy())
    gradient = only_entry(result, phase="backward", module="0", tensor="weight gradient")
    assert_moments(gradient.statistics, torch.stack(gradients).numpy())


def test_a_gradient_is_the_weights_in_the_passes_that_make_it_in_the_weights_shape() -> None:
    """The gradient of a factor that is broadcast is that of the weight when it is summed."""
    weight = nn.Parameter(torch.randn(2, 4, 5))

    def train() -> None:
        for batch in (1, 3, 3):
            (torch.randn(batch, 2, 6, 4) @ weight).sum().backward()

    labels = {
        m.tensor: m.statistics.elements for m in measured(train).measured if m.type == "matmul_backward"
    }
    assert labels == {"weight gradient": 2 * 4 * 5, "gradient 1": 3 * 2 * 4 * 5}


class Times(nn.Module):
    def forward(self, x: Tensor, factor: int) -> Tensor:
        return x.mul(factor)


def test_each_so_many_th_execution_is_measured() -> None:
    times = Times()
    entry = only_entry(
        measured(lambda: [times(torch.full((2,), 3.0), i) for i in range(7)], every=3), type="mul"
    )
    assert entry.executions == 3
    assert entry.statistics.mean == 9.0


def test_ops_are_chosen_by_type_module_and_phase(model: nn.Module) -> None:
    def program() -> None:
        model(torch.rand(2, 6)).sum().backward()

    def types(**options: Any) -> set[str]:
        tool = select(StatsTool(), **options)
        with amanda.apply(tool):
            program()
        return {m.type for m in tool.result.measured}

    assert types(type=["linear"]) == {"linear", "linear_backward", "transpose_backward"}
    assert types(module="1") == {"relu", "relu_backward"}
    assert all(name.endswith("_backward") for name in types(phase="backward"))
    assert {m.tensor for m in measured(program, weights=False, gradients=False)} == {"output 0"}


def test_lists_of_tensors_are_measured_one_by_one() -> None:
    result = measured(lambda: torch.arange(6.0).split(2))
    assert [m.statistics.mean for m in result.measured if m.type == "split"] == [0.5, 2.5, 4.5]


def test_memory_that_nobody_wrote_yet_is_not_measured() -> None:
    assert [m.type for m in measured(lambda: torch.empty(3).fill_(1.0))] == ["fill"]


def test_an_op_analysed_at_each_execution_stays_one_row() -> None:
    times = Times()

    def program() -> None:
        with amanda.cache_disabled():
            for i in range(5):
                times(torch.ones(2), i)

    assert only_entry(measured(program), type="mul").executions == 5


def test_clearing_starts_anew() -> None:
    tool = StatsTool()
    with amanda.apply(tool):
        for _ in range(2):
            tool.clear()
            torch.ones(3).neg()
    assert only_entry(tool.result, type="neg").executions == 1


def test_runs_and_ranks_merge_to_what_one_would_have_measured(model: nn.Module, tmp_path: Any) -> None:
    batches = list(torch.randn(4, 8, 6))

    def program(batches: Sequence[Tensor]) -> Callable[[], Any]:
        return lambda: [model(batch).sum().backward() for batch in batches]

    whole = measured(program(batches))
    halves = [measured(program(half)) for half in (batches[:1], batches[1:])]
    paths = [half.save(tmp_path / f"{i}.json") for i, half in enumerate(halves)]
    assert isinstance(halves[0], Mergeable)  # so ranks of one launch are put together
    merged = StatsResult.load(paths[0]).merged(StatsResult.load(paths[1]))
    assert len(merged.measured) == len(whole.measured)
    for ours, expected in zip(merged.measured, whole.measured, strict=True):
        assert (ours.type, ours.module, ours.executions) == (
            expected.type,
            expected.module,
            expected.executions,
        )
        assert ours.sketch == expected.sketch
        assert ours.statistics.mean == pytest.approx(expected.statistics.mean, rel=1e-12, abs=1e-15)
        assert ours.statistics.std == pytest.approx(expected.statistics.std, rel=1e-12)


def test_a_result_goes_to_every_form_and_comes_back(model: nn.Module, tmp_path: Any) -> None:
    result = measured(lambda: model(torch.full((2, 6), math.inf)), quantiles=[0.5])
    assert "Quantiles are approximate (within 3.1%)" in str(result)
    assert "q0.5" in result.to_pandas().columns
    content = json.loads(result.save(tmp_path / "stats.json").read_text(), parse_constant=pytest.fail)
    assert (content["schema"], content["version"]) == ("amanda.stats", 1)
    assert StatsResult.load(tmp_path / "stats.json").rows() == result.rows()
    assert list(measured(lambda: model(torch.rand(2, 6)), bins=0).quantiles) == []


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "amanda.flops", "version": 1}', '{"rows": 1}'])
def test_other_files_are_refused(text: str, tmp_path: Any) -> None:
    path = tmp_path / "stats.json"
    path.write_text(text)
    with pytest.raises(AmandaError, match=r"stats\.json is no file of statistics"):
        StatsResult.load(path)


def test_measuring_changes_nothing(model: nn.Module) -> None:
    x = torch.rand(2, 6)
    plain = model(x)
    plain.sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    state = torch.get_rng_state()
    found: list[Tensor] = []
    measured(lambda: found.append(model(x)) or found[0].sum().backward())
    assert torch.equal(found[0], plain)
    assert all(map(torch.equal, expected, (parameter.grad for parameter in model.parameters())))
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_options_are_told() -> None:
    with pytest.raises(AmandaError, match=r"every is 1\.5"):
        StatsTool(every=1.5)  # type: ignore[arg-type]
    with pytest.raises(AmandaError, match="item 0 is 'middle'"):
        StatsTool(quantiles=["middle"])  # type: ignore[list-item]
    with pytest.raises(AmandaError, match="every is 0"):
        StatsTool(every=0)
    with pytest.raises(AmandaError, match=r"quantiles is \[2\]; give a list of numbers from 0 to 1"):
        StatsTool(quantiles=[2])


def test_it_is_loaded_by_name() -> None:
    assert isinstance(amanda.load_tool("stats", every=2), StatsTool)


MOMENTS = pytest.mark.parametrize(
    "moments", [_accumulator.Moments, _accumulator.NumpyMoments], ids=["chosen", "numpy"]
)


def assert_alike(statistics: Statistics, expected: Statistics) -> None:
    both = [list(dataclasses.asdict(side).values()) for side in (statistics, expected)]
    assert both[0] == pytest.approx(both[1], rel=1e-12, nan_ok=True)


@MOMENTS
@pytest.mark.parametrize("bins", [256, 4096, 32768, 2**24])
def test_float32_is_counted_as_float64_is(bins: int, moments: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_accumulator, "Moments", moments)
    random = np.random.default_rng(0)
    for size in (100, 4096, 70_001):
        numbers = (random.standard_normal(size) * 10.0 ** random.integers(-35, 35, size)).astype(np.float32)
        numbers[::7], numbers[3] = 0, -0.0
        numbers[5] = 1e-42
        accumulator, expected = accumulated([numbers], bins), accumulated([numbers.astype(np.float64)], bins)
        assert accumulator.sketch() == expected.sketch()
        assert_alike(accumulator.statistics(), expected.statistics())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 15, 4095, 4096, 4097, 32768, 100_000])
def test_native_code_measures_as_numpy_does(size: int, dtype: str) -> None:
    random = np.random.default_rng(size)
    numbers = (random.standard_normal(size) * 10.0 ** random.integers(-30, 30, size)).astype(dtype)
    odd = numbers.copy()
    odd[::13], odd[1::29], odd[2::31] = np.nan, np.inf, -np.inf
    for bits in (-1, 0, 4, 8):
        native, expected = _accumulator.Moments(bits), _accumulator.NumpyMoments(bits)
        for array in (numbers, odd, numbers[::2].copy(), np.full(5000, np.nan, dtype)):
            assert native.add(array)
            assert expected.add(array)
        native.merge(native)
        expected.merge(expected)
        assert native.numbers == pytest.approx(expected.numbers, rel=1e-12)
        assert (native.counts or b"") == (expected.counts or b"")


@MOMENTS
def test_arrays_of_any_layout_and_order_of_bytes_are_measured(
    moments: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_accumulator, "Moments", moments)
    whole = np.random.default_rng(0).standard_normal((40, 60)).astype(np.float32)
    for view in (
        whole.T,
        whole[::3, 1:],
        whole[::-1],
        np.broadcast_to(whole[0], (5, 60)),
        whole.astype(">f4"),
    ):
        assert_moments(accumulated([view]).statistics(), view)
        assert_quantiles(accumulated([view]), view, 4096)


def test_tensors_are_measured_together_as_one_by_one() -> None:
    random = np.random.default_rng(0)
    arrays: list[Any] = [random.standard_normal(size).astype(np.float32) for size in (1, 7, 4096, 5000, 64)]
    arrays.append(np.array([1, np.nan, np.inf, 0], np.float32))
    arrays.append(np.zeros((0, 3), np.float32))
    arrays.append(np.arange(5))
    together, alone = ([Accumulator(Bins.of(4096)) for _ in arrays] for _ in range(2))
    for _ in range(70):
        Accumulator.add_all(zip(together, arrays, strict=True))
        for accumulator, array in zip(alone, arrays, strict=True):
            accumulator.add(array)
    for joint, single in zip(together, alone, strict=True):
        assert joint.sketch() == single.sketch()
        numbers_together, expected = (
            list(dataclasses.asdict(it.statistics()).values()) for it in (joint, single)
        )
        assert numbers_together == pytest.approx(expected, rel=1e-13, nan_ok=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4).t(),
        torch.rand(6, 4)[::2, 1:],
        torch.arange(6).expand(2, 6),
        torch.tensor([True, False]),
    ],
)
def test_borrowed_memory_is_that_of_the_tensor_which_keeps_its_size_to_itself(tensor: Tensor) -> None:
    array = TorchTensorLibrary().borrowed(tensor)
    assert array is not None
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    assert not array.flags.writeable
    assert array.tolist() == tensor.tolist()
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3).bfloat16(), torch.rand(2, 3).to_sparse(), torch.rand(0), torch.rand(3, device="meta"),
        torch.rand(3, dtype=torch.complex64).conj().imag,
    ],
)  # fmt: skip
def test_memory_that_numpy_does_not_know_is_not_borrowed(tensor: Tensor) -> None:
    assert TorchTensorLibrary().borrowed(tensor) is None


def test_memory_that_tensors_share_is_measured_whatever_the_order_of_its_axes() -> None:
    x = torch.randn(3, 40, 50)
    views = [x, x.reshape(-1), x.permute(1, 0, 2), x[1:].transpose(0, 2), x.expand(2, 3, 40, 50), x[:, ::2]]
    accumulators = [Accumulator(Bins.of(4096)) for _ in views]
    Accumulator.add_all(zip(accumulators, views, strict=True))
    for accumulator, view in zip(accumulators, views, strict=True):
        assert_moments(accumulator.statistics(), view.numpy())
        assert_quantiles(accumulator, view.numpy(), 4096)


@pytest.mark.parametrize("kind", [_accumulator.Moments, _accumulator.NumpyMoments])
@pytest.mark.parametrize(
    ("numbers", "mean"), [([1e308] * 8192, 1e308), ([1e200] * 10, 1e200), ([1e308, -1e308] * 4096, 0.0)]
)
def test_a_mean_stays_finite_where_sums_overflow(kind: Any, numbers: Sequence[float], mean: float) -> None:
    moments = kind()
    for half in (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]):
        moments.add(np.array(half))
    statistics = Statistics().merged(Statistics.of_vector(moments.numbers))
    assert statistics.mean == pytest.approx(mean, rel=1e-12, abs=1e-12 * max(numbers))
    assert not math.isnan(statistics.m2)
    apart = Statistics(1, 1.7e308).merged(Statistics(1, -1.7e308))
    assert (apart.mean, apart.m2) == (0.0, math.inf)


def test_quantiles_that_were_asked_for_stay_in_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU()), torch.rand(3, 4)
    asked, default = (
        str(measured(lambda: model(x), type="gelu", **options)) for options in ({"quantiles": [0.5, 0.9]}, {})
    )
    heads = asked.splitlines()[3].split()
    assert {"mean", "q0.5", "q0.9"} <= set(heads)
    # A single row has no repeated texts, but its counts of nothing take no column.
    assert not {"NaN", "Inf"} & set(heads)
    assert "In every row: NaN 0, Inf 0." in " ".join(asked.split())
    assert "q0.5" in default.partition("Hidden columns: ")[2]


def test_iterating_gives_the_rows_of_the_table() -> None:
    layer, x = nn.Linear(2, 3), torch.ones(1, 2)
    result = measured(lambda: layer(x))
    assert len(list(result)) == len(result) == len(result.rows()) == len(result.measured)
    assert list(result) == [result[i] for i in range(len(result))]
    assert [(row.tensor, row.elements) for row in result] == [("weight", 6), ("output 0", 3)]


def test_floating_tensors_are_before_indices() -> None:
    embedding = nn.Embedding(50, 4)
    result = measured(lambda: embedding(torch.arange(50)))
    assert [row.type for row in result if row.tensor == "output 0"] == ["arange", "embedding"]
    assert "of embedding" in result.headline
    assert "arange" not in result.headline
    table = result.whole().splitlines()[2:]
    assert [line.split()[1] for line in table if "output 0" in line] == ["embedding", "arange"]
    indices_alone = measured(lambda: torch.arange(50))
    assert "the largest magnitude is 49, output 0 of arange (forward)" in indices_alone.headline
