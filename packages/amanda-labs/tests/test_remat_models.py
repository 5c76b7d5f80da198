"""remat on real models, and against references: a simulation, torch's checkpoints, torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint_sequential

import amanda
from amanda.tools.remat import RematTool

Run = Callable[[], Tensor]


def resnet(depth: int, in_place: bool) -> tuple[nn.Module, Run]:
    import torchvision

    model = getattr(torchvision.models, f"resnet{depth}")(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = in_place
    x, y = torch.randn(2, 3, 64, 64), torch.tensor([1, 7])
    return model, lambda: F.cross_entropy(model(x), y)


def bert(transformers: Any) -> tuple[nn.Module, Run]:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=256
    )
    model = transformers.BertForSequenceClassification(config)
    ids, labels = torch.randint(0, 100, (4, 16)), torch.tensor([0, 1, 1, 0])
    return model, lambda: model(input_ids=ids, labels=labels).loss


def gpt2(transformers: Any) -> tuple[nn.Module, Run]:
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=3, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 100, (2, 32))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def unrolled() -> tuple[nn.Module, Run]:
    """An LSTM that reads until it has had enough."""
    cell, steps = nn.LSTMCell(16, 32), torch.randn(40, 8, 16)

    def run() -> Tensor:
        h = c = torch.zeros(8, 32)
        for x in steps:
            h, c = cell(x, (h, c))
            if h.mean() > 0.01:
                h = torch.tanh(h * 1.5)
            if c.abs().max() > 4:
                break
        return h.square().sum()

    return cell, run


MODELS: dict[str, tuple[Callable[[Any], tuple[nn.Module, Run]], float]] = {
    "ResNet-18": (lambda _: resnet(18, True), 0.75),
    "ResNet-18 out of place": (lambda _: resnet(18, False), 0.5),
    "ResNet-50": (lambda _: resnet(50, True), 0.75),
    "BERT with dropout": (bert, 0.7),
    "GPT-2": (gpt2, 0.4),
    "an unrolled LSTM": (lambda _: unrolled(), 0.25),
}
"""Models, and the share of what they need without a budget in which they can be trained."""


def step(model: nn.Module, run: Run, *tools: amanda.Tool) -> list[Tensor]:
    """Loss, gradients and buffers of a step, always from the same state."""
    buffers = [(one, one.clone()) for one in model.buffers()]
    model.zero_grad()
    torch.manual_seed(1)
    with amanda.apply(*tools):
        loss = run()
        loss.backward()
    found = [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
    found += [one.clone() for one in model.buffers()]
    for one, before in buffers:
        one.copy_(before)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_train_within_a_budget_with_the_same_gradients(name: str, transformers: Any) -> None:
    torch.manual_seed(0)
    make, share = MODELS[name]
    model, run = make(transformers)
    plain, free = step(model, run), RematTool()
    assert all(map(torch.equal, plain, step(model, run, free)))
    tool = RematTool(int(share * free.result.peak), cost="count", strict=True)  # no clock decides
    assert all(map(torch.equal, plain, step(model, run, tool)))
    assert tool.result.rematerialisations > 0
    assert tool.result.peak <= share * free.result.peak


def chain(n: int, budget: int | None) -> RematTool:
    """n ops that each save what they give, in a budget of so many tensors."""
    tool = RematTool(None if budget is None else budget * 4096 + 64, "h_e_star", cost="count")
    x = torch.linspace(-1, 1, 1024).requires_grad_()

    def run() -> Tensor:
        h = x
        for _ in range(n):
            h = torch.sigmoid(h)
        return h.sum()

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(run(), x)
        return found

    plain = gradient()
    with amanda.apply(tool):
        assert torch.equal(gradient(), plain)
    return tool


class Simulation:
    """DTR with h_e* on a chain of n ops: the number of ops that run again."""

    def __init__(self, n: int, budget: int) -> None:
        self.budget = budget
        self.resident: list[int] = []
        self.evicted: set[int] = set()
        self.again = 0
        for i in range(1, n + 1):
            self._make_room({i - 1})
            self.resident.append(i)
        for i in range(n, 0, -1):
            if i in self.evicted:
                self._bring_back(i)
            self.resident.remove(i)

    def _bring_back(self, i: int) -> None:
        start = i
        while start in self.evicted:
            start -= 1
        for j in range(start + 1, i + 1):
            self._make_room({j - 1})
            self.evicted.remove(j)
            self.resident.append(j)
            self.again += 1

    def _make_room(self, locked: set[int]) -> None:
        while len(self.resident) >= self.budget:
            victim = min((one for one in self.resident if one not in locked), key=self._neighbourhood)
            self.resident.remove(victim)
            self.evicted.add(victim)

    def _neighbourhood(self, i: int) -> int:
        count = 0
        for direction in (-1, 1):
            j = i + direction
            while j in self.evicted:
                count, j = count + 1, j + direction
        return count


@pytest.mark.parametrize("n", [16, 49, 100])
def test_a_chain_takes_as_many_ops_as_the_algorithm_says(n: int) -> None:
    budget = 2 * ceil(sqrt(n))
    tool = chain(n, budget)
    assert tool.result.peak <= budget * 4096 + 64
    assert tool.result.short == 0
    assert tool.result.rematerialisations == Simulation(n, budget).again


def test_a_chain_takes_ops_in_proportion_to_its_length_within_twice_its_root() -> None:
    for n in (25, 100, 400, 1600):
        assert Simulation(n, 2 * ceil(sqrt(n))).again <= 2 * n


def allocated(run: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator had given out at once, beyond those at the beginning."""
    run()
    with profile(profile_memory=True) as profiler:
        run()
    alive = most = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


MEBI = 1 << 20
SLACK = 4096  # the loss, and its like


@pytest.fixture(scope="module")
def layers() -> tuple[nn.Sequential, Tensor]:
    """Sixteen layers that save 1 MiB each, and gradients as large."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(16)]
    return nn.Sequential(*blocks), torch.randn(4096, 64)


def backward(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("budget", [12, 8, 4])
def test_the_allocator_gives_out_the_budget_and_what_gradients_take(
    layers: tuple[nn.Sequential, Tensor], budget: int
) -> None:
    model, x = layers
    assert allocated(lambda: backward(model, model(x).sum())) > 16 * MEBI
    tool = RematTool(budget=budget * MEBI + SLACK, strict=True)
    with amanda.apply(tool):
        most = allocated(lambda: backward(model, model(x).sum()))
    layers_kept, scalars = divmod(tool.result.peak, MEBI)
    assert layers_kept == budget
    # Measured times say what goes, and so whether memory is fullest before there is a loss, or after.
    assert 0 <= scalars <= SLACK
    gradients = 2 * MEBI + 17 * 64 * 64 * 4  # those that enter and leave an op, and of the weights
    assert most <= tool.result.peak + gradients


def test_in_the_memory_of_checkpoints_it_gives_the_same_gradients(
    layers: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = layers

    def run() -> Tensor:
        loss: Tensor = checkpoint_sequential(model, 4, x, use_reentrant=False).sum()
        return loss

    most = allocated(lambda: backward(model, run()))
    plain = backward(model, run())
    tool = RematTool(budget=most - 2 * MEBI - 17 * 64 * 64 * 4, strict=True)
    with amanda.apply(tool):
        found = backward(model, model(x).sum())
        assert allocated(lambda: backward(model, model(x).sum())) <= most
    assert all(map(torch.equal, plain, found))
