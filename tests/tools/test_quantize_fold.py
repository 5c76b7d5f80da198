"""Factors of SmoothQuant and AWQ in the layers that make the inputs, beside arithmetic by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.quantize import QuantizeError
from amanda.tools.quantize.weights import (
    AWQTool,
    GPTQTool,
    NearestTool,
    SmoothQuantTool,
    awq_scales,
    convert,
    dequantized,
    quantized,
)


class Block(nn.Module):
    """A block of a transformer with a gated network, and one with GELU that ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.again = nn.RMSNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.bare = nn.LayerNorm(32, elementwise_affine=False)
        self.last, self.end = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = (one(y).unflatten(-1, (4, 8)).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        y = self.again(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        made: Tensor = self.end(F.gelu(self.last(self.bare(x))))
        return made


X = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))
X[..., 3] *= 30


def block(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    made = Block().to(dtype).eval()
    for one in (made.norm.weight, made.norm.bias, made.again.weight):
        one.data += torch.rand_like(one)
    return made


def planned(tool: Any, model: nn.Module, x: Tensor) -> Tensor:
    """Plan the folds and calibrate; return what the model computes in a scope of the tool."""
    tool.prepare(model, x)
    with torch.no_grad(), amanda.apply(tool):
        with tool.calibrating():
            model(x)
        found: Tensor = model(x)
    return found


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_folded_model_computes_the_same_without_the_tool(dtype: torch.dtype, bound: float) -> None:
    model, tool = block(dtype), SmoothQuantTool()
    wanted = planned(tool, model, X.to(dtype))
    result = tool.finalize(model)
    assert {row[0]: row[2] for row in result.rows()} == {
        **dict.fromkeys(["q.weight", "k.weight", "v.weight"], "norm.weight, norm.bias"),
        "o.weight": "v.weight, v.bias", **dict.fromkeys(["gate.weight", "up.weight"], "again.weight"),
        "down.weight": "up.weight, up.bias",
    }  # fmt: skip
    assert result.left == {
        "last.weight": "layer_norm of bare makes its input without a weight for each channel",
        "end.weight": "gelu of the model makes its input, through which no factor passes",
    }
    assert (model(X.to(dtype)) - wanted).abs().max() < bound * wanted.abs().max()
    with amanda.apply(tool):
        assert (model(X.to(dtype)) - wanted).abs().max() < bound * wanted.abs().max()


@torch.no_grad()
def test_weights_of_one_input_have_the_factors_of_the_paper_for_all_of_them() -> None:
    model, tool = block(torch.float64), SmoothQuantTool(alpha=0.6)
    before = copy.deepcopy(model)
    planned(tool, model, X.double())
    tool.finalize(model)
    largest = before.norm(X.double()).abs().amax((0, 1))
    weights = torch.cat([before.q.weight, before.k.weight, before.v.weight]).abs().amax(0)
    factors = largest**0.6 / weights**0.4
    for name in ("norm.weight", "norm.bias"):
        assert torch.allclose(model.get_parameter(name), before.get_parameter(name) / factors, rtol=1e-6)
    for name in ("q.weight", "k.weight"):
        assert torch.allclose(model.get_parameter(name), before.get_parameter(name) * factors, rtol=1e-6)


@torch.no_grad()
def test_awq_searches_the_scales_of_one_input_for_all_of_its_weights() -> None:
    model, tool = block(), AWQTool(4, 16)
    before = copy.deepcopy(model)
    planned(tool, model, X)
    rows, both = (
        before.again(residual(before)).flatten(0, 1),
        torch.cat([before.gate.weight, before.up.weight]),
    )
    gram = rows.T @ rows / len(rows)
    scales = awq_scales(
        both, rows.abs().mean(0), gram, lambda one: dequantized(*quantized(one, tool.grid, 16))
    )
    for one in tool.weights:
        if one.path in ("gate.weight", "up.weight"):
            assert torch.allclose(torch.as_tensor(one["smoothing"]), scales, rtol=1e-4)


def residual(model: Any) -> Tensor:
    y = model.norm(X)
    heads = (one(y).unflatten(-1, (4, 8)).transpose(1, 2) for one in (model.q, model.k, model.v))
    made: Tensor = X + model.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    return made


@torch.no_grad()
def test_folded_awq_is_converted_without_scales_of_inputs_and_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, tool = block(), AWQTool(8, 16, exclude=["last", "end"])
    wanted = planned(tool, model, X)
    with pytest.raises(
        QuantizeError, match=r"no place for the scales of the inputs of q, k, v, .* fold them"
    ):
        convert(model, tool, tmp_path / "before")
    assert not tool.finalize(model).remarks
    with amanda.apply(tool):
        assert torch.allclose(model(X), wanted, atol=1e-5 * float(wanted.abs().max()))
    convert(model, tool, tmp_path / "made")
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert torch.equal(found["norm.weight"], model.norm.weight)
    convert(model, tool)
    assert model.q.weight.act_pre_scale is None
    assert torch.allclose(model(X), wanted, atol=1e-2 * float(wanted.abs().max()))
    codes = found["q.weight_packed"].view(torch.uint8).reshape(32, 32).float() - 128
    read = codes * found["q.weight_scale"].repeat_interleave(16, 1)
    assert torch.allclose(read, model.q.weight.dequantize(), atol=1e-6)


@torch.no_grad()
def test_folded_awq_is_finalized() -> None:
    model, tool = block(torch.float64), AWQTool(4, 16)
    wanted = planned(tool, model, X.double())
    result = tool.finalize(model)
    assert [one.partition(":")[0] for one in result.remarks] == [
        "Last.weight holds the scales of its inputs", "End.weight holds the scales of its inputs"
    ]  # fmt: skip
    # Scales of integers whose outputs are divided are kept in float32.
    assert (model(X.double()) - wanted).abs().max() < 1e-6 * wanted.abs().max()


@torch.no_grad()
def test_a_smoothed_model_is_quantised_and_converted() -> None:
    model, tool = block(), SmoothQuantTool()
    planned(tool, model, X)
    tool.finalize(model)
    nearest = NearestTool(8, None)
    with amanda.apply(nearest):
        wanted = model(X)
    convert(model, nearest)
    assert torch.allclose(model(X), wanted, atol=1e-2 * float(wanted.abs().max()))


@torch.no_grad()
def test_queries_that_share_a_value_share_its_factors(example: Any) -> None:
    example("models").let_torchvision_load()
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).double()
    model.eval()
    ids, tool = torch.randint(64, (2, 9)), SmoothQuantTool()
    wanted = model(ids).logits
    tool.prepare(model, ids)
    with amanda.apply(tool), tool.calibrating():
        model(ids)
    result = tool.finalize(model)
    assert not result.left
    assert len(result.rows()) == 8
    assert (model(ids).logits - wanted).abs().max() < 1e-12


@torch.no_grad()
def test_factors_pass_through_convolutions_pooling_and_flattening() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 9, 5),
    ).double()  # fmt: skip
    x = torch.randn(16, 3, 8, 8, dtype=torch.float64)
    model(x)
    model.eval()
    tool = SmoothQuantTool()
    wanted = planned(tool, model, x)
    result = tool.finalize(model)
    assert [row[::2] for row in result.rows()] == [
        ("3.weight", "1.weight, 1.bias"), ("7.weight", "3.weight, 3.bias")
    ]  # fmt: skip
    assert result.left == {"0.weight": "no parameter that could be divided makes its input"}
    assert (model(x) - wanted).abs().max() < 1e-12


class Pooled(nn.Module):
    """Convolutions whose outputs are averaged over places, and a sum over channels beside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x).relu(), self.second(x).relu()
        both = self.one(y.mean((2, 3))) + self.two(z.mean((-2, -1), keepdim=True)[..., 0, 0])
        made: Tensor = both + z.sum(1).mean()
        return made


@torch.no_grad()
def test_factors_pass_through_means_over_places_alone() -> None:
    torch.manual_seed(0)
    model, x, tool = Pooled().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64), SmoothQuantTool()
    wanted = planned(tool, model, x)
    result = tool.finalize(model)
    assert [row[0] for row in result.rows()] == ["one.weight"]
    assert result.left["two.weight"] == "sum of the model reads its input too"
    assert (model(x) - wanted).abs().max() < 1e-12


class Twice(nn.Module):
    """A weight that a product reads, and that is the input of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w, self.second = (
            nn.Linear(16, 16),
            nn.Parameter(torch.randn(16, 8)),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.w.T) * (self.first(x) @ self.w).sum()
        return made


class Random(nn.Module):
    """A layer that drops outputs by chance, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(F.dropout(self.first(x)))
        return made


def test_a_weight_that_is_read_in_two_ways_takes_no_factors() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(8, 16)
    tool = SmoothQuantTool()
    wanted = planned(tool, model, x)
    before = copy.deepcopy(model.state_dict())
    result = tool.finalize(model)
    assert not result.rows()
    assert result.left["w"] == "another op reads its weight otherwise"
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    with torch.no_grad(), amanda.apply(tool):
        assert torch.equal(model(x), wanted)


def test_a_product_that_the_tool_leaves_keeps_the_others_of_its_input() -> None:
    model, tool = block(), SmoothQuantTool(exclude=["k"])
    planned(tool, model, X)
    assert tool.finalize(model).left["q.weight"] == (
        "the product with k.weight reads its input too, which has no factors"
    )


def test_a_model_of_chance_cannot_be_tried_and_is_refused() -> None:
    model = Random()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(QuantizeError, match="Random computes something else with factors"):
        SmoothQuantTool().prepare(model, torch.randn(8, 16))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_calibration_before_prepare_is_named_in_the_result() -> None:
    model, tool = block(), SmoothQuantTool()
    with amanda.apply(tool), tool.calibrating(), torch.no_grad():
        model(X)
    tool.prepare(model, X)
    with pytest.raises(QuantizeError, match="SmoothQuantTool has calibrated no weight of this Block"):
        tool.finalize(block())
    with pytest.raises(QuantizeError, match="function has no parameters"):
        tool.finalize(lambda x: x)  # type: ignore[arg-type]
    result = tool.finalize(model)
    assert [row[0] for row in result.rows()] == ["o.weight", "down.weight"]
    assert result.left["q.weight"] == (
        "its factors are of a calibration before prepare, and others of the same input differ"
    )
    with pytest.raises(QuantizeError, match=r"SmoothQuantTool\.prepare was given a function"):
        tool.prepare(lambda x: x, X)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [SmoothQuantTool, lambda: AWQTool(4, 16)])
def test_an_interrupted_fold_leaves_model_and_tool(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tool = block(), make()
    planned(tool, model, X)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(tool.state_dict())
    own = type(tool).on_folded

    def failing(self: Any, weight: Any, *args: Any) -> None:
        own(self, weight, *args)
        if weight.path == "up.weight":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(tool), "on_folded", failing)
        with pytest.raises(KeyboardInterrupt):
            tool.finalize(model)
    for found, wanted in ((model.state_dict(), before), (tool.state_dict(), state)):
        for name, one in wanted.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(one)), name
    assert len(tool.finalize(model).rows()) == (9 if isinstance(tool, AWQTool) else 7)


@torch.no_grad()
def test_finalize_folds_and_names_what_stays() -> None:
    model, tool = block(torch.float64), SmoothQuantTool()
    wanted = planned(tool, model, X.double())
    before = model.q.weight.clone()
    result = tool.finalize(model)
    assert result.model is model
    assert not torch.equal(model.q.weight, before)
    assert set(result.left) == {"last.weight", "end.weight"}
    assert torch.allclose(model(X.double()), wanted)


@torch.no_grad()
def test_finalize_without_a_plan_leaves_the_model_as_it_is() -> None:
    model, tool = block(), SmoothQuantTool()
    wanted = model(X)
    with amanda.apply(tool), tool.calibrating():
        model(X)
    result = tool.finalize(model)
    assert torch.equal(model(X), wanted)
    assert set(result.left.values()) == {"prepare(model, example) was not called before the calibration"}
    with pytest.raises(QuantizeError, match="has calibrated no weight of this Block"):
        tool.finalize(block())


@pytest.mark.parametrize("make", [SmoothQuantTool, lambda: AWQTool(8, None)])
def test_factors_pass_empty_slices(make: Any) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.a = nn.LayerNorm(16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            out: Tensor = self.a(torch.cat([x[..., :16] * 2, x[..., 16:]], -1))
            return out

    model, tool, x = Sliced(), make(), torch.randn(8, 16)
    wanted = model(x)
    tool.prepare(model, x)
    with torch.no_grad(), amanda.apply(tool), tool.calibrating():
        model(x)
    result = tool.finalize(model)
    assert not (result.remarks if isinstance(tool, AWQTool) else result.left)
    assert torch.allclose(model(x), wanted, atol=1e-5 if isinstance(tool, SmoothQuantTool) else 0.05)


@torch.no_grad()
def test_the_former_names_of_prepare_and_finalize_warn() -> None:
    model, tool = block(), AWQTool(8, 16)
    early = pytest.raises(QuantizeError, match=r"call prepare\(model, example\)")
    with pytest.warns(DeprecationWarning, match="use finalize"), early:
        tool.fold(model)
    with pytest.warns(DeprecationWarning, match="plan_fold is deprecated since .* use prepare"):
        tool.plan_fold(model, X)
    with amanda.apply(tool):
        with pytest.warns(DeprecationWarning, match="collecting is deprecated since .* use calibrating"):
            tool.collecting()
        with tool.calibrating():
            model(X)
        wanted = model(X)
    with pytest.warns(DeprecationWarning, match="fold is deprecated since .* use finalize"):
        result = tool.fold(model)
    assert set(result.left) == {"last.weight", "end.weight"}
    with amanda.apply(tool):
        assert torch.allclose(model(X), wanted, atol=1e-5 * float(wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("make", [SmoothQuantTool, lambda: AWQTool(8, 16), lambda: GPTQTool(8, 16)])
def test_a_tool_is_prepared_before_its_calibration_and_with_loaded_state(make: Any) -> None:
    model, tool = block(torch.float64), make()
    wanted = tool.prepare(model, X.double())
    assert torch.equal(wanted, model(X.double()))
    with amanda.apply(tool):
        with tool.calibrating():
            model(X.double())
        changed = model(X.double())
    again = make()
    again.load_state_dict(copy.deepcopy(tool.state_dict()))
    assert torch.equal(again.prepare(model, X.double()), changed)
    again.finalize(model)
    assert torch.allclose(model(X.double()), changed, rtol=1e-5)
