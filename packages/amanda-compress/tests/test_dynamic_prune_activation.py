"""Spatially sparse activations against a residual network that does it by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda
from amanda.tools.axes import Window, windows_of
from amanda.tools.dynamic_prune import ActivationPruneTool
from amanda.tools.dynamic_prune._math import needed_inputs


class Block(nn.Module):
    """A residual block as torchvision writes it."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made)
        self.conv2, self.bn2 = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
            if stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        y: Tensor = self.relu(out)
        return y


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.one, self.two = Block(4, 4, 1), Block(4, 6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.two(self.one(self.stem(x).relu())).mean((2, 3)))
        return y


class ByHand(nn.Module):
    """The same with mask units written into the source."""

    def __init__(self, model: Network, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.units = {key: value.detach().clone().requires_grad_() for key, value in state.items()}
        self.noise: np.random.Generator | None = None

    def block(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        block = getattr(self.model, name)
        kernel, weight, bias = (
            self.units[f"{name}/__iadd__/mask.{one}"] for one in ("kernel", "weight", "bias")
        )
        stride = block.conv1.stride
        logits = F.conv2d(x, kernel.permute(2, 0, 1)[None], None, stride, 1)
        logits = logits + (x.mean((2, 3)) @ weight + bias)[:, :, None, None]
        if self.noise is not None:
            u = self.noise.uniform(1e-8, 1 - 1e-8, logits[:, 0].shape)
            logits = logits + torch.tensor(np.log(u / (1 - u)), dtype=torch.float32)[:, None]
        soft = logits.sigmoid()
        mask = (logits > 0).float() + soft - soft.detach()
        inner = F.max_pool2d(mask.detach(), 3, 1, 1)
        hidden = F.relu(block.bn1(block.conv1(x))) * inner
        shortcut = x if block.downsample is None else block.downsample(x)
        made = F.relu(block.bn2(block.conv2(hidden)) * mask + shortcut)
        first, second = (one.weight.numel() * mask.numel() for one in (block.conv1, block.conv2))
        return made, first * inner.mean() + second * mask.mean(), torch.tensor(first + second)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, used, total = self.block(self.model.stem(x).relu(), "one")
        x, more, all_ = self.block(x, "two")
        y: Tensor = self.model.head(x.mean((2, 3)))
        return y, 10 * ((used + more) / (total + all_) - 0.4) ** 2


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_those_of_a_model_that_was_modified(training: bool) -> None:
    torch.manual_seed(0)
    model, x = Network().train(training), torch.randn(4, 2, 9, 9)
    start = copy.deepcopy(model.state_dict())
    tool = ActivationPruneTool(budget=0.4, seed=3)
    tool.prepare(model, x)
    model.load_state_dict(start)
    tool.train(training)
    other = ByHand(model, tool.state_dict()).train(training)
    if training:
        other.noise = np.random.default_rng([3, 1])
    wanted, budget = other(x)
    (wanted.square().sum() + budget).backward()
    with amanda.apply(tool):
        found = model(x)
        (found.square().sum() + tool.loss()).backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tool.loss(), budget)
    for name, parameter in tool.state_dict().items():
        torch.testing.assert_close(parameter.grad, other.units[name].grad, rtol=1e-4, atol=1e-6)
    theirs = dict(other.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)
    assert 0 < tool.result.saved < 1


@pytest.mark.parametrize("padding", [0, 1, 2, "same", None])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3), 1), ((1, 5), 2), ((2, 4), 1), ((1, 1), 1)])
def test_needed_positions_are_those_that_reach_a_kept_one(
    kernel: tuple[int, int], dilation: int, stride: int, padding: int | str | None
) -> None:
    if padding == "same" and (stride > 1 or kernel[0] == 2):
        return  # which PyTorch has not, or warns of
    if padding is None:
        windows, x = [Window(one, stride, dilation, "same") for one in kernel], torch.ones(2, 1, 11, 9)
        (top, bottom), (left, right) = (one.pads(size) for one, size in zip(windows, (11, 9), strict=True))
        x.requires_grad_()
        given = F.conv2d(
            F.pad(x, (left, right, top, bottom)), torch.ones(1, 1, *kernel), None, stride, 0, dilation
        )
        assert given.shape[2:] == (-(-11 // stride), -(-9 // stride))  # as TensorFlow says of "SAME"
    else:
        attributes = {"stride": [stride, stride], "dilation": dilation, "padding": padding}
        windows, x = windows_of(attributes, "NCHW", kernel), torch.ones(2, 1, 11, 9, requires_grad=True)
        given = F.conv2d(x, torch.ones(1, 1, *kernel), None, stride, padding, dilation)
    assert [one.places(size) for one, size in zip(windows, (11, 9), strict=True)] == list(given.shape[2:])
    torch.manual_seed(0)
    mask = (torch.rand(given[:, 0].shape) > 0.8).float()
    (reached,) = torch.autograd.grad((given[:, 0] * mask).sum(), x)
    assert torch.equal(needed_inputs(mask, windows, (11, 9)), (reached[:, 0] > 0).float())
