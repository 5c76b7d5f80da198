"""Faults do not stay in the memory that a program has: parameters and buffers are what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.inject import Campaign, InjectTool

X = torch.linspace(-1, 1, 12).reshape(3, 4)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda w: w.view(2, 8).view(4, 4),
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "getitem": lambda w: w[:, 0:4],
    "narrow": lambda w: w.narrow(0, 0, 4),
    "chunk": lambda w: torch.cat(w.chunk(2)),
    "unbind": lambda w: torch.stack(w.unbind()),
    "expand": lambda w: w.expand(2, 4, 4)[0],
    "detach": lambda w: w.detach(),
    "as_strided": lambda w: w.as_strided((4, 4), (4, 1)),
    "unsqueeze": lambda w: w.unsqueeze(0).squeeze(0),
    "unfold": lambda w: w.unfold(0, 4, 1)[0],
    "alias of data": lambda w: w.data,
    "real": lambda w: torch.view_as_real(torch.view_as_complex(w.view(4, 2, 2))).view(4, 4),
}


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_fault_in_a_view_of_a_parameter_reaches_what_reads_the_view_alone(
    view: Callable[[Tensor], Tensor], grad: bool
) -> None:
    layer = nn.Linear(4, 4, bias=False)
    before = bits(layer)
    tool = InjectTool(fault="value", value=1e6, end=1, type=None)
    with torch.set_grad_enabled(grad), amanda.apply(tool):
        through = view(layer.weight)
        whole = layer.weight * 1.0
    assert bits(layer) == before
    assert tool.result.injections
    assert (whole.abs() > 1e5).sum() == 1  # the fault of that product itself
    assert bool((through.abs() > 1e5).any()) or view is VIEWS["alias of data"]


class Writing(nn.Module):
    """A module with views, writes in place, out= and buffers."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x @ self.weight.view(2, 8).view(4, 4).t())
        with torch.no_grad():
            self.steps += 1
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.cache[0].copy_(y[0])
            self.cache[1:4].view(-1).add_(y.detach().reshape(-1))
            torch.maximum(self.mean, y.detach()[1], out=self.mean)
            self.weight.clamp_(-3, 3)
            self.weight.data[0, 0] = 0.5
            torch._foreach_mul_([self.mean, self.cache], 0.5)
        return y.mul_(2) + self.cache.sum() + self.mean


@pytest.mark.parametrize("target", ["outputs", "inputs", "weights"])
@pytest.mark.parametrize("training", [False, True])
def test_a_campaign_leaves_parameters_and_buffers_bit_for_bit(target: Any, training: bool) -> None:
    module = Writing().train(training)
    module(X)
    before, versions = bits(module), {one: one._version for one in module.parameters()}
    campaign = Campaign(InjectTool(seed=2, target=target), trials=60)
    seen: list[bool] = []

    def program() -> Tensor:
        with amanda.disabled():
            seen.append(bits(module) == before)
        return module(X)

    result = campaign.run(program)
    assert bits(module) == before
    assert all(seen)
    assert len(seen) == 62
    assert result.count("sdc") + result.count("nan")
    assert result.count("no_fault") == 0
    output = campaign.replay(program, 3)
    assert output.shape == (3, 4)
    assert bits(module) == before
    assert set(versions) == set(module.parameters())


def test_a_campaign_leaves_parameters_where_a_trial_crashes() -> None:
    table, index = nn.Embedding(8, 4), torch.arange(3)
    before = bits(table)

    def program() -> Tensor:
        with torch.no_grad():
            table.weight.add_(1)
            return table(index + 1)

    result = Campaign(InjectTool(type="add", bits=[30], seed=1), trials=20).run(program)
    assert result.count("crash")
    assert bits(table) == before


def test_what_a_program_returns_of_its_buffers_is_judged_as_it_was_in_the_trial() -> None:
    module = Writing().eval()

    def program() -> Tensor:
        with torch.no_grad():
            module.mean.fill_(1.0)
            return module.mean

    tool = InjectTool(type="fill", fault="value", value=5.0)
    campaign = Campaign(tool, trials=4)
    assert campaign.run(program).count("sdc") == 4
    assert (campaign.replay(program, 0) == 5.0).sum() == 1
    assert not module.mean.any()


def test_a_campaign_leaves_variables_of_tensorflow() -> None:
    import tensorflow as tf

    weight, mean = tf.Variable(tf.ones((4, 4))), tf.Variable(tf.zeros(4))

    def program() -> Any:
        y = tf.matmul(tf.ones((2, 4)), weight)
        mean.assign_add(tf.reduce_mean(y, 0))
        return y + mean

    result = Campaign(InjectTool(seed=1), trials=20).run(program)
    assert result.count("sdc") + result.count("nan")
    assert not mean.numpy().any()
    assert weight.numpy().tolist() == [[1.0] * 4] * 4
