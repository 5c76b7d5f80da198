"""Tools of third parties on `WeightTool`: a pruner of 25 lines, and a transform of whole weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from autoray import do
from torch import nn
from torch.nn import functional as F

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.weights import Weight, WeightError, WeightTool
from amanda.tools.weights._parameters import ParameterStore
from amanda.tools.weights._parameters_torch import TorchParameters


class Magnitude(WeightTool[Weight]):
    """Drops the smallest elements of each weight."""

    elementwise = True

    def __init__(self, sparsity: float = 0.5, **selection: Any) -> None:
        super().__init__(**selection)
        self.sparsity = sparsity

    def on_weight(self, weight: Weight) -> None:
        weight.keep_elements("mask", True, "bool")

    def update(self, weight: Weight, value: Any) -> None:
        magnitudes = abs(weight.to_numpy(value)).ravel()
        mask = np.ones(magnitudes.size, bool)
        mask[magnitudes.argsort(kind="stable")[: round(self.sparsity * magnitudes.size)]] = False
        weight["mask"] = mask.reshape(value.shape)

    @amanda.traceable
    def transform(self, value: Any, mask: Any) -> Any:
        return value * mask

    def transform_gradient(self, gradient: Any, mask: Any) -> Any:
        return gradient * mask


class LowRank(WeightTool[Weight]):
    """Projects each weight onto its most important directions of outputs."""

    def __init__(self, rank: int, **selection: Any) -> None:
        super().__init__(**selection)
        self.rank = rank

    def on_weight(self, weight: Weight) -> str | None:
        if len(weight.canonical_shape) != 2 or self.rank >= min(weight.canonical_shape):
            return f"no rank of {self.rank} is lower than that of shape {weight.canonical_shape}"
        weight.keep("basis", np.zeros((weight.canonical_shape[0], self.rank), np.float32))
        return None

    def update(self, weight: Weight, value: Any) -> None:
        left, _, _ = np.linalg.svd(weight.to_numpy(value), full_matrices=False)
        weight["basis"] = left[:, : self.rank]

    @amanda.traceable
    def transform(self, value: Any, basis: Any) -> Any:
        return basis @ (do("transpose", basis) @ value)

    def transform_gradient(self, gradient: Any, basis: Any) -> Any:
        return self.transform(gradient, basis)


def projected(weight: torch.Tensor, rank: int) -> torch.Tensor:
    left = torch.from_numpy(np.linalg.svd(weight.detach().numpy(), full_matrices=False)[0][:, :rank].copy())
    return left @ (left.T @ weight.detach())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x.flip(1), x * 2)[0]
        return found


def mixtral(transformers: Any) -> tuple[nn.Module, torch.Tensor]:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), torch.arange(12).reshape(1, 12)


def tied_gpt2(transformers: Any) -> tuple[nn.Module, torch.Tensor]:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), torch.arange(12).reshape(1, 12)


def attention(transformers: Any) -> tuple[nn.Module, torch.Tensor]:
    return Attention(), torch.rand(2, 5, 16)


def run(model: nn.Module, x: torch.Tensor, tool: amanda.Tool) -> list[torch.Tensor]:
    """Outputs and gradients of two steps."""
    found = []
    with amanda.apply(tool):
        for _ in range(2):
            made = model(x)
            y = getattr(made, "logits", made)
            y.square().mean().backward()
            found.append(y.detach())
    return found + [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("make", [attention, tied_gpt2, mixtral])
def test_a_short_pruner_changes_what_prune_changes(
    make: Callable[[Any], tuple[nn.Module, torch.Tensor]], transformers: Any
) -> None:
    torch.manual_seed(0)
    model, x = make(transformers)
    model.eval()
    other = copy.deepcopy(model)
    mine, theirs = Magnitude(), PruneTool(sparsity=0.5)
    for one, two in zip(run(model, x, mine), run(other, x, theirs), strict=True):
        assert torch.equal(one, two)
    masks = {name: one for name, one in theirs.state_dict().items() if "/mask" in name}
    assert masks
    assert all(torch.equal(mine.state_dict()[name], one) for name, one in masks.items())
    assert mine.left == theirs.left
    mine.finalize(model)
    theirs.finalize(other)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))


X = torch.linspace(-1, 1, 64).reshape(4, 16)


def test_a_transform_of_whole_weights_is_what_the_model_computes_by_hand() -> None:
    model, tool = network(), LowRank(4)
    with amanda.apply(tool):
        y = model(X)
        y.square().sum().backward()
    by_hand = network()
    for i in (0, 2):
        by_hand[i].weight.data = projected(by_hand[i].weight, 4)  # type: ignore[union-attr]
    wanted = by_hand(X)
    wanted.square().sum().backward()
    assert torch.equal(y, wanted)
    for i in (0, 2):
        own, basis = model[i].weight, tool.state_dict()[f"{i}.weight/basis"]
        torch.testing.assert_close(own.grad, basis @ (basis.T @ by_hand[i].weight.grad))
    tool.finalize(model)
    assert torch.equal(model(X), y)
    assert np.linalg.matrix_rank(model[0].weight.detach().numpy()) == 4


@pytest.mark.parametrize("compiled", ["eager", "instrument"])
def test_compiled_code_reads_transformed_weights(compiled: Any) -> None:
    wanted, model, tool = network(), network(), LowRank(4)
    with amanda.apply(LowRank(4)):
        y = wanted(X)
        y.sum().backward()
    with amanda.apply(tool, compiled=compiled):
        found = torch.compile(model, backend="aot_eager")(X)
        found.sum().backward()
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(model[0].weight.grad, wanted[0].weight.grad)


def test_state_goes_by_the_path_of_the_weight() -> None:
    first, again = LowRank(4), LowRank(4)
    with amanda.apply(first):
        y = network()(X)
    again.load_state_dict(first.state_dict())
    model = network()
    nn.init.ones_(model[0].weight)
    with amanda.apply(again):
        model(X)
    assert torch.equal(again.state_dict()["0.weight/basis"], first.state_dict()["0.weight/basis"])
    assert [one.path for one in again.weights] == ["0.weight", "2.weight"]
    other = LowRank(4)
    other.load_state_dict(again.state_dict())
    with amanda.apply(other):
        assert torch.equal(network()(X), y)


def test_the_other_forms_of_a_weight_are_transformed_as_it_is() -> None:
    torch.manual_seed(0)
    weight, x, tool = nn.Parameter(torch.randn(6, 8)), torch.randn(3, 8), LowRank(2)
    low = projected(weight, 2)
    with amanda.apply(tool):
        whole = F.linear(x, weight)
        turned = torch.matmul(x, weight.t())
        part = F.linear(x, weight[2:5])
    assert torch.equal(whole, F.linear(x, low))
    torch.testing.assert_close(turned, x @ low.t())
    torch.testing.assert_close(part, F.linear(x, low[2:5]))
    assert len([*tool.weights]) == 1


def test_experts_that_data_select_are_weights_each() -> None:
    torch.manual_seed(0)
    experts, x = nn.Parameter(torch.randn(4, 6, 8)), torch.randn(2, 3, 6)
    index, tool = torch.tensor([2, 0]), LowRank(2)
    low = torch.stack([projected(one.T, 2).T for one in experts])
    with amanda.apply(tool):
        found = torch.bmm(x, experts[index])
    torch.testing.assert_close(found, torch.bmm(x, low[index]))
    assert len([*tool.weights]) == 4


@pytest.mark.parametrize("verb", ["clear", "renew"])
def test_state_after_clear_is_that_of_the_present_weight(verb: str) -> None:
    model, tool = network(), Magnitude()
    with amanda.apply(tool):
        model(X)
        before = tool.state_dict()["0.weight/mask"].clone()
        model[0].weight.data.copy_(torch.rand(32, 16))
        model(X)
        assert torch.equal(tool.state_dict()["0.weight/mask"], before)
        if verb == "clear":
            tool.clear()
        else:
            with pytest.warns(DeprecationWarning, match="renew is deprecated since .* use clear"):
                tool.renew()
        model(X)
    assert not torch.equal(tool.state_dict()["0.weight/mask"], before)


def test_what_a_tool_leaves_it_says() -> None:
    model, tool = network(), LowRank(12, module="0")
    with amanda.apply(tool):
        model(X)
    assert [one.path for one in tool.weights] == ["0.weight"]
    tool = LowRank(12)
    with amanda.apply(tool):
        model(X)
    assert tool.left == {"linear of 2": "no rank of 12 is lower than that of shape (12, 32)"}


def test_a_weight_is_read_as_it_is_now() -> None:
    model, tool = network(), Magnitude()
    with amanda.apply(tool):
        model(X)
    (first, _) = tool.weights
    assert torch.equal(first.read(), model[0].weight)
    del model
    with pytest.raises(WeightError, match=r"nothing that runs holds the weight of 0\.weight"):
        first.read()


def test_wrong_models_and_tools_are_refused() -> None:
    tool = Magnitude()
    with amanda.apply(tool):
        network()(X)
    with pytest.raises(WeightError, match="none of the 2 weights that Magnitude has changed"):
        tool.finalize(network())
    with pytest.raises(WeightError, match="int has no parameters"):
        tool.finalize(3)
    with pytest.raises(WeightError, match="type is 5; give a name"):
        Magnitude(type=5)

    class Nothing(WeightTool[Weight]):
        pass

    with pytest.raises(amanda.AmandaError, match=r"Nothing has no method transform\(self, value"):
        Nothing()

    class Unprepared(WeightTool[Weight]):
        def __init__(self) -> None:
            pass

    with (
        pytest.raises(amanda.errors.ToolError, match=r"Unprepared.__init__ does not call super\(\)"),
        amanda.apply(Unprepared()),
    ):
        pass

    class Misspelt(WeightTool[Weight]):
        def on_weight(self, weight: Weight) -> None:
            weight.keep_elements("mask", True, "bool")

        def update(self, weight: Weight, value: Any) -> None:
            weight["msk"] = value > 0

        def transform(self, value: Any, mask: Any) -> Any:
            return value * mask

    message = "weight has no state 'msk', which weight.keep creates in on_weight; did you mean mask?"
    with pytest.raises(WeightError, match=re.escape(message)), amanda.apply(Misspelt()):
        nn.Linear(2, 2)(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("store", "parameter"),
    [(TorchParameters(), nn.Parameter(torch.ones(2))), (ParameterStore(), np.ones(2))],
    ids=["torch", "numpy"],
)
def test_a_parameter_that_a_list_has_twice_is_written_once(store: ParameterStore, parameter: Any) -> None:
    change = store.identity(parameter), None, lambda value: value * 2
    _, count = store.write_all([parameter, parameter], [change])
    assert count == 1
    assert parameter.tolist() == [2, 2]


def test_state_for_a_value_is_that_of_the_names_of_each_call() -> None:
    model, tool = network(), PruneTool(0.5)
    with amanda.apply(tool):
        model(X)
    weight = next(iter(tool.weights))
    assert weight.tensors_like(X, ["mask"]).keys() == {"mask"}
    assert weight.tensors_like(X, ["mask", "updated"]).keys() == {"mask", "updated"}
