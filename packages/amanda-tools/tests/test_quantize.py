"""The tool that quantises, on PyTorch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.quantize import Grid, QuantizeError, QuantizeTool, choose_qparams, fake_quantize

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import observer


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
    tool = QuantizeTool(types=["conv*", "linear", "matmul", "scaled*", "add"])
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


def test_an_activation_that_was_never_calibrated_is_an_error_that_says_where(model: Network) -> None:
    tool = QuantizeTool(types=["linear"])
    with pytest.raises(QuantizeError, match="input 0 has no scale: calibrate") as caught, amanda.apply(tool):
        model(torch.randn(1, 3, 6, 6))
    assert any("QuantizeTool" in note and "head" in note for note in caught.value.__notes__)
