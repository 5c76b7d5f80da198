"""Faults of users, data and programs, before which tools that compress weights leave a model as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.errors import AmandaError
from amanda.tools.prune import ChannelPruneTool, PruneError, PruneTool
from amanda.tools.quantize import QuantizeError, QuantizeTool
from amanda.tools.quantize.weights import (
    AWQTool,
    GPTQTool,
    NearestTool,
    SmoothQuantTool,
    convert,
    smoothing,
)

TOOLS = [NearestTool, GPTQTool, AWQTool]
CALIBRATED = [GPTQTool, AWQTool]


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))


def met(tool: Any, model: Callable[..., Any], *batches: Tensor) -> Any:
    """Calibrate a tool if it is to be, and have it meet the weights of a model."""
    with amanda.apply(tool):
        if hasattr(tool, "calibrating"):
            with tool.calibrating():
                for one in batches:
                    model(one)
        with torch.no_grad():
            model(batches[0])
    return tool


def interrupted(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    raise KeyboardInterrupt


def values(model: Any) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_is(model: Any, before: dict[str, Tensor]) -> None:
    for name, one in model.state_dict().items():
        assert torch.equal(one.nan_to_num(9), before[name].nan_to_num(9)), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("make", TOOLS)
def test_a_weight_with_nan_has_no_integers(make: Any, bad: float) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0] = bad
    before, tool = values(model), make(4, 16)
    with pytest.raises(QuantizeError, match=r"NaN or Inf in 2\.weight"):
        met(tool, model, numbers())
    for use in (tool.finalize, lambda model: convert(model, tool)):
        with pytest.raises(QuantizeError, match=r"2\.weight has no integers"):
            use(model)
    assert_is(model, before)


@pytest.mark.parametrize("make", CALIBRATED)
def test_sums_of_inputs_that_overflow_are_told(make: Any) -> None:
    with pytest.raises(
        QuantizeError, match=r"linear of 0\.weight is given up to 1e\+22: products .* overflow"
    ):
        met(make(4, 16), network(), torch.full((4, 32), 1e22))


@pytest.mark.parametrize("make", [*CALIBRATED, SmoothQuantTool])
def test_an_interrupted_calibration_finalizes_nothing(make: Any) -> None:
    model = network()
    before, tool = values(model), make()
    tool = tool if make is SmoothQuantTool else make(4, 16)
    met(tool, model, numbers())
    with pytest.raises(KeyboardInterrupt), amanda.apply(tool), tool.calibrating():
        interrupted(model, numbers(1))
    if make is not SmoothQuantTool:
        with pytest.raises(QuantizeError, match=r"0\.weight has no integers.* within tool\.calibrating\(\)"):
            tool.finalize(model)
    assert_is(model, before)
    met(tool, model, numbers())
    other = make() if make is SmoothQuantTool else make(4, 16)
    met(other, model, numbers())
    for name, one in other.state_dict().items():
        assert torch.equal(tool.state_dict()[name], one), name


@pytest.mark.parametrize("make", [*CALIBRATED, SmoothQuantTool])
def test_calls_in_inference_mode_and_out_of_it_calibrate_together(make: Any) -> None:
    model, options = network(), () if make is SmoothQuantTool else (4, 16)
    tool, wanted = make(*options), met(make(*options), model, numbers(0), numbers(1))
    with amanda.apply(tool), tool.calibrating():
        with torch.inference_mode():
            model(numbers(0))
        model(numbers(1))
    for name, one in wanted.state_dict().items():
        assert torch.equal(tool.state_dict()[name], one), name


@pytest.mark.parametrize("by", ["load_state_dict", "another parameter"])
@pytest.mark.parametrize("make", TOOLS)
def test_integers_are_not_written_over_other_values(make: Any, by: str) -> None:
    model, tool = network(), make(4, 16)
    met(tool, model, numbers())
    tool.finalize(model)
    final = values(model)
    tool.finalize(model)
    assert_is(model, final)
    if by == "load_state_dict":
        model.load_state_dict(network(1).state_dict())
    else:
        model[0].weight = network(1)[0].weight
        model.load_state_dict(network(1).state_dict())
    before = values(model)
    message = r"the integers of 0\.weight are of other values than it has"
    for use in (
        tool.finalize,
        lambda model: convert(model, tool),
        lambda model: convert(model, tool, "x"),
    ):
        with pytest.raises(QuantizeError, match=message):
            use(model)
    assert_is(model, before)
    tool.clear()
    met(tool, model, numbers())
    tool.finalize(model)
    assert_is(model, values(_finalized(make, network(1))))


def _finalized(make: Any, model: nn.Module) -> nn.Module:
    met(made := make(4, 16), model, numbers())
    made.finalize(model)
    return model


def test_a_cast_model_still_has_the_values_of_its_integers() -> None:
    model = network()
    tool = met(NearestTool(8, None), model, numbers())
    model.bfloat16()
    tool.finalize(model)
    other = network()
    met(again := NearestTool(8, None), other, numbers())
    again.finalize(other)
    assert torch.allclose(model[0].weight.float(), other[0].weight, atol=2e-3)


def test_integers_of_what_another_tool_gave_are_not_written_alone() -> None:
    model, x = network(), numbers()
    x[:, 3] *= 100
    smooth, nearest = SmoothQuantTool(), NearestTool(8, None)
    before = values(model)
    with amanda.apply(smooth, nearest), smooth.calibrating():
        model(x)
    nearest.clear()
    with amanda.apply(smooth, nearest):
        model(x)
    for use in (nearest.finalize, lambda model: convert(model, nearest)):
        with pytest.raises(QuantizeError, match="another tool changed what ops read"):
            use(model)
    assert_is(model, before)


def test_only_the_model_that_was_met_is_converted(tmp_path: Path) -> None:
    model = network()
    tool = met(NearestTool(8, None), model, numbers())
    for other in (network(1), copy.deepcopy(model)):
        before = values(other)
        for use in (lambda one: convert(one, tool), lambda one: convert(one, tool, tmp_path / "x")):
            with pytest.raises(QuantizeError, match="has quantised no weight of this Sequential"):
                use(other)
        assert_is(other, before)
    assert not (tmp_path / "x").exists()


def test_a_converted_model_is_not_finalized() -> None:
    model, x = network(), numbers()
    tool, prune = met(NearestTool(8, None), model, x), met(PruneTool(), model, x)
    convert(model, tool)
    found = model(x)
    for one in (tool, prune):
        with pytest.raises(AmandaError, match="is a Int8Tensor, which is packed"):
            one.finalize(model)
    assert torch.equal(model(x), found)
    assert len(convert(model, tool).rows()) == 2
    assert torch.equal(model(x), found)


class Odd(nn.Module):
    """A layer under two names, one that is not called, a computed weight, and a matrix of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = self.again = nn.Linear(16, 16)
        self.idle = nn.Linear(16, 16)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.right = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.computed(self.again(self.first(x))) @ self.right.weight
        return found


def test_convert_tells_of_each_layer_that_stays() -> None:
    model, x = Odd(), torch.randn(8, 16)
    tool = met(NearestTool(8, None), model, x)
    with amanda.apply(tool), torch.no_grad():
        wanted = model(x)
    (source,) = (one.source for one in tool.weights if one.type == "matmul")
    result = convert(model, tool)
    assert [row[0] for row in result.rows()] == ["first"]
    assert result.left == {
        "linear of computed": "it is computed at each call, so that no parameter holds it",
        f"matmul of {source}": "it is not the whole weight of torch.nn.Linear layers alone",
        "linear of idle": "no op has read it in a scope of the tool",
    }  # fmt: skip
    assert torch.allclose(model(x), wanted, atol=1e-2)


def test_a_checkpoint_has_each_name_of_a_layer(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model: Any = Odd()
    model.config = {"hidden": 16}
    whole = torch.arange(8.0)
    for name, one in (("whole", whole), ("head", whole[:4]), ("tail", whole[4:])):
        model.register_buffer(name, one)
    tool = met(NearestTool(4, 16, exclude=["computed"], type="linear"), model, torch.randn(8, 16))
    folder = convert(model, tool, tmp_path / "made").model
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["idle", "computed", "right"]
    found = load_file(folder / "model.safetensors")
    assert {name for name in found if name.endswith("packed")} == {
        "first.weight_packed",
        "again.weight_packed",
    }
    assert "again.weight" not in found
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["head"], whole[:4])
    assert torch.equal(found["tail"], whole[4:])
    met(every := NearestTool(4, 16, type="linear"), model, torch.randn(8, 16))
    with pytest.raises(QuantizeError, match="exclude linear of computed"):
        convert(model, every, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((8, 16), "loaded for 0.weight are from -8 to 7, and those of this NearestTool from -128 to 127"),
        ((4, 16, False), "from -8 to 7, and those of this NearestTool from 0 to 15"),
        ((4, 8), r"the scale that was loaded for 0.weight is of shape \(16, 2\), not \(16, 4\)"),
    ],
)
def test_state_of_other_options_is_refused(options: Any, message: str) -> None:
    model = network()
    tool = NearestTool(*options)
    tool.load_state_dict(met(NearestTool(4, 16), model, numbers()).state_dict())
    with pytest.raises(QuantizeError, match=message), amanda.apply(tool):
        model(numbers())


class Twice(nn.Module):
    """A parameter that a linear and an einsum read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(16, 32))
        self.v = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        read = F.linear(x, self.w) + torch.einsum("nk,ok->no", x, self.w)
        return torch.einsum("no,po->np", read, self.v)


@pytest.mark.parametrize("make", [PruneTool, lambda: NearestTool(4, 16), lambda: GPTQTool(4, 16)])
def test_a_parameter_of_an_einsum_is_left_and_told(make: Any) -> None:
    tool = make()
    model, x = Twice(), numbers()
    wanted = model(x)
    met(tool, model, x)
    with amanda.apply(tool), torch.no_grad():
        assert torch.equal(model(x), wanted)
    assert set(tool.result.left.values()) == {
        "an einsum reads it too", "the operands of an einsum are one list, of which none is changed"
    }  # fmt: skip
    assert not tool.result.rows()
    assert tool.result.elements_left == model.w.numel() + model.v.numel()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("make", [lambda: NearestTool(4, 16), lambda: PruneTool(importance="sparsegpt")])
def test_finalize_writes_all_or_nothing(make: Any, failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tool, x = network(), make(), numbers()
    if isinstance(tool, PruneTool):
        tool.prepare(model, x)
    met(tool, model, x)
    with amanda.apply(tool), torch.no_grad():
        wanted = model(x)
    before, own = values(model), tool.finalized

    def failing(weight: Any, value: Any) -> Any:
        if weight.path == "2.weight":
            raise failure
        return own(weight, value)

    monkeypatch.setattr(type(tool), "finalized", lambda self, weight, value: failing(weight, value))
    with monkeypatch.context() as patch:
        patch.setattr(type(tool), "check_model", lambda self, model: None, raising=False)
        with pytest.raises(failure):
            tool.finalize(model)
    assert_is(model, before)
    monkeypatch.undo()
    with amanda.apply(tool), torch.no_grad():
        assert torch.equal(model(x), wanted)
    tool.finalize(model)
    assert torch.allclose(model(x), wanted, atol=1e-6)


def convolutions() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 3, 8, 8)
    made(x)
    return made.eval(), x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            torch.optim.Adafactor,
            r"Adafactor keeps row_var of shape \(8, 3, 3, 1\) for a parameter of shape \(8, 3",
        ),
        (torch.optim.LBFGS, r"LBFGS keeps d of shape \("),
    ],
)
def test_state_of_an_optimizer_that_cannot_follow_leaves_the_channels(make: Any, message: str) -> None:
    model, x = convolutions()
    optimizer = make(model.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        found: Tensor = model(x).square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(loss)
    tool = ChannelPruneTool(sparsity=0.5)
    tool.prepare(model, x)
    before = values(model)
    with pytest.raises(PruneError, match=message):
        tool.finalize(model, remove=True, optimizer=optimizer)
    assert_is(model, before)
    optimizer.step(loss)


def test_removal_from_a_model_that_computes_nan_says_so() -> None:
    model, x = convolutions()
    with torch.no_grad():
        model[0].weight[0] = torch.nan
    before = values(model)
    with pytest.raises(PruneError, match="a result of the model has NaN or Inf"):
        ChannelPruneTool(sparsity=0.5).prepare(model, x)
    assert_is(model, before)


def test_an_interrupted_calibration_of_activations_is_forgotten() -> None:
    model, x = network(), numbers()
    tool, clean = QuantizeTool(), QuantizeTool()
    met(tool, model, x)
    before = tool.state_dict()
    with pytest.raises(KeyboardInterrupt), amanda.apply(tool), tool.calibrating():
        interrupted(model, x * 100)
    for name, one in before.items():
        assert torch.equal(tool.state_dict()[name], one), name
    met(tool, model, numbers(1))
    met(clean, model, numbers(1))
    for name, one in clean.state_dict().items():
        assert torch.equal(tool.state_dict()[name], one), name


@pytest.mark.parametrize("importance", ["wanda", "sparsegpt", "gradient"])
def test_an_interrupted_preparation_makes_no_masks(importance: Any) -> None:
    model = network()
    tool, clean = PruneTool(importance=importance), PruneTool(importance=importance)
    with pytest.raises(KeyboardInterrupt), tool.calibrating(), amanda.apply(tool):
        interrupted(model, numbers(1) * torch.arange(32))
    with pytest.raises(PruneError, match="PruneTool has changed no weight"):
        tool.finalize(model)
    for one in (tool, clean):
        with one.calibrating(), amanda.apply(one):
            model(numbers()).square().sum().backward()
    for name, one in clean.state_dict().items():
        assert np.array_equal(np.asarray(tool.state_dict()[name]), np.asarray(one)), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e25])
@pytest.mark.parametrize("importance", ["wanda", "sparsegpt"])
def test_nan_in_inputs_makes_no_masks(importance: Any, bad: float) -> None:
    model, x, tool = network(), numbers(), PruneTool(importance=importance)
    x[0, 0] = bad
    with pytest.raises(PruneError, match=r"NaN or Inf in the inputs of the linear of 0\.weight"):
        tool.prepare(model, x)


def test_sparsegpt_names_a_weight_with_nan() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(PruneError, match=r"NaN or Inf in 0\.weight"):
        PruneTool(importance="sparsegpt").prepare(model, numbers())


@pytest.mark.parametrize("importance", ["gradient", "movement"])
def test_gradients_that_a_scaler_leaves_out_are_left_out(importance: Any) -> None:
    model = network()
    tool, clean = PruneTool(importance=importance), PruneTool(importance=importance)
    with tool.calibrating(), amanda.apply(tool):
        (model(numbers()).square().sum() * torch.inf).backward()
        model(numbers()).square().sum().backward()
    with clean.calibrating(), amanda.apply(clean):
        model(numbers()).square().sum().backward()
    for name, one in clean.state_dict().items():
        assert np.array_equal(np.asarray(tool.state_dict()[name]), np.asarray(one)), name
    lost = PruneTool(importance=importance)
    with pytest.raises(PruneError, match="none was finite"), lost.calibrating(), amanda.apply(lost):
        (model(numbers()).square().sum() * torch.inf).backward()


@pytest.mark.parametrize("importance", ["wanda", "sparsegpt"])
def test_a_convolution_without_a_batch_has_the_masks_of_a_batch_of_one(importance: Any) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 8, 3, padding=1), torch.randn(4, 9, 9)
    alone, batched = PruneTool(importance=importance), PruneTool(importance=importance)
    alone.prepare(layer, x)
    batched.prepare(layer, x[None])
    found, wanted = (next(iter(one.weights)).mask for one in (alone, batched))
    assert torch.equal(found, wanted)
    assert not wanted.all()


def test_smoothing_of_a_channel_without_weights_fits_float16() -> None:
    weight = torch.ones(4, 3)
    weight[:, 1] = 0
    assert smoothing(torch.tensor([1.0, 100.0, 4.0]), weight, 0.0).tolist() == [1, 1, 1]
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16), torch.randn(8, 32)
    with torch.no_grad():
        layer.weight[:, 3] = 0
    layer.half()
    tool = met(SmoothQuantTool(0.0), layer, x.half())
    with amanda.apply(tool), torch.no_grad():
        assert torch.allclose(layer(x.half()), F.linear(x.half(), layer.weight, layer.bias), atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NearestTool(4, True), "group_size is True"),
        (lambda: GPTQTool(damping="a"), "damping is 'a'"),  # type: ignore[arg-type]
        (lambda: GPTQTool(block=True), "block is True"),
        (lambda: AWQTool(steps=1.5), "steps is 1.5"),  # type: ignore[arg-type]
        (lambda: SmoothQuantTool("a"), "alpha is 'a'"),  # type: ignore[arg-type]
        (lambda: PruneTool(granularity="a"), "granularity is 'a'"),  # type: ignore[arg-type]
        (lambda: PruneTool(pattern="tile", granularity=1.5), "granularity is 1.5"),  # type: ignore[arg-type]
    ],
)
def test_options_of_another_kind_are_told(make: Any, message: str) -> None:
    with pytest.raises(AmandaError, match=message):
        make()
