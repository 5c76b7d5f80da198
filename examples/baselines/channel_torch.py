"""Dynamic channel pruning by hand: the source of ResNet's blocks, with gates (Gao et al. 2019).

Every network is written anew for it, here the blocks of torchvision's ResNet-18 and 34.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Gate(nn.Module):
    """What the channels of a convolution are multiplied by, from what it reads: the largest saliencies."""

    def __init__(self, given: int, made: int, density: float) -> None:
        super().__init__()
        self.kept = max(1, math.ceil(density * made))
        self.weight = nn.Parameter(torch.randn(given, made) * 0.1 * (2 / given) ** 0.5)
        self.bias = nn.Parameter(torch.ones(made))

    def forward(self, x: Tensor) -> Tensor:
        saliency = self.saliency = F.relu(x.abs().mean((2, 3)) @ self.weight + self.bias)
        largest = saliency.detach().argsort(dim=-1, descending=True, stable=True)[:, : self.kept]
        return saliency * torch.zeros_like(saliency).scatter(1, largest, 1.0)


class GatedConv(nn.Module):
    """A convolution and its normalisation, whose scale the gate takes the place of."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, density: float) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm
        self.gate = Gate(conv.in_channels, conv.out_channels, density)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if self.training:
            norm.num_batches_tracked.add_(1)
        made = F.batch_norm(
            self.conv(x), norm.running_mean, norm.running_var, torch.ones_like(norm.weight), norm.bias,
            self.training, norm.momentum, norm.eps,
        )  # fmt: skip
        return made * self.gate(x)[:, :, None, None]


class GatedBlock(nn.Module):
    """torchvision's BasicBlock with gates."""

    def __init__(self, block: nn.Module, density: float) -> None:
        super().__init__()
        self.first = GatedConv(block.conv1, block.bn1, density)
        self.second = GatedConv(block.conv2, block.bn2, density)
        self.shortcut = None
        if block.downsample is not None:
            self.shortcut = GatedConv(*block.downsample, density)

    def forward(self, x: Tensor) -> Tensor:
        made = self.second(F.relu(self.first(x)))
        return F.relu(made + (x if self.shortcut is None else self.shortcut(x)))


class GatedResNet(nn.Module):
    """torchvision's ResNet of basic blocks with gates behind all convolutions."""

    def __init__(self, resnet: nn.Module, density: float = 0.5) -> None:
        super().__init__()
        self.stem = GatedConv(resnet.conv1, resnet.bn1, density)
        self.maxpool, self.head = resnet.maxpool, resnet.fc
        stages = [resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4]
        self.blocks = nn.Sequential(*(GatedBlock(block, density) for stage in stages for block in stage))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(self.maxpool(F.relu(self.stem(images))))
        return self.head(hidden.mean((2, 3)))

    def penalty(self, strength: float = 1e-8) -> Tensor:
        """To be added to the loss: of the saliencies of the last images."""
        gates = [one for one in self.modules() if isinstance(one, Gate)]
        return strength * sum(gate.saliency.mean(0).sum() for gate in gates)
