"""Integers in memory and in files: torchao's tensors, and compressed-tensors by its own loader."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import amanda
from amanda.tools.quantize import QuantizeError, QuantizeTool
from amanda.tools.quantize.weights import (
    AWQTool,
    GPTQTool,
    NearestTool,
    convert,
    model_bytes,
    save_compressed,
)
from amanda.tools.quantize.weights._convert import packed_in_int32


@pytest.fixture(autouse=True)
def _torchao_is_loaded(example: Any) -> None:
    example("models").let_torchvision_load()
    import torchao  # noqa: F401


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 10))


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, 64)


def met(tool: Any, model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    """The outputs in the scope of a tool, which was calibrated if it wants that."""
    with amanda.apply(tool), torch.no_grad():
        if hasattr(tool, "calibrating"):
            with tool.calibrating():
                model(x)
        found: torch.Tensor = model(x)
    return found


TOOLS: dict[str, Any] = {
    "rtn": NearestTool,
    "gptq": GPTQTool,
    "ordered": partial(GPTQTool, act_order=True),
    "awq": AWQTool,
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(("bits", "size"), [(8, None), (8, 32), (4, 32), (4, None)])
def test_int8_tensors_compute_what_the_simulation_does(name: str, bits: int, size: int | None) -> None:
    model = network()
    tool = TOOLS[name](bits, size)
    simulated = met(tool, model)
    before = model_bytes(model)
    result = convert(model, tool)
    assert result.left == {}
    assert [row[:2] for row in result.rows()] == [(one, "Int8Tensor") for one in ("0", "2", "4")]
    assert (result.before, result.after) == (before, model_bytes(model))
    assert result.after < 0.45 * before
    with torch.no_grad():
        assert torch.allclose(model(X), simulated, atol=1e-4 * float(simulated.abs().max()))


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_tensors_compute_what_the_simulation_does(name: str, symmetric: bool) -> None:
    model, x = network().bfloat16(), X.bfloat16()
    tool = TOOLS[name](4, 32, symmetric, exclude="4")
    simulated = met(tool, model, x)
    with torch.no_grad():
        plain = model(x)
    before = model_bytes(model)
    result = convert(model, tool)
    assert [row[:3] for row in result.rows()] == [(one, "Int4OpaqueTensor", 4) for one in ("0", "2")]
    weights = 2 * 64 * 96 * 2  # of two bytes, which become half a byte and four for each group
    scales = [one.get("smoothing") for one in tool.weights]
    of_inputs = sum(2 * len(one) for one in scales if one is not None and (one != 1).any())
    assert before - model_bytes(model) == weights - weights // 4 - 2 * 64 * 96 // 32 * 4 - of_inputs
    with torch.no_grad():
        found = model(x)
    # Kernel and simulation round products to bfloat16, of 8 bits, in another order.
    assert (found - simulated).norm() < 0.02 * simulated.norm()
    assert (found - simulated).norm() < 0.25 * (simulated - plain).norm()


def test_what_stays_in_floating_point_is_named() -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mixing, self.last = (
                nn.Conv1d(4, 8, 1),
                nn.Parameter(torch.randn(8, 8)),
                nn.Linear(8, 8),
            )

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.conv(x).mT @ self.mixing)

    model, tool = Mixed(), NearestTool(8, None)
    met(tool, model, torch.ones(2, 4, 3))
    left = convert(model, tool).left
    assert sorted(place.split()[0] for place in left) == ["conv1d", "matmul"]
    assert set(left.values()) == {"it is not the whole weight of torch.nn.Linear layers alone"}
    affine = NearestTool(8, None, symmetric=False)
    other = network()
    met(affine, other)
    assert set(convert(other, affine).left.values()) == {"torchao's tensors of 8 bits are symmetric"}
    with pytest.raises(QuantizeError, match="NearestTool has quantised no weight of this Sequential"):
        convert(network(), tool)


def test_layers_with_one_parameter_have_one_tensor() -> None:
    model = network()
    model.append(nn.Linear(10, 64, bias=False)).append(model[0])
    tool = NearestTool(8, None)
    met(tool, model)
    convert(model, tool)
    assert model[0].weight is model[6].weight


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_packed_by_bits(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 37))
    words = packed_in_int32(codes, bits)
    assert words.shape == (3, -(-37 * bits // 32))
    for row, found in zip(codes, words, strict=True):
        number = sum(int(code) << (bits * i) for i, code in enumerate(row))
        assert number == sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(found))


CASES = [(8, None, True), (4, 32, True), (4, 32, False), (3, 32, True), (8, None, False)]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "size", "symmetric"), CASES)
def test_a_checkpoint_is_read_by_compressed_tensors(
    tmp_path: Path, bits: int, size: int | None, symmetric: bool, act_order: bool
) -> None:
    library = pytest.importorskip("compressed_tensors", reason="`nox -s recipes` has compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = network()
    tool = GPTQTool(bits, size, symmetric, act_order=act_order, exclude="2")
    met(tool, model)
    result = convert(model, tool, tmp_path)
    assert (result.model, result.left) == (tmp_path, {})
    assert [row[:4] for row in result.rows()] == [
        (layer, "pack-quantized", bits, size or model[int(layer)].in_features) for layer in ("0", "4")
    ]
    assert result.after < result.before
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert told["ignore"] == ["2"]
    config = QuantizationConfig.model_validate(told)
    (scheme,) = config.config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    state = load_file(tmp_path / "model.safetensors")
    tool.finalize(model)
    wanted = model.state_dict()
    for layer in ("0", "4"):
        own = {one.removeprefix(f"{layer}."): value for one, value in state.items() if one.startswith(layer)}
        assert set(own) == {*compressor.compression_param_names(scheme), "bias"}
        weight = compressor.decompress(own, scheme)["weight"]
        assert torch.allclose(weight, wanted[f"{layer}.weight"], rtol=1e-6, atol=0), library.__version__
        again = compressor.compress({**compressor.decompress(own, scheme)}, scheme)
        assert torch.equal(again["weight_packed"], own["weight_packed"])
    assert torch.equal(state["2.weight"], wanted["2.weight"])


def test_what_the_layout_lacks_is_an_error(tmp_path: Path) -> None:
    model = network()
    awq = AWQTool(4, 32)
    met(awq, model)
    with pytest.raises(QuantizeError, match="no place for the scales of the inputs of 2, 4: fold them"):
        convert(model, awq, tmp_path)
    conv = nn.Sequential(nn.Conv1d(4, 8, 1))
    tool = NearestTool(8, None)
    met(tool, conv, torch.ones(1, 4, 3))
    with pytest.raises(QuantizeError, match="linear layers alone; exclude conv1d of 0"):
        convert(conv, tool, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_there_is_replaced_if_asked(tmp_path: Path) -> None:
    model, tool = network(), NearestTool(8, None)
    met(tool, model)
    convert(model, tool, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(QuantizeError, match=r"is there already, with a checkpoint; force=True replaces it"):
        convert(model, tool, tmp_path)
    convert(model, tool, tmp_path, force=True)
    with pytest.warns(
        DeprecationWarning, match=r"save_compressed is deprecated .* use convert\(model, tool, path\)"
    ):
        assert save_compressed(tmp_path, model, tool) == tmp_path
    with pytest.warns(DeprecationWarning, match=r"convert\(out=...\) is deprecated .* use path=..."):
        convert(model, tool, out=tmp_path, force=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    for other in (QuantizeTool(), 8.0):
        with pytest.raises(QuantizeError, match="give a NearestTool"):
            convert(model, other, tmp_path, force=True)
    with pytest.raises(QuantizeError, match="which is for ONNX files; a Sequential was given"):
        convert(model, tool, tmp_path / "model.onnx")


class Tied(nn.Module):
    """Two layers, and a further reader of the weight of the second."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.read = nn.Linear(64, 64), nn.Linear(64, 64), read

    def forward(self, x: torch.Tensor) -> Any:
        return self.read(self.second(self.first(x).relu()), self.second.weight)


@pytest.mark.parametrize(
    ("read", "op"),
    [
        (lambda y, w: y @ w, "matmul"),
        (lambda y, w: nn.functional.linear(y, w.t()), "transpose"),
        (lambda y, w: nn.functional.linear(y, w[:32]), "getitem"),
        (lambda y, w: torch.addmm(y, y, w), "addmm"),
        (lambda y, w: torch.bmm(y[:, None], w[None].expand(len(y), -1, -1))[:, 0], "getitem"),
        (lambda y, w: y + 0 * w.norm(), "linalg_vector_norm"),
        (lambda y, w: y + 0 * (w**2).sum(), "pow"),
        (lambda y, w: y + 0 * torch.cat([w, w]).sum(), "cat"),
        (lambda y, w: y + 0 * w.data.sum(), "sum"),
        (lambda y, w: y + 0 * w.detach().t().sum(), "transpose"),
    ],
)
def test_a_weight_that_another_op_reads_too_is_left_and_named(read: Any, op: str) -> None:
    model, tool = Tied(read), NearestTool(8, None)
    simulated = met(tool, model)
    result = convert(model, tool)
    assert [row[0] for row in result.rows()] == ["first"]
    assert result.left["linear of second"].startswith(f"{op} of ")
    assert result.left["linear of second"].endswith("reads it too")
    with torch.no_grad():
        assert torch.allclose(model(X), simulated, atol=1e-4)


def test_layers_that_share_a_converted_weight_are_not_named_as_unread() -> None:
    model, tool = Tied(lambda y, w: nn.functional.linear(y, w)), NearestTool(8, None)
    model.unused = nn.Linear(64, 64)
    model.unused.weight = model.second.weight
    met(tool, model)
    model.state_dict()
    result = convert(model, tool)
    assert not result.left
    assert model.unused.weight is model.second.weight
