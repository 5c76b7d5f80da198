"""Dynamic pruning by hand, in the source of models, and by tools: the same masks and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.dynamic_prune import ActivationPruneTool, AttentionPruneTool, DynamicChannelPruneTool


@pytest.fixture
def resnet(example: Callable[[str], ModuleType]) -> nn.Module:
    """The blocks of ResNet-18 with few channels, whose normalisations have seen images."""
    example("models").let_torchvision_load()
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)
    model(torch.randn(4, 3, 64, 64))
    return model.eval()


def by_place(tool: amanda.Tool, suffix: str) -> Iterator[Tensor]:
    """State of a tool at each op, in the order in which ops were met."""
    return (value for key, value in tool.state_dict().items() if key.endswith(suffix))


def test_channels_are_pruned_as_by_hand(resnet: nn.Module, example: Callable[[str], ModuleType]) -> None:
    images = torch.randn(2, 3, 64, 64)
    tool = DynamicChannelPruneTool(density=0.5)
    with amanda.apply(tool), torch.no_grad():
        expected = resnet(images)
    by_hand = example("baselines/channel_torch").GatedResNet(resnet, density=0.5).eval()
    convolutions = [one for one in resnet.modules() if isinstance(one, nn.Conv2d)]
    weights = [one.detach() for one in by_place(tool, "/saliency.weight")]
    gates = {one.conv: one.gate for one in by_hand.modules() if hasattr(one, "gate")}
    assert len(weights) == len(convolutions) == len(gates)
    names = {id(module): name for name, module in resnet.named_modules()}
    state = tool.state_dict()
    for convolution, gate in gates.items():
        gate.weight.data = state[f"{names[id(convolution)]}/conv2d/saliency.weight"].detach()
    with torch.no_grad():
        output = by_hand(images)
    torch.testing.assert_close(output, expected)
    assert not torch.allclose(output, resnet(images), atol=0.1)
    torch.testing.assert_close(by_hand.penalty(), tool.loss())


def test_activations_are_pruned_as_by_hand(resnet: nn.Module, example: Callable[[str], ModuleType]) -> None:
    images = torch.randn(2, 3, 64, 64)
    tool = ActivationPruneTool(budget=0.5)
    tool.prepare(resnet, images)
    with amanda.apply(tool), torch.no_grad():
        expected = resnet(images)
    by_hand = example("baselines/activation_torch").SparseResNet(resnet).eval()
    state = zip(*(by_place(tool, f"/mask.{part}") for part in ("kernel", "weight", "bias")), strict=True)
    for block, (kernel, weight, bias) in zip(by_hand.blocks, state, strict=True):
        block.unit.local.weight.data = kernel.detach().permute(2, 0, 1)[None]
        block.unit.overall.weight.data, block.unit.overall.bias.data = weight.detach().T, bias.detach()
    with torch.no_grad():
        output = by_hand(images)
    torch.testing.assert_close(output, expected)
    kept = [block.mask.mean().item() for block in by_hand.blocks]
    assert any(0 < share < 1 for share in kept)
    torch.testing.assert_close(by_hand.penalty(), tool.loss())


def test_tokens_are_pruned_as_by_hand(
    bert: Callable[..., nn.Module], example: Callable[[str], ModuleType]
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    model, tokens = bert(num_hidden_layers=4, **sizes).eval(), torch.randint(0, 50, (3, 16))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data *= 8  # or attention would be even
    tool = AttentionPruneTool(keep=0.6)
    with amanda.apply(tool), torch.no_grad():
        expected = model(tokens)[0]
    by_hand = example("baselines/attention_torch").SkimmedBert(model, keep=0.6)
    with torch.no_grad():
        output = by_hand(tokens)
    assert [int(mask.sum()) for mask in by_hand.masks] == [30, 18, 12, 9]
    torch.testing.assert_close(output, expected)
    assert not torch.allclose(output, model(tokens)[0], atol=0.1)
