"""Listing 1, beside the same pruning done by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import amanda


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False), nn.Flatten(), nn.Linear(4 * 8 * 8, 2)
    )


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def masks_by_hand(model: nn.Module, sparsity: float) -> list[Tensor]:
    masks = []
    for module in convolutions(model):
        magnitudes = module.weight.detach().abs()
        threshold = magnitudes.flatten().sort().values[int(magnitudes.numel() * sparsity) - 1]
        masks.append((magnitudes > threshold).float())
    return masks


def step_by_hand(model: nn.Module, masks: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of a copy whose weights are masked in place; then its gradients masked."""
    for module, mask in zip(convolutions(model), masks, strict=True):
        module.weight.data.mul_(mask)
    y = model(x)
    y.sum().backward()
    for module, mask in zip(convolutions(model), masks, strict=True):
        assert module.weight.grad is not None
        module.weight.grad.mul_(mask)
    return y, gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def pruning(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("pruning")


def test_output_and_gradients_are_those_of_pruning_by_hand(pruning: ModuleType) -> None:
    x = torch.rand(2, 3, 12, 12)
    model, reference = network(), network()
    y_by_hand, grads_by_hand = step_by_hand(reference, masks_by_hand(reference, 0.6), x)
    with amanda.apply(pruning.PruningTool(sparsity=0.6)):
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, y_by_hand)
    assert len(grads_by_hand) == 5
    assert all(map(torch.equal, gradients(model), grads_by_hand))


def test_masks_stay_while_weights_are_trained(pruning: ModuleType) -> None:
    x = torch.rand(2, 3, 12, 12)
    model, reference = network(), network()
    original = [module.weight.detach().clone() for module in convolutions(model)]
    masks = masks_by_hand(reference, 0.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_by_hand = torch.optim.SGD(reference.parameters(), lr=0.1)
    tool = pruning.PruningTool(sparsity=0.6)
    for _ in range(3):
        with amanda.apply(tool):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        optimizer_by_hand.zero_grad()
        step_by_hand(reference, masks, x)
        optimizer_by_hand.step()
    trained = zip(convolutions(model), convolutions(reference), masks, original, strict=True)
    for module, by_hand, mask, before in trained:
        kept = mask.bool()
        assert torch.equal(module.weight[kept], by_hand.weight[kept])
        assert not torch.equal(module.weight[kept], before[kept])
        assert torch.equal(module.weight[~kept], before[~kept])


def test_the_script_runs(pruning: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    pruning.main()
    lines = capsys.readouterr().out.splitlines()
    assert "0.weight  70% of its gradient is zero" in lines
    assert "4.weight   0% of its gradient is zero" in lines
