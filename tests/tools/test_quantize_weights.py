"""GPTQ, AWQ, SmoothQuant and round to nearest beside the algorithms of the papers, written by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.quantize import Grid, QuantizeError, QuantizeTool, choose_qparams, fake_quantize
from amanda.tools.quantize.weights import (
    AWQTool,
    GPTQTool,
    NearestTool,
    SmoothQuantTool,
    awq_clipped,
    awq_scales,
    dequantized,
    gptq,
)


class Network(nn.Module):
    """Linear layers, a product with a parameter on either side, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=1)
        self.first = nn.Linear(32, 64)
        self.mixing = nn.Parameter(torch.randn(64, 32) / 8)
        self.left = nn.Parameter(torch.randn(6, 32) / 8)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(self.conv(x).flatten(2).flatten(1, 2).reshape(-1, 32))) @ self.mixing
        made: Tensor = (self.left @ y.T).T @ torch.eye(6, 8)
        return made + self.last(made)


BATCHES = [torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def calibrated(tool: Any, model: nn.Module, batches: list[Tensor]) -> None:
    """Calibrate a tool, and check that the model computes what it does alone meanwhile."""
    with amanda.apply(tool) as scope, tool.calibrating():
        for x in batches:
            with amanda.disabled():
                wanted = model(x)
            assert torch.equal(model(x), wanted)
    assert scope.report == []


def met_with(tool: Any, model: nn.Module, x: Tensor) -> None:
    with amanda.apply(tool), tool.calibrating():
        model(x)


def patches(model: Network, x: Tensor) -> dict[str, Tensor]:
    """What each weight multiplies, as rows, and the weights in the same order as matrices, by hand."""
    with torch.no_grad():
        rows = F.unfold(x, 3, padding=1, stride=2).mT.reshape(-1, 36)
        first = model.conv(x).flatten(2).flatten(1, 2).reshape(-1, 32)
        mixing = F.gelu(model.first(first))
        left = mixing @ model.mixing
        last = (model.left @ left.T).T @ torch.eye(6, 8)
    return {"conv.weight": rows, "first.weight": first, "mixing": mixing, "left": left, "last.weight": last}


def matrices(model: Network) -> dict[str, Tensor]:
    named = {name: one.detach().clone() for name, one in model.named_parameters() if one.dim() > 1}
    return {name: (one.T if name == "mixing" else one).flatten(1) for name, one in named.items()}


def round_by_hand(w: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    # As torch.ao multiplies: the extremes of a symmetric range lie half way between two integers.
    return (((w * (1 / scale)).round() + zero).clamp(grid.low, grid.high) - zero) * scale


def range_by_hand(w: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of a matrix, (rows, 1)."""
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    levels = grid.high - grid.low
    if grid.symmetric:
        scale = (2 * torch.maximum(-low, high) / levels).clamp(min=torch.finfo(torch.float32).eps)
        return scale, torch.zeros_like(scale)
    scale = ((high - low) / levels).clamp(min=torch.finfo(torch.float32).eps)
    return scale, (grid.low - (low / scale).round()).clamp(grid.low, grid.high)


def nearest_by_hand(w: Tensor, grid: Grid, size: int | None) -> Tensor:
    parts = w.split(size or w.shape[1], 1)
    return torch.cat([round_by_hand(one, *range_by_hand(one, grid), grid) for one in parts], 1)


def gptq_by_hand(w: Tensor, x: Tensor, grid: Grid, size: int | None, block: int) -> Tensor:
    """Algorithm 1 of the paper: H = 2 X X^T + lambda I, blocks of columns, in double precision.

    As in the authors' code the scales of a group are found when its first column is reached, from columns
    that know of the errors of former blocks.
    """
    w, x = w.double().clone(), x.double()
    hessian = 2 * x.T @ x / len(x)
    dead = hessian.diagonal() == 0
    scale, zero = (one.double() for one in range_by_hand(w.float(), grid))
    hessian[dead, dead], w[:, dead] = 1, 0
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian)).mT.contiguous()
    # The upper factor U of H^-1 = U^T U is the transposed lower one of H^-1 = L L^T.
    rounded = torch.zeros_like(w)
    for i in range(0, w.shape[1], block):
        stop, frozen = min(i + block, w.shape[1]), w.clone()
        for j in range(i, stop):
            if size is not None and j % size == 0:
                scale, zero = range_by_hand(frozen[:, j : j + size].float(), grid)
                scale, zero = scale.double(), zero.double()
            rounded[:, j : j + 1] = round_by_hand(w[:, j : j + 1], scale, zero, grid)
            error = (w[:, j] - rounded[:, j]) / factor[j, j]
            w[:, j:] -= error[:, None] * factor[j, j:][None]
    return rounded.float()


def act_order_by_hand(w: Tensor, x: Tensor, grid: Grid, size: int | None) -> Tensor:
    """GPTQ as optimal brain quantisation, one column after the other by decreasing diagonal of H.

    After each column the others take the least squares update, with the inverse Hessian of the columns that
    are left (eqs. 2 and 3 of the paper), which no Cholesky factor and no permuted matrix computes here.
    """
    whole, w, x = w, w.double().clone(), x.double()
    hessian = 2 * x.T @ x / len(x)
    diagonal = hessian.diagonal().clone()
    dead = diagonal == 0
    w[:, dead], hessian[dead, dead] = 0, 1
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    # As in the authors' code one scale for all columns knows of columns whose inputs are 0.
    groups = [whole] if size is None else w.float().split(size, 1)
    ranges = [range_by_hand(one, grid) for one in groups]
    rest = sorted(range(w.shape[1]), key=lambda column: -float(diagonal[column]))
    rounded = torch.zeros_like(w)
    while rest:
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        column = rest[0]
        scale, zero = (one[:, 0].double() for one in ranges[column // (size or w.shape[1])])
        rounded[:, column] = round_by_hand(w[:, column], scale, zero, grid)
        error = (w[:, column] - rounded[:, column]) / inverse[0, 0]
        w[:, rest] -= error[:, None] * inverse[0]
        rest.pop(0)
    return rounded.float()


def awq_by_hand(w: Tensor, x: Tensor, grid: Grid, size: int | None) -> Tensor:
    """The authors' grid search over the exponent of the activations, by the outputs' error."""
    magnitude, best, found = x.abs().mean(0), float("inf"), w
    for i in range(20):
        s = magnitude.pow(i / 20).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        rounded = nearest_by_hand(w * s, grid, size)
        loss = (F.linear(x, w) - F.linear(x / s, rounded)).double().square().mean().item()
        if loss < best:
            best, found = loss, rounded / s
    return found


def awq_clipped_by_hand(w: Tensor, x: Tensor, grid: Grid, size: int | None) -> Tensor:
    """The authors' grid search over the largest weight of a group, by the part of outputs that it makes."""
    size = size or w.shape[1]
    made = []
    for group, inputs in zip(w.split(size, 1), x.double().split(size, 1), strict=True):
        most = group.abs().amax(1, keepdim=True)
        best, found = torch.full_like(most, 1e9, dtype=torch.float64), group
        for i in range(10):
            limit = most * (1 - i / 20)
            clipped = torch.minimum(torch.maximum(group, -limit), limit)
            rounded = nearest_by_hand(clipped, grid, None)
            error = (inputs @ (rounded - group).double().T).square().mean(0)[:, None]
            found = torch.where(error < best, rounded, found)
            best = torch.minimum(error, best)
        made.append(found)
    return torch.cat(made, 1)


def in_form(name: str, matrix: Tensor, model: nn.Module) -> Tensor:
    shape = model.get_parameter(name).shape
    return matrix.T if name == "mixing" else matrix.reshape(shape)


OPTIONS = [(4, None, True), (4, 4, False), (8, None, False), (3, 2, False)]
# A symmetric range has its extremes half way between integers, where sums of another order decide.
ALL = [*OPTIONS, (4, 4, True), (3, 2, True)]


def check(tool: Any, expected: dict[str, Tensor], rows: dict[str, Tensor] | None = None) -> None:
    """Check weights that ops read, and those that `finalize` writes.

    rows: what each weight multiplies, of a search: where processors decide between two candidates that are
    as good, the weights found have to be as good as those expected.
    """
    model = Network()
    original = {name: matrix.clone() for name, matrix in matrices(model).items()}
    calibrated(tool, model, BATCHES)
    assert tool.result.left == {}
    with amanda.apply(tool):
        simulated = model(BATCHES[0])
    tool.finalize(model)
    for name, wanted in expected.items():
        form = in_form(name, wanted, model)
        # Sums of another order may turn a tie: so few weights may be a step apart that one would be seen.
        apart = ~torch.isclose(model.get_parameter(name), form, atol=1e-6, rtol=1e-5)
        if rows is not None and apart.any():
            x = rows[name].double()
            errors = [
                (x @ (matrix - original[name]).double().T).square().mean()
                for matrix in (matrices(model)[name], wanted)
            ]
            assert errors[0] < 1.05 * errors[1], (name, errors)
        else:
            assert apart.float().mean() < 0.002, name
    assert torch.equal(model(BATCHES[0]), simulated)


@pytest.mark.parametrize(("bits", "size", "symmetric"), OPTIONS)
@pytest.mark.parametrize("block", [128, 8])
def test_gptq_gives_the_weights_of_the_paper(
    bits: int, size: int | None, symmetric: bool, block: int
) -> None:
    model, grid = Network(), Grid.of(bits, symmetric)
    inputs = [patches(model, x) for x in BATCHES]
    expected = {
        name: gptq_by_hand(matrix, torch.cat([one[name] for one in inputs]), grid, size, block)
        for name, matrix in matrices(model).items()
    }
    check(GPTQTool(bits, size, symmetric, block=block), expected)


@pytest.mark.parametrize(("bits", "size", "symmetric"), ALL)
@pytest.mark.parametrize("block", [128, 8])
def test_both_functions_give_what_the_algorithms_by_hand_do(
    bits: int, size: int | None, symmetric: bool, block: int
) -> None:
    torch.manual_seed(bits)
    grid, matrix, x = (
        Grid.of(bits, symmetric),
        torch.randn(24, 36),
        torch.randn(200, 36) @ torch.randn(36, 36),
    )
    x[:, 5] = 0
    hessian = 2 * x.double().T @ x.double() / len(x)
    found = dequantized(*gptq(matrix, hessian, grid, size or 36, block=block)).float()
    assert torch.allclose(found, gptq_by_hand(matrix, x, grid, size, block), atol=1e-6)

    def rounded(matrix: Tensor) -> Tensor:
        return nearest_by_hand(matrix, grid, size)

    s = awq_scales(matrix, x.abs().mean(0), x.T @ x / len(x), rounded)
    assert torch.allclose(rounded(matrix * s) / s, awq_by_hand(matrix, x, grid, size), atol=1e-6)


@pytest.mark.parametrize(("bits", "size", "symmetric"), ALL)
@pytest.mark.parametrize("block", [128, 8])
def test_act_order_gives_the_columns_of_the_paper_by_decreasing_hessian(
    bits: int, size: int | None, symmetric: bool, block: int
) -> None:
    torch.manual_seed(bits)
    grid, matrix = Grid.of(bits, symmetric), torch.randn(24, 36)
    x = torch.randn(200, 36) @ torch.randn(36, 36) * torch.rand(36)
    x[:, 5] = 0
    hessian = 2 * x.double().T @ x.double() / len(x)
    codes = gptq(matrix, hessian, grid, size or 36, block=block, act_order=True)
    wanted = act_order_by_hand(matrix, x, grid, size)
    assert torch.allclose(dequantized(*codes).float(), wanted, atol=1e-6)
    assert not torch.allclose(gptq_by_hand(matrix, x, grid, size, block), wanted, atol=1e-2)


def test_act_order_stores_integers_in_the_order_of_inputs() -> None:
    model, grid = Network(), Grid.of(4, symmetric=False)
    inputs = [patches(model, x) for x in BATCHES]
    expected = {
        name: act_order_by_hand(matrix, torch.cat([one[name] for one in inputs]), grid, 4)
        for name, matrix in matrices(model).items()
    }
    check(GPTQTool(4, 4, symmetric=False, act_order=True), expected)


@pytest.mark.parametrize(("bits", "size", "symmetric"), OPTIONS)
def test_awq_gives_the_weights_of_the_search_by_hand(bits: int, size: int | None, symmetric: bool) -> None:
    model, grid = Network(), Grid.of(bits, symmetric)
    inputs = [patches(model, x) for x in BATCHES]
    rows = {name: torch.cat([batch[name] for batch in inputs]) for name in inputs[0]}
    expected = {name: awq_by_hand(matrix, rows[name], grid, size) for name, matrix in matrices(model).items()}
    check(AWQTool(bits, size, symmetric), expected, rows)


@pytest.mark.parametrize(("bits", "size", "symmetric"), OPTIONS)
def test_awq_clips_as_the_search_by_hand(bits: int, size: int | None, symmetric: bool) -> None:
    torch.manual_seed(bits)
    grid, matrix = Grid.of(bits, symmetric), torch.randn(24, 36) ** 3
    x = torch.randn(200, 36) @ torch.randn(36, 36)

    def rounded(matrix: Tensor) -> Tensor:
        return nearest_by_hand(matrix, grid, size)

    gram = x.double().T @ x.double() / len(x)
    found = rounded(awq_clipped(matrix, gram, rounded, size or 36))
    assert torch.allclose(found, awq_clipped_by_hand(matrix, x, grid, size), atol=1e-5)
    assert torch.equal(found, rounded(matrix)) == (bits == 8), "with fine steps the limit is the largest"


def test_awq_clips_the_scaled_weight() -> None:
    model, grid = Network(), Grid.of(3, symmetric=False)
    expected, inputs = {}, {}
    for name, matrix in matrices(model).items():
        rows = inputs[name] = torch.cat([patches(model, x)[name] for x in BATCHES])

        def rounded(matrix: Tensor) -> Tensor:
            return nearest_by_hand(matrix, grid, 4)

        s = awq_scales(matrix, rows.abs().mean(0), rows.T @ rows / len(rows), rounded)
        expected[name] = awq_clipped_by_hand(matrix * s, rows / s, grid, 4) / s
    check(AWQTool(3, 4, symmetric=False, clip=True), expected, inputs)


@pytest.mark.parametrize(("bits", "size", "symmetric"), ALL)
def test_nearest_weights_are_those_by_hand_and_those_of_quantize(
    bits: int, size: int | None, symmetric: bool
) -> None:
    model, other = Network(), Network()
    tool = NearestTool(bits, size, symmetric)
    simulation = QuantizeTool(
        weight_bits=bits, activation_bits=None, group_size=size, symmetric_weights=symmetric,
        type=["conv2d", "linear", "matmul"],
    )  # fmt: skip
    with amanda.apply(tool):
        found = model(BATCHES[0])
    with amanda.apply(simulation):
        assert torch.equal(other(BATCHES[0]), found)
    tool.finalize(model)
    for name, matrix in matrices(other).items():
        wanted = in_form(name, nearest_by_hand(matrix, Grid.of(bits, symmetric), size), model)
        assert torch.allclose(model.get_parameter(name), wanted, atol=1e-6), name


BATCHES_OF_IDS = [torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(i)) for i in range(3)]
TURNS = [
    *(
        [f"model.layers.{i}.{one}" for one in names]
        for i in range(2)
        for names in (
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        )
    ),
    ["lm_head"],
]


@pytest.fixture
def llama(example: Any) -> Any:
    """A small Llama of random weights for a seed."""
    example("models").let_torchvision_load()
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()

    return made


def run_ids(model: Any) -> None:
    for ids in BATCHES_OF_IDS:
        model(input_ids=ids)


def quantise_in_order_by_hand(model: Any, grid: Grid, size: int) -> None:
    """Do as `true_sequential` of the authors' code: hooks note inputs in a run for each turn."""
    for names in TURNS:
        rows: dict[Any, list[Tensor]] = {model.get_submodule(name): [] for name in names}
        hooks = [
            layer.register_forward_pre_hook(lambda layer, given, rows=rows: rows[layer].append(given[0]))
            for layer in rows
        ]
        run_ids(model)
        for hook in hooks:
            hook.remove()
        for layer, given in rows.items():
            layer.weight.copy_(gptq_by_hand(layer.weight, torch.cat(given).flatten(0, -2), grid, size, 128))


@torch.no_grad()
def test_calibration_in_order_gives_the_weights_of_the_loop_by_hand(llama: Any, capfd: Any) -> None:
    model, other, tool = llama(0), llama(0), GPTQTool(4, 16, symmetric=False, type="linear")
    with amanda.apply(tool) as scope:
        tool.calibrate_in_order(lambda: run_ids(model))
    assert scope.report == []
    assert tool.result.left == {}
    assert any(note.startswith("Calibrated in 9 runs, each weight") for note in tool.result.notes())
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(TURNS)
    for turn, line in zip(TURNS, lines, strict=True):
        assert line.endswith(f"{', '.join(f'{name}.weight' for name in turn)}: quantised")
    tool.finalize(model)
    quantise_in_order_by_hand(other, Grid.of(4, symmetric=False), 16)
    for name, wanted in other.named_parameters():
        # A tie that sums of another order turn changes later inputs a little.
        apart = ~torch.isclose(model.get_parameter(name), wanted, atol=1e-5)
        assert apart.float().mean() < 0.005, name


@torch.no_grad()
def test_calibration_in_order_loses_less_than_of_all_weights_at_once(llama: Any) -> None:
    fresh = torch.randint(64, (32, 32), generator=torch.Generator().manual_seed(99))
    errors = {True: 0.0, False: 0.0}
    for seed in range(4):
        for in_order in errors:
            model, tool = llama(seed), GPTQTool(2, None, type="linear")
            wanted = model(input_ids=fresh).logits
            with amanda.apply(tool):
                if in_order:
                    tool.calibrate_in_order(partial(run_ids, model), progress=False)
                else:
                    with tool.calibrating():
                        run_ids(model)
                errors[in_order] += float((model(input_ids=fresh).logits - wanted).norm() / wanted.norm())
    assert errors[True] < 0.98 * errors[False], errors  # of coarse integers, whose errors reach far


def test_a_run_that_can_not_be_repeated_is_an_error_that_says_so() -> None:
    model, tool = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), GPTQTool(4, None)
    once = iter([torch.randn(16, 8)])
    message = r"call 2 of run read no weight that waits .* executes all batches each time"
    with amanda.apply(tool):
        with pytest.raises(QuantizeError, match=message):
            tool.calibrate_in_order(lambda: [model(x) for x in once], progress=False)
        with pytest.raises(QuantizeError, match=r"0\.weight was not calibrated"):
            model(torch.randn(1, 8))
        with pytest.raises(QuantizeError, match="call 1 of run read no weight"):
            tool.calibrate_in_order(lambda: None, progress=False)
        tool.calibrate_in_order(lambda: model(torch.ones(16, 8)), progress=False)
    assert tool.result.calibration.startswith("in 2 runs")


def test_gptq_and_awq_lose_less_than_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(512, 16) @ torch.randn(16, 64)  # channels that correlate, and some are large
    x[:, ::16] *= 20
    with torch.no_grad():
        wanted = model(x)
    errors = {}
    for kind in (NearestTool, GPTQTool, AWQTool):
        tool: Any = kind(bits=3, group_size=32)
        if kind is not NearestTool:
            calibrated(tool, model, [x])
        with amanda.apply(tool), torch.no_grad():
            errors[kind] = float((model(x) - wanted).norm() / wanted.norm())
    assert errors[GPTQTool] < 0.9 * errors[NearestTool]
    assert errors[AWQTool] < errors[NearestTool]


def test_smoothquant_divides_inputs_and_multiplies_weights_as_in_the_paper() -> None:
    model = Network()
    with torch.no_grad():
        wanted = [model(x) for x in BATCHES]
    tool = SmoothQuantTool(alpha=0.6)
    calibrated(tool, model, BATCHES)
    inputs = [patches(model, x) for x in BATCHES]
    found = {one.path: one for one in tool.weights}
    for name, matrix in matrices(model).items():
        rows = torch.cat([one[name] for one in inputs]).abs().amax(0)
        window = 9 if name == "conv.weight" else 1
        most = rows.reshape(-1, window).amax(1)
        weight = matrix.reshape(len(matrix), -1, window).abs().amax((0, 2))
        factors = most.clamp(min=1e-5) ** 0.6 / weight.clamp(min=1e-5) ** 0.4
        assert torch.allclose(torch.as_tensor(found[name]["smoothing"]), factors, rtol=1e-4), name
    with amanda.apply(tool), torch.no_grad():
        for x, one in zip(BATCHES, wanted, strict=True):
            assert torch.allclose(model(x), one, atol=1e-4)
    folded = tool.finalize(model)  # without `plan_fold` no factor can move into a layer
    with torch.no_grad():
        assert all(torch.equal(model(x), output) for x, output in zip(BATCHES, wanted, strict=True))
    assert set(folded.left) == set(found)


def test_quantisation_after_smoothquant_is_that_of_the_smoothed_factors() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 4, bias=False), torch.randn(64, 16)
    x[:, 3] *= 50
    smooth, quantize = SmoothQuantTool(), QuantizeTool("dynamic")
    calibrated(smooth, layer, [x])
    with amanda.apply(smooth, quantize), torch.no_grad():
        found = layer(x)
    factors = x.abs().amax(0).sqrt() / layer.weight.detach().abs().amax(0).sqrt()

    def quantised(value: Tensor, symmetric: bool, axes: tuple[int, ...]) -> Tensor:
        grid = Grid.of(8, symmetric)
        ends = value.aminmax(dim=1) if axes else value.aminmax()
        made: Tensor = fake_quantize(value, *choose_qparams(*ends, grid), grid, axes)
        return made

    weight = quantised((layer.weight * factors).detach(), True, (0,))
    assert torch.allclose(found, F.linear(quantised(x / factors, False, ()), weight), atol=1e-3)
    with amanda.apply(QuantizeTool("dynamic")), torch.no_grad():
        rough = layer(x)
    wanted = layer(x)
    assert (found - wanted).norm() < 0.5 * (rough - wanted).norm()


def test_gradients_go_through_smoothed_factors() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 4), torch.randn(8, 16, requires_grad=True)
    tool = SmoothQuantTool()
    calibrated(tool, layer, [x.detach()])
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    wanted = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None
    with amanda.apply(tool):
        layer(x).square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.allclose(x.grad, wanted[0], atol=1e-4)
    assert torch.allclose(layer.weight.grad, wanted[1], atol=1e-4)


def test_integers_survive_state_dict() -> None:
    model = Network()
    tool = GPTQTool(4, 4)
    calibrated(tool, model, BATCHES)
    with amanda.apply(tool):
        wanted = model(BATCHES[0])
    state = tool.state_dict()
    assert state["first.weight/codes"].dtype == torch.int8
    assert tuple(state["first.weight/scale"].shape) == (64, 8)
    again = GPTQTool(4, 4)
    again.load_state_dict(state)
    with amanda.apply(again):
        assert torch.equal(model(BATCHES[0]), wanted)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_calibration_begins_anew_after_state_was_loaded(in_order: bool) -> None:
    found = []
    for loads in (False, True):
        torch.manual_seed(0)
        model, tool = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), GPTQTool(3, None)
        if loads:
            former = GPTQTool(3, None)
            met_with(former, model, torch.eye(8))
            tool.load_state_dict(former.state_dict())
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) ** 3
        with amanda.apply(tool), torch.no_grad():
            if in_order:
                tool.calibrate_in_order(partial(model, x), progress=False)
            else:
                with tool.calibrating():
                    model(x)
            found.append(model(x))
        assert tool.result.left == {}
    assert torch.equal(*found)


def test_what_is_left_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(24, 10))
    tool = GPTQTool(4, 8)
    calibrated(tool, model, [torch.randn(2, 4, 7)])
    assert tool.result.left == {
        "conv1d of 0": "its 6 inputs are no multiple of group_size 8",
        "conv1d of 1": "its 12 inputs are no multiple of group_size 8",
    }
    whole = GPTQTool(4, None)
    calibrated(whole, model, [torch.randn(2, 4, 7)])
    assert whole.result.left == {
        "conv1d of 0": "its convolution has 2 groups, each of which reads other inputs"
    }
    assert [row[-2:] for row in whole.result.rows()] == [(None, None), (4, 12), (4, 24)]
    tied = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8, bias=False))
    tied[1].weight = tied[0].weight
    shared = GPTQTool(4, 8)
    calibrated(shared, tied, [torch.arange(8)])
    assert shared.result.left == {"linear of 1": "an embedding reads it too"}


def test_a_weight_that_was_not_calibrated_is_an_error_that_says_where() -> None:
    message = r"0.weight was not calibrated: .* this GPTQTool"
    with pytest.raises(QuantizeError, match=message), amanda.apply(GPTQTool(4, None)):
        nn.Sequential(nn.Linear(4, 4))(torch.randn(1, 4))
    import tensorflow as tf

    matrix = tf.Variable(tf.ones((4, 4)))
    for tool in (NearestTool(4, None), GPTQTool(4, None)):
        with pytest.raises(QuantizeError, match=f"{type(tool).__name__} is for PyTorch"), amanda.apply(tool):
            tf.matmul(tf.ones((1, 4)), matrix)
    model = nn.Linear(4, 4)
    with pytest.raises(QuantizeError, match="NaN or Inf in what the linear of weight is given"):
        met_with(AWQTool(4, None), model, torch.tensor([[torch.inf] * 4]))


def test_parts_of_one_parameter_have_their_own_integers() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, y = torch.randn(2, 50, 8), torch.randn(2, 30, 8)
    tool = GPTQTool(4, None)
    with amanda.apply(tool), tool.calibrating():
        model(x, y, y)
    with amanda.apply(tool), torch.no_grad():
        found = model(x, y, y)[0]
    tool.finalize(model)
    assert torch.allclose(model(x, y, y)[0], found, atol=1e-6)
    torch.manual_seed(0)
    weights = nn.MultiheadAttention(8, 2, batch_first=True).in_proj_weight.detach().split(8)
    inputs = [one.reshape(-1, 8) for one in (x, y, y)]
    wanted = [
        gptq_by_hand(w, rows, Grid.of(4, True), None, 128) for w, rows in zip(weights, inputs, strict=True)
    ]
    assert torch.allclose(model.in_proj_weight, torch.cat(wanted), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTQTool(bits=9), "bits is 9; give an integer from 2 to 8"),
        (lambda: NearestTool(group_size=0), "group_size is 0"),
        (lambda: GPTQTool(damping=0), "damping is 0"),
        (lambda: GPTQTool(block=0), "block is 0"),
        (lambda: GPTQTool(act_order="static"), "act_order is 'static'"),  # type: ignore[arg-type]
        (lambda: AWQTool(steps=0), "steps is 0"),
        (lambda: AWQTool(clip=1), "clip is 1"),  # type: ignore[arg-type]
        (lambda: SmoothQuantTool(alpha=2), "alpha is 2"),
    ],
)
def test_options_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        make()
