"""The tool that quantises, on PyTorch."""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import amanda
from amanda.__main__ import main
from amanda.tools.command import SpecError, ToolSpec, make_tools
from amanda.tools.quantize import (
    Grid,
    QuantizeError,
    QuantizeTool,
    _result,
    choose_qparams,
    extremes,
    fake_quantize,
    lsq_quantize,
    lsq_scale,
)
from amanda.tools.quantize._result import read_scales, write_scales
from amanda.tools.select import select

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import FakeQuantize, observer


class Network(nn.Module):
    """A convolution, attention of functions, an addition and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, groups=1)
        self.key = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x)).flatten(2).mT
        y = y + F.scaled_dot_product_attention(y, y @ self.key, y, scale=0.7)
        out: Tensor = self.head((y.softmax(-1) @ y.mT).softmax(-1) @ y)
        return out


@pytest.fixture
def model() -> Network:
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 6, 6, generator=generator) for _ in range(3)]


def calibrated(model: nn.Module, batches: list[Tensor], **options: Any) -> QuantizeTool:
    tool = QuantizeTool(**options)
    with amanda.apply(tool), tool.calibrating():
        for x in batches:
            model(x)
    return tool


def test_calibration_changes_nothing_and_then_the_inputs_of_every_op_are_quantised(
    model: Network, batches: list[Tensor]
) -> None:
    tool = QuantizeTool(type=["conv*", "linear", "matmul", "scaled*", "add"])
    with amanda.apply(tool) as scope:
        with tool.calibrating():
            assert torch.equal(model(batches[0]), _vanilla(model, batches[0]))
        quantised = model(batches[0])
    assert scope.report == []
    assert 0 < (quantised - model(batches[0])).abs().max() < 0.1
    found = [(one.module, one.type, one.tensor, len(one.scale)) for one in tool.result]
    assert found == [
        ("conv", "conv2d", "input 0", 1), ("conv", "conv2d", "weight", 4),
        ("", "matmul", "input 0", 1), ("", "matmul", "weight", 4),
        ("", "scaled_dot_product_attention", "input 0", 1),
        ("", "scaled_dot_product_attention", "input 1", 1),
        ("", "scaled_dot_product_attention", "input 2", 1),
        ("", "add", "input 0", 1), ("", "add", "input 1", 1),
        ("", "matmul", "input 0", 1), ("", "matmul", "input 1", 1),
        ("", "matmul", "input 0", 1), ("", "matmul", "input 1", 1),
        ("head", "linear", "input 0", 1), ("head", "linear", "weight", 5),
    ]  # fmt: skip


def _vanilla(model: nn.Module, x: Tensor) -> Any:
    with amanda.disabled():
        return model(x)


def test_a_static_linear_layer_is_the_one_quantised_by_hand() -> None:
    torch.manual_seed(0)
    layer, batches = nn.Linear(6, 3), [torch.randn(5, 6) for _ in range(4)]
    of_weight = observer.PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    of_input = observer.HistogramObserver()
    for x in batches:
        of_input(x)
    of_weight(layer.weight)
    s, z = (
        one.to(kind)
        for one, kind in zip(of_weight.calculate_qparams(), (torch.float, torch.int), strict=True)
    )
    weight = torch.fake_quantize_per_channel_affine(layer.weight.detach(), s, z, 0, -128, 127)
    scale, zero_point = of_input.calculate_qparams()
    x = torch.fake_quantize_per_tensor_affine(batches[0], scale.item(), int(zero_point.item()), 0, 255)
    tool = calibrated(layer, batches, observer="histogram")
    with amanda.apply(tool):
        found = layer(batches[0])
    assert torch.equal(found, F.linear(x, weight, layer.bias))


def test_dynamic_scales_are_those_of_each_execution() -> None:
    layer = nn.Linear(6, 3)
    tool = QuantizeTool("dynamic", weight_bits=None)
    with amanda.apply(tool):
        for factor in (1, 100):
            x = torch.randn(5, 6) * factor
            grid = Grid.of(8, symmetric=False)
            wanted = fake_quantize(x, *choose_qparams(*x.aminmax(), grid), grid)
            found = layer(x)
            with amanda.disabled():
                assert torch.equal(found, layer(wanted))
    assert [one.scale for one in tool.result] == [None]


def test_prepare_calibrates_the_static_method_unless_there_are_scales(
    model: Network, batches: list[Tensor]
) -> None:
    tool, by_hand = QuantizeTool("static"), calibrated(model, batches[:1])
    assert torch.equal(tool.prepare(model, batches[0]), _vanilla(model, batches[0]))
    loaded = QuantizeTool("static")
    loaded.load_state_dict(tool.state_dict())
    for prepared in (tool, loaded):
        prepared.prepare(model, 100 * batches[1])
        assert [row.scale for row in prepared.result] == [row.scale for row in by_hand.result]


def test_an_activation_that_was_never_calibrated_is_an_error_that_says_where(model: Network) -> None:
    tool = QuantizeTool(type=["linear"])
    with pytest.raises(QuantizeError, match="input 0 has no scale: calibrate") as caught, amanda.apply(tool):
        model(torch.randn(1, 3, 6, 6))
    assert any("QuantizeTool" in note and "head" in note for note in caught.value.__notes__)


class ByHand(nn.Module):
    """A convolution and a linear layer with torch.ao's modules for quantisation-aware training."""

    def __init__(self, conv: nn.Conv2d, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.conv, self.linear = conv, linear
        weight = Grid.of(bits, symmetric=True)
        act = Grid.of(bits, symmetric=False)
        per_channel = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        moving = observer.MovingAveragePerChannelMinMaxObserver
        self.of_weights = nn.ModuleList(
            FakeQuantize(moving, weight.low, weight.high, averaging_constant=1.0, **per_channel)
            for _ in range(2)
        )
        self.of_inputs = nn.ModuleList(
            FakeQuantize(observer.MovingAverageMinMaxObserver, act.low, act.high, averaging_constant=0.1)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(self.of_inputs[0](x), self.of_weights[0](self.conv.weight), self.conv.bias)
        x = torch.relu(x).flatten(1)
        return F.linear(self.of_inputs[1](x), self.of_weights[1](self.linear.weight), self.linear.bias)


def layers() -> tuple[nn.Conv2d, nn.Linear]:
    torch.manual_seed(3)
    return nn.Conv2d(2, 3, 3), nn.Linear(3 * 4 * 4, 4)


def trained(model: Any, parameters: Any, steps: int = 8) -> list[float]:
    """Losses of training with SGD on fixed batches."""
    generator = torch.Generator().manual_seed(7)
    optimizer, losses = torch.optim.SGD(parameters, lr=0.05, momentum=0.9), []
    for _ in range(steps):
        x, y = torch.randn(4, 2, 6, 6, generator=generator), torch.randint(4, (4,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantisation_aware_training_has_the_losses_of_the_one_written_by_hand(bits: int) -> None:
    by_hand = ByHand(*layers(), bits)
    wanted = trained(by_hand, by_hand.parameters())
    conv, linear = layers()
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear)
    tool = QuantizeTool("qat", weight_bits=bits, activation_bits=bits, averaging=0.1)
    with amanda.apply(tool):
        assert trained(model, model.parameters()) == wanted
        tool.freeze()
        by_hand.apply(torch.ao.quantization.disable_observer)
        x = torch.randn(4, 2, 6, 6) * 3
        found = model(x)
    assert torch.equal(found, by_hand(x))
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), by_hand.parameters(), strict=True)
    )


class LsqByHand(nn.Module):
    """The same with learned step sizes, as the papers' pseudocode has them."""

    def __init__(
        self, conv: nn.Conv2d, linear: nn.Linear, scales: list[Tensor], offsets: list[Tensor]
    ) -> None:
        super().__init__()
        self.conv, self.linear = conv, linear
        self.scales = nn.ParameterList([one.clone() for one in scales])
        self.offsets = nn.ParameterList([one.clone() for one in offsets])
        self.signed = not offsets

    def quantised(self, i: int, x: Tensor) -> Tensor:
        weight = i % 2
        low, high = (-4, 3) if weight or (self.signed and i == 0) else (0, 7)
        count = x.numel() // (len(self.scales[i]) if weight else len(x))
        factor = 1 / (count * high) ** 0.5
        s = self.scales[i].view(-1, *[1] * (x.dim() - 1)) if weight else self.scales[i]
        s = (s - s * factor).detach() + s * factor
        shift = torch.zeros(())
        if self.offsets and not weight:
            shift = self.offsets[i // 2]
            shift = (shift - shift * factor).detach() + shift * factor
        v = (x - shift) / s
        v = torch.where((v > low) & (v < high), v, v.detach().clamp(low, high))
        return ((v.round() - v).detach() + v) * s + shift

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(self.quantised(0, x), self.quantised(1, self.conv.weight), self.conv.bias)
        x = torch.relu(x).flatten(1)
        return F.linear(self.quantised(2, x), self.quantised(3, self.linear.weight), self.linear.bias)


@pytest.mark.parametrize("method", ["lsq", "lsq+"])
def test_learned_step_sizes_have_the_losses_of_those_written_by_hand(method: Any) -> None:
    conv, linear = layers()
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear)
    tool = QuantizeTool(method, weight_bits=3, activation_bits=3)
    tool.prepare(model, torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(2)))
    state = {name: value.detach().clone() for name, value in tool.state_dict().items()}
    scales = [value for name, value in state.items() if name.endswith("scale")]
    offsets = [value for name, value in state.items() if name.endswith("offset")]
    assert (len(scales), len(offsets)) == (4, 2 if method == "lsq+" else 0)
    with amanda.apply(tool):
        losses = trained(model, [*model.parameters(), *tool.parameters()])
    by_hand = LsqByHand(*layers(), scales, offsets)
    torch.testing.assert_close(losses, trained(by_hand, by_hand.parameters()), rtol=1e-5, atol=1e-6)
    learned = [value for name, value in tool.state_dict().items() if name.endswith("scale")]
    torch.testing.assert_close(learned, list(by_hand.scales), rtol=1e-4, atol=1e-6)
    assert all((one - other).abs().max() > 0 for one, other in zip(learned, scales, strict=True))


def test_an_optimizer_that_has_the_scales_trains_those_that_are_loaded() -> None:
    x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(2))

    def started() -> tuple[Any, ...]:
        conv, linear = layers()
        model, tool = (
            nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear),
            QuantizeTool("lsq+", weight_bits=3, activation_bits=3),
        )
        tool.prepare(model, x)
        return model, tool, torch.optim.Adam([*model.parameters(), *tool.parameters()], 0.01)

    def trained(model: nn.Module, tool: QuantizeTool, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        with amanda.apply(tool):
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        return [one.detach().clone() for one in [*model.parameters(), *tool.parameters()]]

    one, other = started(), started()
    trained(*one)
    for mine, saved in zip(other, one, strict=True):
        mine.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert all(map(torch.equal, trained(*one), trained(*other)))


@pytest.mark.parametrize(
    ("method", "suffix"),
    [("static", "pt"), ("static", "json"), ("static", "safetensors"), ("dynamic", "json"),
     ("qat", "pt"), ("qat", "safetensors"), ("lsq", "json"), ("lsq+", "pt"), ("lsq+", "safetensors")],
)  # fmt: skip
def test_another_tool_quantises_with_the_scales_of_a_file(
    method: Any, suffix: str, model: Network, batches: list[Tensor], tmp_path: Path
) -> None:
    tool, path = calibrated(model, batches, method=method, weight_bits=4), tmp_path / f"scales.{suffix}"
    with amanda.apply(tool):
        model(batches[1]).sum().backward()
        tool.freeze()
        wanted = model(batches[0])
    again = QuantizeTool(method, weight_bits=4)
    if suffix == "pt":
        torch.save(tool.state_dict(), path)
        again.load_state_dict(torch.load(path, weights_only=True))
    else:
        tool.save(path)
        again.load(path)
    again.freeze()
    with amanda.apply(again):
        assert torch.equal(model(batches[0]), wanted)
    assert len(list(again.parameters())) == len(list(tool.parameters()))
    assert again.result._facts()["qparams"] == tool.result._facts()["qparams"]


def test_scales_of_an_older_version_are_read_and_of_a_newer_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"fc/linear/weight.scale": np.float32([0.5, 2])}
    for suffix in (".json", ".safetensors"):
        path = write_scales(tmp_path / f"scales{suffix}", arrays, {"options": {}})
        with monkeypatch.context() as later:
            later.setattr(_result, "_VERSION", 2)
            found, about = read_scales(path)
            newer = write_scales(tmp_path / f"newer{suffix}", arrays, {})
        assert np.array_equal(found["fc/linear/weight.scale"], arrays["fc/linear/weight.scale"])
        assert about["version"] == 1
        with pytest.raises(QuantizeError, match=r"version 1 is read here; it is newer: update "):
            read_scales(newer)


def test_scales_for_other_bits_are_refused(model: Network, batches: list[Tensor], tmp_path: Path) -> None:
    path = calibrated(model, batches).save(tmp_path / "scales.json")
    with pytest.raises(QuantizeError, match=r"scales\.json holds scales for weight_bits 8, not 4"):
        QuantizeTool(weight_bits=4).load(path)
    again, other = QuantizeTool(), nn.Sequential(nn.Linear(3, 2))
    again.load_state_dict({"0/linear/weight.scale": torch.ones(5)}, strict=False)
    with amanda.apply(again), pytest.raises(QuantizeError, match=r"shape \(5,\), not \(2,\)"):
        other(torch.ones(1, 3))
    path.write_text("{}")
    with pytest.raises(QuantizeError, match="no file of scales"):
        QuantizeTool().load(path)
    with pytest.raises(QuantizeError, match="another suffix"):
        QuantizeTool().save(tmp_path / "scales.txt")


PROGRAM = """
import sys, torch, amanda
from torch import nn
from amanda.tools.quantize import QuantizeTool

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
x = torch.randn(4, 2, 6, 6)
tool = QuantizeTool(observer="percentile", weight_observer="mse", activation_bits=6)
scales, outputs = sys.argv[1:]
with amanda.apply(tool):
    try:
        tool.load(scales)
    except FileNotFoundError:
        with tool.calibrating():
            model(x)
        y = model(x)
        tool.save(scales)
        torch.save(y, outputs)
    else:
        assert torch.equal(model(x), torch.load(outputs))
        print("equal")
"""


@pytest.mark.slow
def test_a_frozen_tool_gives_the_same_in_a_new_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, tmp_path / "scales.safetensors", tmp_path / "outputs.pt"]
    printed = [children.run(command, check=True).stdout for _ in range(2)]
    assert printed == ["", "equal\n"]


def test_clear_starts_anew(model: Network, batches: list[Tensor]) -> None:
    tool = calibrated(model, batches)
    tool.clear()
    assert (tool.state_dict(), tool.result.rows()) == ({}, [])
    with amanda.apply(tool), pytest.raises(QuantizeError, match="has no scale"):
        model(batches[0])


def test_so_many_executions_calibrate_where_there_is_no_phase_for_it(
    model: Network, batches: list[Tensor]
) -> None:
    wanted, tool = calibrated(model, batches[:2]), QuantizeTool(calibration=2)
    with amanda.apply(tool):
        outputs = [model(x) for x in batches]
    assert torch.equal(outputs[1], model(batches[1]))
    assert not torch.equal(outputs[2], model(batches[2]))
    assert tool.result._facts() == wanted.result._facts()


def test_noise_is_measured_against_the_same_inputs_unquantised(model: Network, batches: list[Tensor]) -> None:
    tool = calibrated(model, batches, sqnr=True, type=["linear", "scaled*"], activation_bits=5)
    seen: dict[str, Any] = {}

    class Recorder(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op_type() in ("linear", "scaled_dot_product_attention"):
                kind = context.get_op_type()
                context.insert_before_op(lambda *values: seen.update({f"given {kind}": values}))
                context.insert_after_op(lambda *values: seen.update({f"gave {kind}": values}))

    with amanda.apply(Recorder(), tool):
        model(batches[0])
    q, k, v, *_ = seen["given scaled_dot_product_attention"]
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.7)
    noise = wanted - seen["gave scaled_dot_product_attention"][0]
    decibels = 10 * torch.log10(wanted.double().square().sum() / noise.double().square().sum())
    found = {one.type: one for one in tool.result}
    assert found["scaled_dot_product_attention"].output_sqnr == pytest.approx(decibels.item(), abs=0.01)
    x = seen["given linear"][0]
    (row,) = [one for one in tool.result if (one.type, one.tensor) == ("linear", "input 0")]
    grid = Grid.of(5, symmetric=False)
    scale, zero_point = (torch.tensor(one) for one in (row.scale, row.zero_point))
    noise = x - fake_quantize(x, scale, zero_point, grid)
    decibels = 10 * torch.log10(x.double().square().sum() / noise.double().square().sum())
    assert row.sqnr == pytest.approx(decibels.item(), abs=0.01)
    assert "SQNR" in str(tool.result)
    ratios = {kind: ratio for _, kind, ratio in tool.result.worst()}
    assert ratios["scaled_dot_product_attention"] == found["scaled_dot_product_attention"].output_sqnr
    assert list(ratios.values()) == sorted(ratios.values())


def test_a_result_is_valid_json_also_where_there_is_no_noise() -> None:
    tool, layer = QuantizeTool("dynamic", sqnr=True, weight_bits=None), nn.Linear(2, 2)
    with amanda.apply(tool):
        layer(torch.tensor([[0.0, 255.0]]))
    assert [one.sqnr for one in tool.result] == [math.inf]
    found = json.loads(tool.result.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert (found["schema"], found["version"], found["rows"][0]["SQNR"]) == ("amanda.quantize", 1, None)


def test_more_bits_leave_less_noise(model: Network, batches: list[Tensor]) -> None:
    found = []
    for bits in (2, 4, 6, 8):
        tool = calibrated(model, batches, sqnr=True, weight_bits=bits, activation_bits=bits)
        with amanda.apply(tool):
            model(batches[0])
        found.append(next(one.output_sqnr for one in tool.result if one.type == "conv2d"))
    assert found == sorted(found)
    assert [9 < b - a < 15 for a, b in pairwise(found)] == [True] * 3  # 6 dB a bit


def test_two_tools_give_two_parts_different_bits(model: Network, batches: list[Tensor]) -> None:
    eight = select(QuantizeTool(), module="conv")
    four = select(QuantizeTool(weight_bits=4, activation_bits=4), module="head")
    with amanda.apply(eight, four), eight.calibrating(), four.calibrating():
        model(batches[0])
    with amanda.apply(eight, four):
        model(batches[0])
    assert [(one.module, one.bits) for tool in (eight, four) for one in tool.result] == [
        ("conv", 8), ("conv", 8), ("head", 4), ("head", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "statics"}, "method is 'statics'; give one of 'static', 'dynamic'"),
        ({"weight_bits": 17}, "weight_bits is 17; give an integer from 2 to 16, 'e4m3' or 'e5m2'"),
        ({"weight_bits": None, "activation_bits": None}, "nothing would be quantised"),
        ({"observer": "max"}, "observer is 'max'"),
        ({"method": "dynamic", "observer": "mse"}, "dynamic takes the extremes at each execution"),
        ({"method": "lsq", "rounding": "half_up"}, "lsq rounds half to even"),
        ({"percentile": 0.5}, "above 50"),
        ({"averaging": 0}, "above 0"),
        ({"calibration": -1}, "calibration is -1; give an integer"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        QuantizeTool(**options)


def test_values_that_are_not_finite_cannot_calibrate(model: Network) -> None:
    tool = QuantizeTool()
    with pytest.raises(QuantizeError, match="NaN or Inf") as caught, amanda.apply(tool), tool.calibrating():
        model(torch.full((1, 3, 6, 6), torch.nan))
    assert any("conv2d" in note for note in caught.value.__notes__)


def test_what_optimizers_compute_is_not_quantised() -> None:
    layer = nn.Linear(3, 3)
    tool = QuantizeTool("dynamic", type=["add", "linear"])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
    with amanda.apply(tool):
        layer(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert {one.type for one in tool.result} == {"linear"}


def test_tensors_without_elements_or_with_some_alone_are_left_as_they_are() -> None:
    layer, tool = nn.Linear(3, 2), QuantizeTool("dynamic")
    sparse = torch.eye(3).to_sparse()
    with amanda.apply(tool):
        assert layer(torch.empty(0, 3)).shape == (0, 2)
        found = torch.sparse.mm(sparse, torch.ones(3, 2)), sparse @ torch.ones(3, 2)
    assert all(torch.equal(one, torch.ones(3, 2)) for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["static", "dynamic", "qat", "lsq", "lsq+"])
def test_models_of_other_types_stay_of_their_type(method: Any, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
    x = torch.randn(5, 4, dtype=dtype)
    tool = calibrated(model, [x], method=method)
    with amanda.apply(tool):
        y = model(x)
        y.sum().backward()
    assert y.dtype == dtype
    assert {one.dtype for one in tool.state_dict().values()} == {torch.float32}
    assert all(one.grad is not None and one.grad.dtype == dtype for one in model.parameters())
    assert (y - model(x)).abs().max() < 1


def test_tensors_in_a_list_are_quantised_each() -> None:
    torch.manual_seed(0)
    a, b, tool = torch.randn(2, 3, 4), torch.randn(2, 5, 4), QuantizeTool("dynamic", type=["einsum"])
    with amanda.apply(tool):
        found = torch.einsum("bij,bkj->bik", a, b)
    grid = Grid.of(8, symmetric=False)
    a, b = (fake_quantize(one, *choose_qparams(*one.aminmax(), grid), grid) for one in (a, b))
    assert torch.equal(found, torch.einsum("bij,bkj->bik", a, b))


PROGRAM_UNDER_THE_COMMAND = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for _ in range(3):
    model(torch.randn(16, 4))
"""


@pytest.mark.slow
def test_the_command_quantises_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM_UNDER_THE_COMMAND)
    tool = "quantize:weight_bits=4,type=linear,calibration=2,sqnr=true"
    command = [sys.executable, "-m", "amanda", "run", "-t", tool, "--", "program.py"]
    done = children.run(command, cwd=tmp_path, check=True)
    assert "Quantised tensors" in done.stdout + done.stderr


def test_scales_that_were_loaded_are_not_calibrated_again(model: Network, batches: list[Tensor]) -> None:
    state = calibrated(model, batches[:1]).state_dict()
    tool = QuantizeTool(calibration=2)
    tool.load_state_dict(state)
    with amanda.apply(tool):
        assert not torch.equal(model(batches[1]), _vanilla(model, batches[1]))
    assert {one.executions for one in tool.result} == {1}


def test_without_a_cache_it_is_the_same(model: Network, batches: list[Tensor]) -> None:
    found = []
    for cache in (amanda.cache_enabled, amanda.cache_disabled):
        tool = QuantizeTool("qat")
        with cache(), amanda.apply(tool):
            found.append([model(x) for x in batches])
        assert {one.executions for one in tool.result} == {len(batches)}
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Experts(nn.Module):
    """Linear layers in parts of a parameter, of quite different sizes; the input says which are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(3, 4, 4) * torch.tensor([1.0, 20.0, 400.0]).reshape(3, 1, 1))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for i in chosen:
            x = F.linear(x, self.weight[i])
        return x


class Listed(nn.Module):
    """Linear layers with weights in a list, of quite different sizes; the input says which are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4) * 20**i) for i in range(3))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return sum((F.linear(x * 20**i, self.weights[i]) for i in chosen), torch.zeros(()))


def test_scales_of_parameters_in_a_list_go_by_the_parameter_whichever_is_read_first() -> None:
    model, x = Listed(), torch.rand(3, 4)
    first, again = (
        QuantizeTool(weight_bits=4, activation_bits=4),
        QuantizeTool(weight_bits=4, activation_bits=4),
    )
    with amanda.apply(first), first.calibrating():
        model(x, [0, 1, 2])
    with amanda.apply(first):
        y = model(x, [0, 1, 2])
    again.load_state_dict(first.state_dict())
    with amanda.apply(again):
        model(x, [2])
        model(x, [1])
        assert torch.equal(model(x, [0, 1, 2]), y)
    assert not again.result.waiting


@pytest.mark.parametrize("method", ["static", "dynamic", "qat", "lsq"])
def test_parts_of_a_parameter_have_scales_of_their_own_whichever_an_op_reads(method: Any) -> None:
    model, x, tool = Experts(), torch.rand(3, 4), QuantizeTool(method, weight_bits=4, activation_bits=None)
    grid, batches = Grid.of(4, symmetric=True), [[0, 1], [2], [1, 2, 0]]

    def by_hand(i: int) -> Tensor:
        weight = model.weight[i].detach()
        if method == "lsq":
            return lsq_quantize(weight, lsq_scale(weight, grid, (0,)), grid, axes=(0,))
        return fake_quantize(weight, *choose_qparams(*extremes(weight, (0,)), grid), grid, (0,))

    for chosen in batches:
        y = x
        for i in chosen:
            y = F.linear(y, by_hand(i))
        with amanda.apply(tool):
            assert torch.equal(model(x, chosen), y)
    assert sorted(row.tensor for row in tool.result) == ["weight@0", "weight@16", "weight@32"]
    again = QuantizeTool(method, weight_bits=4, activation_bits=None)
    again.load_state_dict(tool.state_dict())
    with torch.no_grad(), amanda.apply(again):
        assert torch.equal(model(x, [1, 2, 0]), y)
    assert again.state_dict().keys() == tool.state_dict().keys()


def test_scales_of_other_modules_are_told() -> None:
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    first, again = QuantizeTool("qat"), QuantizeTool("qat")
    with amanda.apply(first):
        nn.ModuleDict({"module": model})["module"](x)
    theirs = {f"module{name}": value for name, value in first.state_dict().items()}
    again.load_state_dict(theirs, strict=False)
    with amanda.apply(again):
        model(x)
    assert again.result.waiting == ("module/linear/input0.scale", "module/linear/weight.scale")
    assert "2 of the scales that were loaded are of no op that was met" in str(again.result)


@pytest.mark.parametrize(
    "options", [{"percentile": "x"}, {"averaging": "a"}, {"calibration": 1.5}, {"type": 5}]
)
def test_options_of_another_kind_are_refused(options: Any) -> None:
    ((name, given),) = options.items()
    with pytest.raises(QuantizeError, match=f"{name} is {given!r}"):
        QuantizeTool(**options)


def test_what_a_parametrization_computes_a_weight_by_is_left() -> None:
    model, x = nn.Sequential(spectral_norm(nn.Linear(8, 4))).eval(), torch.rand(2, 8)
    dense, grid = model[0].weight.detach(), Grid.of(4, symmetric=True)
    with amanda.apply(tool := QuantizeTool(weight_bits=4, activation_bits=None)):
        y = model(x)
    assert [row.module for row in tool.result] == ["0"]
    made = fake_quantize(dense, *choose_qparams(*extremes(dense, (0,)), grid), grid, (0,))
    assert torch.equal(y, F.linear(x, made, model[0].bias))


class Gathered(nn.Module):
    """Experts of quite different sizes, whose weights are gathered for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        sizes = torch.tensor([1.0, 20.0, 400.0]).reshape(3, 1, 1)
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4) * sizes), nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.bmm(self.up[chosen], x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(hidden.unsqueeze(1), self.down.index_select(0, chosen)).squeeze(1)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("method", ["static", "dynamic", "qat"])
def test_weights_that_the_data_select_have_the_scales_of_what_is_read(method: Any, per_channel: bool) -> None:
    model, by_hand, x = Gathered(), Gathered(), torch.rand(3, 4)
    tool = QuantizeTool(method, weight_bits=4, activation_bits=None, per_channel=per_channel)
    grid = Grid.of(4, symmetric=True)
    for parameter, axis in ((by_hand.up, 0), (by_hand.down, 1)):
        axes = (axis,) if per_channel else ()
        rows = [
            fake_quantize(row, *choose_qparams(*extremes(row, axes), grid), grid, axes)
            for row in parameter.data
        ]
        parameter.data = torch.stack(rows)
    for chosen in (torch.tensor([0, 2, 2]), torch.tensor([1, 0, 1])):
        with amanda.apply(tool):
            y = model(x, chosen)
            y.sum().backward()
        torch.testing.assert_close(y, by_hand(x, chosen))
    assert model.up.grad is not None
    assert model.up.grad.any()
    assert not tool.result.left


@pytest.mark.parametrize("mode", ["eager", "instrument"])
def test_learned_scales_of_what_the_data_select_are_told_to_be_left(mode: Any) -> None:
    torch._dynamo.reset()
    model, x, chosen = Gathered(), torch.rand(3, 4), torch.tensor([0, 2, 2])
    tool, y = QuantizeTool("lsq", weight_bits=4, activation_bits=None), model(x, chosen)
    with amanda.apply(tool, compiled=mode):
        found = (torch.compile(model, backend="eager") if mode == "instrument" else model)(x, chosen)
    assert torch.equal(found, y)
    assert "its scale is learned" in str(tool.result)


@pytest.mark.parametrize("method", ["static", "qat"])
@pytest.mark.parametrize("first", ["product", "embedding"])
def test_an_embedding_and_a_product_of_one_parameter_have_the_same_scales(first: str, method: Any) -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    tool = QuantizeTool(method, weight_bits=4, activation_bits=None, type=["linear", "embedding"])
    calls = [lambda: head(torch.eye(4)).T, lambda: embedding(torch.arange(8))]
    with amanda.apply(tool):
        one, other = [call() for call in (calls if first == "product" else calls[::-1])]
    assert torch.equal(one, other)
    assert not torch.equal(one, embedding.weight)
    product, lookup = tool.result.tensors
    assert product.scale == lookup.scale


def test_a_calibration_replaces_a_zero_point_that_was_loaded() -> None:
    layer, x = torch.nn.Linear(3, 2), torch.tensor([[0.5, 1.0, 2.0]])
    states = []
    for symmetric in (False, True):
        tool = QuantizeTool("static", symmetric_activations=symmetric)
        tool.load_state_dict(states[-1] if states else {})
        with amanda.apply(tool):
            with tool.calibrating():
                layer(x - 1)
            layer(x)
        states.append(tool.state_dict())
    (name,) = (one for one in states[0] if one.endswith("/input0.zero_point"))
    before, after = (float(state[name]) for state in states)
    assert before != 0
    assert after == 0


def test_executions_of_an_interrupted_calibration_do_not_count() -> None:
    layer, x = torch.nn.Linear(3, 2), torch.tensor([[0.5, 1.0, 2.0]])
    y, wanted, tool = layer(x), calibrated(layer, [x]), QuantizeTool(calibration=2)
    with amanda.apply(tool):
        with suppress(KeyboardInterrupt), tool.calibrating():
            layer(x * 10)
            layer(x * 10)
            raise KeyboardInterrupt
        unquantised, quantised = [layer(x), layer(x)], layer(x)
    assert all(torch.equal(output, y) for output in unquantised)
    assert not torch.equal(quantised, y)
    assert [one.scale for one in tool.result] == [one.scale for one in wanted.result]


def test_a_loaded_scale_stays_while_another_tensor_of_the_op_is_calibrated() -> None:
    layer, x, tool = torch.nn.Linear(3, 2), torch.tensor([[0.5, 1.0, 2.0]]), QuantizeTool(calibration=1)
    state = calibrated(layer, [x]).state_dict()
    inputs = {name: value.clone() for name, value in state.items() if "/input0." in name}
    tool.load_state_dict(inputs, strict=False)
    with amanda.apply(tool):
        layer(x * 10)
    assert inputs
    assert all(tool.state_dict()[name] == value for name, value in inputs.items())
    assert tool.state_dict().keys() == state.keys()


class LoopedExperts(nn.Module):
    """Experts that are parts of one parameter, of which a loop calls those that the batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = torch.tensor([1.0, 1000.0])[:, None, None]
        self.up = nn.Parameter(torch.rand(2, 16, 8) * sizes)
        self.down = nn.Parameter(torch.rand(2, 8, 16) / sizes)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in expert.unique().tolist():
            hidden = F.relu(F.linear(x[expert == e], self.up[e]))
            out[expert == e] = F.linear(hidden, self.down[e])
        return out


BOTH, SECOND = torch.tensor([0, 1, 0, 1, 0, 1]), torch.ones(6, dtype=torch.long)


def experts_error(tool: QuantizeTool, model: LoopedExperts, expert: Tensor) -> float:
    x = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(x, expert)
        with amanda.apply(tool):
            found = model(x, expert)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("method", ["static", "qat", "lsq"])
def test_experts_in_a_loop_have_scales_of_their_own(method: Any) -> None:
    model, tool = LoopedExperts(), QuantizeTool(method, calibration=int(method == "static"))
    for expert in (BOTH, BOTH, SECOND, 1 - SECOND):
        assert experts_error(tool, model, expert) < 0.05
    names = {name for name in tool.state_dict() if "input" in name}
    assert {name.rpartition(".")[0] for name in names} == {
        "/linear(up)/input0@0", "/linear(up)/input0@128", "/linear(down)/input0@0", "/linear(down)/input0@128"
    }  # fmt: skip


def test_an_expert_that_a_later_batch_reaches_first_calibrates_itself() -> None:
    model, tool = LoopedExperts(), QuantizeTool(calibration=1)
    for expert in (SECOND, SECOND, BOTH, BOTH):
        assert experts_error(tool, model, expert) < 0.05


def test_scales_of_experts_are_loaded_whichever_is_reached_first(tmp_path: Path) -> None:
    model, tool = LoopedExperts(), QuantizeTool(calibration=1)
    experts_error(tool, model, BOTH)
    again = QuantizeTool()
    again.load(tool.save(tmp_path / "scales.json"))
    assert experts_error(again, model, SECOND) < 0.05
    assert experts_error(again, model, BOTH) < 0.05


def test_scales_of_rounds_of_a_loop_are_refused() -> None:
    model, tool = LoopedExperts(), QuantizeTool(calibration=1)
    experts_error(tool, model, BOTH)
    state = {
        name.replace("/linear(up)/input0@0", "/linear(up)/input0"): value
        for name, value in tool.state_dict().items()
    }
    old = QuantizeTool()
    old.load_state_dict(state)
    with pytest.raises(QuantizeError, match=r"of one round of a loop.*calibrate again"):
        experts_error(old, model, BOTH)


def test_two_lines_that_read_one_part_have_scales_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.rand(2, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                small = F.linear(x, weight)
                x = small + F.linear(1000 * x, weight) / 1000
            return x

    model, tool = Twice(), QuantizeTool(calibration=1)
    x = torch.rand(6, 8)
    with torch.no_grad(), amanda.apply(tool):
        model(x)
        found = model(x)
    assert (found - model(x)).norm() < 0.05 * found.norm()
    assert len([name for name in tool.state_dict() if "input" in name and "scale" in name]) == 4


def test_modules_in_a_list_that_one_line_calls_have_scales_of_their_own() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

        def forward(self, x: Tensor, expert: Tensor) -> Tensor:
            return sum(self.experts[e](x * 1000.0**e) / 1000.0**e for e in expert.unique().tolist())

    model, tool = Listed(), QuantizeTool(calibration=1)
    for expert in (SECOND, BOTH, BOTH, SECOND):
        assert experts_error(tool, model, expert) < 0.05  # type: ignore[arg-type]


def test_modules_are_selected_with_all_that_lies_in_them() -> None:
    net, x = (
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2)),
        torch.rand(3, 4),
    )
    for options, wanted in (
        ({"module": "0"}, {"0.0", "0.2"}), ({"exclude": ["0"]}, {"1"}),
        ({"module": "0", "exclude": "0.2"}, {"0.0"}),
    ):  # fmt: skip
        tool = QuantizeTool(method="dynamic", **options)  # type: ignore[arg-type]
        with amanda.apply(tool):
            net(x)
        assert {one.module for one in tool.result} == wanted
    with pytest.raises(QuantizeError, match="module is 3; give a list of strings, a string, or None"):
        QuantizeTool(module=3)  # type: ignore[arg-type]
    tool = QuantizeTool(module="nine")
    with amanda.apply(tool):
        net(x)
    assert "no op was selected by module=nine" in tool.unmatched()[0]


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("quantize", "dynamic"),
        ("quantize:weight_bits=4", "dynamic"),
        ("quantize:calibration=2", "static"),
        ("quantize:activation_bits=none", "static"),
        ("quantize:method=qat", "qat"),
        ("quantize:method=lsq", "lsq"),
    ],
)
def test_the_command_line_takes_a_method_that_needs_no_call_of_the_program(spec: str, method: str) -> None:
    (tooling,) = make_tools([ToolSpec.parse(spec)], alone=True)
    assert isinstance(tooling.tool, QuantizeTool)
    assert tooling.tool.options.method == method


def test_info_has_the_method_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "quantize"]) == 0
    assert "(dynamic in `amanda run`)" in " ".join(capsys.readouterr().out.split())


def test_the_command_line_refuses_scales_that_would_never_be_calibrated() -> None:
    spec = ToolSpec("quantize", {"method": "static"})
    with pytest.raises(SpecError, match="tool quantize: method=static needs calibration=N"):
        make_tools([spec], alone=True)
    make_tools([spec])


def test_the_first_step_imports_no_autoray() -> None:
    """The import takes as long as the first step of a small model."""
    code = """
import sys, torch, amanda
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 2))
for tool in (amanda.load_tool("quantize", method="dynamic"), amanda.load_tool("prune", sparsity=0.5)):
    with amanda.apply(tool):
        model(torch.rand(1, 1, 2, 2)).sum().backward()
print("autoray" in sys.modules)
"""
    assert children.run([sys.executable, "-c", code], check=True).stdout == "False\n"
