"""Formats of quantised numbers: groups of weights, int16, floating types of 8 bits, bits by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.quantize import Grid, Groups, QuantizeError, QuantizeTool, fake_quantize
from amanda.tools.quantize._fake_quantize import FloatGrid

FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantised(tool: QuantizeTool, model: Any, *given: Tensor) -> Any:
    with amanda.apply(tool) as scope:
        found = model(*given)
    assert scope.report == []
    return found


def of_torchao(weight: Tensor, size: int, bits: int, symmetric: bool) -> Tensor:
    """A weight of outputs and inputs, quantised in groups and dequantised by torchao's primitives."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    grid = Grid.of(bits, symmetric)
    kind, block = torch.int32, (1, size)
    mapping = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    eps = torch.finfo(torch.float32).eps
    scale, zero = choose_qparams_affine(
        weight, mapping, block, kind, grid.low, grid.high, eps, zero_point_dtype=torch.int32
    )
    codes = quantize_affine(weight, block, scale, zero, kind, grid.low, grid.high)
    made: Tensor = dequantize_affine(codes, block, scale, zero, kind, grid.low, grid.high)
    return made


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_weights_in_groups_are_those_of_torchao(example: Any, size: int, bits: int, symmetric: bool) -> None:
    example("models").let_torchvision_load()
    torch.manual_seed(0)
    weight, x = torch.randn(6, 256), torch.eye(256)  # whose products are the weights, without rounding
    wanted = of_torchao(weight, size, bits, symmetric)
    options = {"weight_bits": bits, "group_size": size, "symmetric_weights": symmetric}
    for parameter, product in (
        (nn.Parameter(weight), F.linear), (nn.Parameter(weight.T.contiguous()), torch.matmul),
    ):  # fmt: skip
        tool = QuantizeTool(activation_bits=None, **options)
        found = quantised(tool, lambda x, f=product, w=parameter: f(x, w), x)
        assert torch.equal(found, wanted.T)
        (row,) = tool.result
        assert (row.group_size, row.axes, len(row.scale or ())) == (size, (0,), 6 * 256 // size)


def test_a_convolution_has_groups_in_the_order_of_its_channels_and_window(example: Any) -> None:
    example("models").let_torchvision_load()
    torch.manual_seed(0)
    layer, x = nn.Conv2d(8, 4, 2), torch.randn(1, 8, 5, 5)
    wanted = of_torchao(layer.weight.detach().flatten(1), 16, 4, True).reshape(layer.weight.shape)
    found = quantised(QuantizeTool(weight_bits=4, activation_bits=None, group_size=16), layer, x)
    assert torch.equal(found, F.conv2d(x, wanted, layer.bias))


@pytest.mark.parametrize("layout", ["OI", "IO", "OIHW", "HWIO", "HWIM", "IOHW"])
def test_groups_are_consecutive_inputs_of_one_output(layout: str) -> None:
    extents = {"O": 6, "I": 4, "H": 2, "W": 3, "M": 5}
    shape = tuple(extents[axis] for axis in layout)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    groups = Groups(2, layout)
    rows = groups.split(numbers)
    assert rows.shape[1] == 2
    np.testing.assert_array_equal(groups.joined(rows, shape), numbers)
    outputs = [layout.index(axis) for axis in ("O" if "O" in layout else "IM")]
    for row in rows:
        places = np.array([np.unravel_index(one, shape) for one in row])
        assert (places[0, outputs] == places[1, outputs]).all()


def test_inputs_that_are_no_multiple_of_a_group_are_left_and_named() -> None:
    model = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 2))
    tool = QuantizeTool(weight_bits=4, activation_bits=None, group_size=32)
    quantised(tool, model, torch.randn(2, 64))
    assert [one.module for one in tool.result] == ["0"]
    assert tool.result.left == {
        "linear of 1": "the inputs of each output are no multiple of group_size 32: it is 2x20, OI"
    }


def test_groups_train_straight_through_and_survive_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 3), torch.randn(5, 64)
    tool = QuantizeTool("qat", weight_bits=4, activation_bits=None, group_size=32)
    found = quantised(tool, layer, x)
    found.sum().backward()
    # The grid of a symmetric range has its extremes half a step beyond its ends.
    groups = layer.weight.detach().reshape(-1, 32)
    scale = (2 * groups.abs().amax(1) / 15).unsqueeze(1)
    codes = (groups * (1 / scale)).round()
    passes = ((codes >= -8) & (codes <= 7)).reshape(layer.weight.shape)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, x.sum(0) * passes)
    tool.save(tmp_path / "scales.safetensors")
    again = QuantizeTool("qat", weight_bits=4, activation_bits=None, group_size=32)
    again.load(tmp_path / "scales.safetensors")
    again.freeze()
    assert torch.equal(quantised(again, layer, x), found)
    other = QuantizeTool("qat", weight_bits=4, activation_bits=None)
    with pytest.raises(QuantizeError, match="group_size 32, not None"):
        other.load(tmp_path / "scales.safetensors")


def test_learned_scales_have_one_for_each_group() -> None:
    tool = QuantizeTool("lsq", weight_bits=4, activation_bits=None, group_size=32)
    layer, x = nn.Linear(64, 3), torch.randn(5, 64)
    tool.prepare(layer, x)
    quantised(tool, layer, x).sum().backward()
    (scale,) = tool.parameters()
    assert scale.shape == (6,)
    assert scale.grad is not None
    assert scale.grad.abs().min() > 0


@pytest.mark.parametrize("name", FLOATS)
def test_every_float8_is_rounded_to_itself_and_to_its_nearest(name: Any) -> None:
    grid, kind = Grid.of(name, True), FLOATS[name]
    assert isinstance(grid, FloatGrid)
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    finite = every[every.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    x = torch.cat([finite, middles, *around, torch.tensor([1e9, -1e9, torch.inf, -torch.inf])])
    wanted = x.clamp(grid.low, grid.high).to(kind).float()
    one, zero = torch.ones(()), torch.zeros(())
    assert torch.equal(grid.nearest(x), wanted)
    np.testing.assert_array_equal(grid.nearest(x.numpy()), wanted.numpy())
    assert torch.equal(fake_quantize(x, one, zero, grid), wanted)
    assert torch.equal(fake_quantize(x, one, zero, grid, kernel=False), wanted)
    assert fake_quantize(torch.tensor([torch.nan]), one, zero, grid).isnan().all()


@pytest.mark.parametrize("name", FLOATS)
def test_float8_layers_are_those_of_torchao(example: Any, name: Any) -> None:
    example("models").let_torchvision_load()
    from torchao.quantization.quant_primitives import (
        _choose_scale_float8,
        _dequantize_affine_float8,
        _quantize_affine_float8,
    )

    torch.manual_seed(0)
    layer, x = nn.Linear(64, 6), torch.randn(3, 64)

    def theirs(value: Tensor, block: tuple[int, ...]) -> Tensor:
        scale = _choose_scale_float8(value, block, FLOATS[name])
        made: Tensor = _dequantize_affine_float8(_quantize_affine_float8(value, scale, FLOATS[name]), scale)
        return made

    wanted = F.linear(theirs(x, (3, 64)), theirs(layer.weight.detach(), (1, 64)), layer.bias)
    tool = QuantizeTool("dynamic", weight_bits=name, activation_bits=name)
    assert torch.equal(quantised(tool, layer, x), wanted)
    assert {one.scheme for one in tool.result} == {str(FLOATS[name]).removeprefix("torch.")}
    training = QuantizeTool("qat", weight_bits=name, activation_bits=name)
    found = quantised(training, layer, x)
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, theirs(x, (3, 64)).sum(0).expand(6, 64))


def test_sixteen_bits_are_those_by_hand() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 4), torch.randn(3, 16)
    weight = layer.weight.detach()
    scale = (weight.abs().amax(1) / (65535 / 2)).unsqueeze(1)
    wanted = (weight * (1 / scale)).round().clamp(-32768, 32767) * scale
    found = quantised(QuantizeTool(weight_bits=16, activation_bits=None), layer, x)
    assert torch.equal(found, F.linear(x, wanted, layer.bias))


def test_bits_by_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
    bits: dict[str, Any] = {"0": "e5m2", "1.1": 4, "1": 8, "3": 2}
    tool = QuantizeTool(weight_bits=bits, activation_bits=None)
    with amanda.apply(tool):
        model(torch.randn(2, 8))
    assert [(one.module, one.bits, one.scheme) for one in tool.result] == [
        ("0", 8, "float8_e5m2"), ("1.0", 8, "symmetric"), ("1.1", 4, "symmetric")
    ]  # fmt: skip
    assert any("weight_bits=3" in one for one in tool.unmatched())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size is 0; give an integer >= 1 or None"),
        ({"group_size": 32, "per_channel": False}, "a group lies within a channel"),
        ({"weight_bits": {"0": 99}}, "its value of '0' is 99"),
        ({"weight_bits": "e4m3", "method": "lsq"}, "method is 'lsq', which is for integers"),
        ({"activation_bits": "e5m2", "observer": "histogram"}, "observer is 'histogram', which is for"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        QuantizeTool(**options)
