"""Pruning of weights that ops have copied or selected out of parameters before an op reads them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import children
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.tools.prune import PruneTool, element_mask, n_m_mask
from amanda.tools.quantize import QuantizeTool


class Gathered(nn.Module):
    """Experts whose weights are gathered for each token, in the one order of axes and in the other."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, 8, 4)),
            nn.Parameter(torch.randn(experts, 8, 4)),
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.bmm(self.up[chosen], x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(hidden.unsqueeze(1), self.down.index_select(0, chosen)).squeeze(1)


BATCHES = [torch.tensor(one) for one in ([0, 2, 2], [1, 1, 0], [3, 0, 1])]
X = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))


def pruned_by_hand(model: nn.Module, mask: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy in which each row of each parameter is masked."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = torch.stack([row * mask(row) for row in parameter.data])
    return other


def gradients(model: nn.Module, call: Callable[..., Tensor], chosen: Tensor) -> list[Tensor]:
    model.zero_grad()
    call(X, chosen).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def test_rows_that_the_data_gather_have_masks_of_their_own() -> None:
    model, tool = Gathered(), PruneTool(sparsity=0.5)
    by_hand = pruned_by_hand(model, lambda row: element_mask(row, 0.5))
    for chosen in BATCHES:
        with amanda.apply(tool):
            y, found = model(X, chosen), gradients(model, model, chosen)
        assert torch.equal(y, by_hand(X, chosen))
        wanted = gradients(by_hand, by_hand, chosen)
        for one, other, weight in zip(found, wanted, by_hand.parameters(), strict=True):
            assert torch.equal(one, other * (weight != 0))
    assert [row[4:6] for row in tool.result.rows()] == [("8x4", "OI")] * 4 + [("8x4", "IO")] * 4
    tool.finalize(model)
    assert all(map(torch.equal, model.parameters(), by_hand.parameters()))


def test_rows_that_the_data_gather_are_pruned_along_their_inputs() -> None:
    model, tool = Gathered(), PruneTool(pattern="2:4")
    with amanda.apply(tool):
        model(X, BATCHES[0])
    tool.finalize(model)
    wanted = Gathered()
    assert torch.equal(model.up, wanted.up * n_m_mask(wanted.up))
    assert torch.equal(model.down, wanted.down * n_m_mask(wanted.down.mT).mT)


class OneByOne(Gathered):
    """The same experts, called one after another."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows = [F.linear(F.linear(one, self.up[i]), self.down[i].T) for one, i in zip(x, chosen, strict=True)]
        return torch.stack(rows)


def test_masks_of_rows_are_those_of_experts_called_one_after_another_and_go_from_the_one_to_the_other() -> (
    None
):
    one, other = PruneTool(sparsity=0.5), PruneTool(sparsity=0.5)
    model = OneByOne()
    with amanda.apply(one):
        for chosen in BATCHES:
            model(X, chosen)
    other.load_state_dict(one.state_dict())
    gathered = Gathered()
    gathered.up.data *= torch.rand(4, 8, 4)  # so that a mask made now would be another
    model.load_state_dict(gathered.state_dict())
    with amanda.apply(one), torch.no_grad():
        wanted = model(X, BATCHES[2])
    with amanda.apply(other):
        torch.testing.assert_close(gathered(X, BATCHES[2]), wanted)
    assert not other.result.waiting


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "global", "begin": 1},
        {"schedule": "cubic", "end": 3},
        {"regrow": "importance", "frequency": 1},
        {"regrow": "random", "frequency": 1, "end": 9},
    ],
    ids=str,
)
def test_schedules_and_regrowth_are_of_rows_too(options: dict[str, Any]) -> None:
    model, tool = Gathered(), PruneTool(sparsity=0.5, **options)
    with amanda.apply(tool):
        for chosen in BATCHES + BATCHES:
            for parameter, grad in zip(model.parameters(), gradients(model, model, chosen), strict=True):
                parameter.data -= 0.01 * grad
            tool.step()
        y = model(X, BATCHES[0])
    assert tool.result.sparsity == pytest.approx(0.5)
    tool.finalize(model)
    assert torch.equal(model(X, BATCHES[0]), y)


def test_rows_that_no_pattern_fits_or_nothing_follows_are_told_to_be_left() -> None:
    table, x = nn.Parameter(torch.randn(8, 4)), torch.rand(3, 4)
    tools = [PruneTool(pattern="3:7"), PruneTool(regrow="gradient", frequency=1), PruneTool()]
    for tool in tools:
        with amanda.apply(tool):
            y = Gathered()(X, BATCHES[0])
            torch.matmul(x, table[torch.tensor([0, 2])].T)  # as a sampled softmax does
        assert torch.equal(y, Gathered()(X, BATCHES[0])) == (tool is not tools[2])
    assert "no multiple of 7" in str(tools[0].result.left)
    assert "gradients and inputs are not followed" in str(tools[1].result.left)
    assert "no weights by themselves" in str(tools[2].result.left)


def test_a_batch_without_tokens_leaves_the_rows_for_the_next() -> None:
    model, tool = Gathered(), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        model(X[:0], BATCHES[0][:0])
        y = model(X, BATCHES[0])
    tool.finalize(model)
    assert torch.equal(model(X, BATCHES[0]), y)


@pytest.mark.parametrize("way", ["checkpoint", "inference", "autocast", "no cache", "two scopes", "compiled"])
def test_rows_are_followed_however_the_model_is_called(way: str) -> None:
    model, tool = Gathered(), PruneTool(sparsity=0.5)
    by_hand = pruned_by_hand(model, lambda row: element_mask(row, 0.5))

    def run(module: nn.Module, chosen: Tensor) -> Tensor:
        if way == "checkpoint":
            result = checkpoint(module, X.clone().requires_grad_(), chosen, use_reentrant=False)
            result.sum().backward()
            return result
        if way == "inference":
            with torch.inference_mode():
                return module(X, chosen)
        if way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return module(X, chosen)
        if way == "no cache":
            with amanda.cache_disabled():
                return module(X, chosen)
        if way == "two scopes":
            with amanda.apply(amanda.Tool()):
                return module(X, chosen)
        return torch.compile(module, backend="eager")(X, chosen)

    wanted = [run(by_hand, chosen) for chosen in BATCHES]
    for _ in range(2):
        with amanda.apply(tool, compiled="eager"):
            for chosen, y in zip(BATCHES, wanted, strict=True):
                assert torch.equal(run(model, chosen), y)
    if way == "checkpoint":
        for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
            assert one.grad is not None
            assert not one.grad[other == 0].any()


@pytest.mark.parametrize("kind", ["product", "convolution"])
def test_what_a_compiled_graph_selects_is_told_to_be_left(kind: str) -> None:
    torch._dynamo.reset()
    parameter = nn.Parameter(torch.randn(4, 2, 3) if kind == "product" else torch.randn(4, 2, 3, 1, 1))
    x = torch.rand(2, 3, 1) if kind == "product" else torch.rand(1, 3, 2, 2)

    def model(chosen: Tensor) -> Tensor:
        if kind == "product":
            return torch.bmm(parameter[chosen], x)
        return F.conv2d(x, parameter.index_select(0, chosen)[0])

    compiled, tool = torch.compile(model, backend="eager"), PruneTool(sparsity=0.5)
    for chosen in (torch.tensor([0, 1]), torch.tensor([2, 3])):
        with amanda.apply(tool, compiled="instrument"):
            y = compiled(chosen)
        assert torch.equal(y, model(chosen))
    assert "select" in str(tool.result.left)


class Cast(nn.Module):
    """Weights that are cast, copied, or laid out anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(torch.randn(3, 3, 4, 8))  # as Keras has it
        self.weight, self.third = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x, kernel).mean((2, 3))
        x = x.double() @ self.weight.to(torch.float64)
        return F.linear(x, self.third.clone().double().T.contiguous())


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "structured"])
def test_copies_of_parameters_are_masked_and_finalized(pattern: str) -> None:
    model, tool, x = Cast(), PruneTool(sparsity=0.5, pattern=pattern), torch.rand(2, 4, 5, 5)
    with amanda.apply(tool):
        model(x)
        y = model(x)
        y.sum().backward()
    assert len(tool.result.rows()) == (2 if pattern == "2:4" else 3)
    tool.finalize(model)
    torch.testing.assert_close(model(x), y)
    for one in (model.kernel, model.weight):
        assert one.grad is not None
        assert (one == 0).float().mean() == 0.5
        assert not one.grad[one == 0].any()


class OneCall(nn.Module):
    """One call of one of several weights, which are parts of one parameter, or parameters each."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = torch.randn(3, 4, 4) * torch.tensor([1.0, 20.0, 400.0]).reshape(3, 1, 1)
        self.weights = nn.ParameterList(map(nn.Parameter, weights)) if listed else nn.Parameter(weights)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return F.linear(x, self.weights[chosen])


@pytest.mark.parametrize("method", ["static", "qat", "lsq"])
@pytest.mark.parametrize("first", ["prune", "quantize"])
def test_tools_in_any_order_know_which_part_of_a_parameter_is_read(first: str, method: Any) -> None:
    outputs = []
    for listed in (False, True):
        model, prune = OneCall(listed), PruneTool(sparsity=0.5)
        quantize = QuantizeTool(method, weight_bits=4, activation_bits=None)
        tools = (prune, quantize) if first == "prune" else (quantize, prune)
        with amanda.apply(*tools):
            outputs.append(torch.stack([model(X, chosen) for chosen in (0, 2, 1, 2)]))
        assert len(prune.result.rows()) == len(quantize.result.tensors) == 3
        assert not prune.result.left
    assert torch.equal(*outputs)


def test_what_a_tool_that_was_applied_before_made_is_told_to_be_left() -> None:
    doubling, prune = amanda.Tool(), PruneTool(sparsity=0.5)

    def double(context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_before_op(lambda weight: weight * 2, inputs=["weight"])

    doubling.add_inst_for_op(double)
    model = OneCall(listed=False)
    wanted = model(X, 0) * 2
    with amanda.apply(doubling, prune):
        assert torch.equal(model(X, 0), wanted)
    assert "applied before has changed it" in str(prune.result.left)


def test_rows_are_pruned_and_quantized() -> None:
    model = Gathered()
    by_hand = pruned_by_hand(model, lambda row: element_mask(row, 0.5))
    prune, quantize = PruneTool(sparsity=0.5), QuantizeTool(weight_bits=4, activation_bits=None)
    alone = QuantizeTool(weight_bits=4, activation_bits=None)
    with amanda.apply(alone):
        wanted = [by_hand(X, chosen) for chosen in BATCHES]
    with amanda.apply(prune, quantize):
        assert all(torch.equal(model(X, chosen), y) for chosen, y in zip(BATCHES, wanted, strict=True))


def test_a_tool_goes_to_another_process_before_it_is_used() -> None:
    model, tool = Gathered(), pickle.loads(pickle.dumps(PruneTool(sparsity=0.5)))
    by_hand = pruned_by_hand(model, lambda row: element_mask(row, 0.5))
    with amanda.apply(copy.deepcopy(tool)):
        y = model(X, BATCHES[0])
    assert torch.equal(y, by_hand(X, BATCHES[0]))


def test_nothing_of_a_model_is_kept_when_it_is_gone() -> None:
    model, tool = Gathered(), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        model(X, BATCHES[0]).sum().backward()
        reference = weakref.ref(model.up)
        del model
        gc.collect()
        assert reference() is None


def test_a_copy_and_the_parameter_are_one_weight() -> None:
    layer, tool, x = nn.Linear(4, 4), PruneTool(sparsity=0.5), torch.rand(2, 4)
    with amanda.apply(tool):
        y = layer(x)
        z = F.linear(x.double(), layer.weight.double())
    assert len(tool.result.rows()) == 1
    torch.testing.assert_close(z.float() + layer.bias, y)


KERAS = """
import keras, torch, amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
layers = keras.layers
model = keras.Sequential([
    layers.Input((8, 8, 4)), layers.Conv2D(8, 3), layers.DepthwiseConv2D(3), layers.SeparableConv2D(8, 1),
    layers.Conv2DTranspose(4, 3), layers.Flatten(), layers.Dense(4),
])
x, tool = torch.rand(2, 8, 8, 4), PruneTool(0.5, "structured")
with amanda.apply(tool):
    model(x)
    y = model(x)
assert len(tool.result.rows()) == 6, tool.result
tool.finalize(model)
assert torch.allclose(model(x), y, atol=1e-6)
assert all((one.value == 0).float().mean() == 0.5 for one in model.weights if len(one.shape) > 1)
"""


@pytest.mark.long
def test_keras_on_torch_is_finalized() -> None:
    pytest.importorskip("keras")
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = children.run(
        [sys.executable, "-W", "ignore", "-c", KERAS],
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_the_experts_of_a_transformer_have_the_same_masks_in_either_implementation(transformers: Any) -> None:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.MixtralModel(config).eval(), torch.arange(24).reshape(2, 12)
    found, outputs = [], []
    for implementation in ("eager", "batched_mm"):
        model.set_experts_implementation(implementation)
        tool = PruneTool(sparsity=0.5)
        with amanda.apply(tool), torch.no_grad():
            outputs.append(model(tokens).last_hidden_state)
        assert not tool.result.left
        found.append({name: one for name, one in tool.state_dict().items() if "/mask" in name})
    torch.testing.assert_close(*outputs)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    tool.finalize(model)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).last_hidden_state, outputs[1])


def mixtral(transformers: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralModel(config).eval()
    model.set_experts_implementation("grouped_mm")
    return model  # type: ignore[no-any-return]


def test_the_headline_speaks_of_experts_that_are_left_too(transformers: Any) -> None:
    model, tool = mixtral(transformers), PruneTool(sparsity=0.5)
    with amanda.apply(tool), torch.no_grad():
        model(torch.arange(24).reshape(2, 12))
    result = tool.result
    experts = sum(one.numel() for name, one in model.named_parameters() if "experts" in name)
    assert result.elements_left == experts
    assert result.share == result.zeros / (result.elements + experts) < 0.1
    selected = result.elements + experts
    assert result.notes()[0] == (
        f"{result.share:.4f} of the {selected:,} selected elements are zero; skipped weights have "
        f"{experts:,} of them."
    )
    assert "multiplies by several weights" in str(result)


def test_quantize_notes_grouped_experts(transformers: Any) -> None:
    model, tool = mixtral(transformers), QuantizeTool(method="dynamic")
    with amanda.apply(tool), torch.no_grad():
        model(torch.arange(24).reshape(2, 12))
    (place,) = tool.result.left
    assert place == "grouped_mm of layers.0.mlp.experts"
    assert "Skipped the weight of grouped_mm of layers.0.mlp.experts: it multiplies by several" in str(
        tool.result
    )


def test_an_index_of_the_program_is_freed_after_the_scope() -> None:
    experts, x = nn.Parameter(torch.randn(4, 3, 3)), torch.randn(2, 1, 3)
    index = torch.tensor([2, 0])
    gone = weakref.ref(index)
    with amanda.apply(PruneTool()):
        torch.bmm(x, experts[index])
    del index
    gc.collect()
    assert gone() is None
