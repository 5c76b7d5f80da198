"""Dynamic channel pruning against a model that does it by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.dynamic_prune import DynamicChannelPruneTool

DENSITY = 0.5


class Unmodified(nn.Module):
    """Convolutions with a normalisation behind, without one, and with a bias, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, stride=2)
        self.head = nn.Linear(6, 4)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)
            self.norm.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = F.relu(self.second(x), inplace=True)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def flat(key: str) -> str:
    return key.replace("/", "_").replace(".", "_")


class ByHand(nn.Module):
    """The same with the predictors written into the source."""

    def __init__(self, model: Unmodified, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.predictors = nn.ParameterDict(
            {flat(key): value.detach().clone() for key, value in state.items()}
        )

    def gate(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        weight = self.predictors[f"{layer}_conv2d_saliency_weight"]
        bias = self.predictors[f"{layer}_conv2d_saliency_bias"]
        said = F.relu(x.abs().mean((2, 3)) @ weight + bias)
        most = said.topk(said.shape[1] - int(said.shape[1] * (1 - DENSITY)))
        return torch.zeros_like(said).scatter(1, most.indices, most.values)[:, :, None, None], said

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        m = self.model
        gate, said = self.gate(x, "first")
        normed = F.batch_norm(
            m.first(x), m.norm.running_mean, m.norm.running_var, None, None, self.training, m.norm.momentum
        )
        x = F.relu(gate * (normed + m.norm.bias[:, None, None]))
        gate, more = self.gate(x, "second")
        x = F.relu(gate / (gate.sum(1, keepdim=True) / (gate > 0).sum(1, keepdim=True)) * m.second(x))
        return m.head(x.mean((2, 3))), said.sum(1).mean() + more.sum(1).mean()


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_those_of_a_model_that_was_modified(training: bool) -> None:
    torch.manual_seed(0)
    model, x = Unmodified().train(training), torch.randn(5, 3, 9, 9)
    tool = DynamicChannelPruneTool(DENSITY, penalty=0.01)
    start = copy.deepcopy(model.state_dict())
    tool.prepare(model, x)
    model.load_state_dict(start)
    other = ByHand(model, tool.state_dict()).train(training)
    wanted, said = other(x)
    (wanted.square().sum() + 0.01 * said).backward()
    with amanda.apply(tool):
        found = model(x)
        (found.square().sum() + tool.loss()).backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for name, parameter in tool.state_dict().items():
        wanted = other.predictors[flat(name)].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    theirs = dict(other.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name == "norm.weight":
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("density", [0, 1.5, "half"])
def test_a_density_that_is_no_share_is_refused(density: Any) -> None:
    with pytest.raises(AmandaError, match="above 0"):
        DynamicChannelPruneTool(density)
