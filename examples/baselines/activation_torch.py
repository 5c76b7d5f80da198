"""Spatially sparse activations by hand: the source of ResNet's blocks, with mask units (Verelst 2020).

Every network is written anew for it, here the blocks of torchvision's ResNet-18 and 34.
Source: Verelst & Tuytelaars 2020, "Dynamic convolutions", whose code is such a ResNet.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MaskUnit(nn.Module):
    """Positions at which a block is computed: 0/1, (N, 1, height, width), sampled in training."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.local = nn.Conv2d(channels, 1, 3, stride, padding=1, bias=False)
        self.overall = nn.Linear(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.local(x) + self.overall(x.mean((2, 3)))[:, :, None, None]
        if self.training:
            uniform = torch.rand_like(logits).clamp(1e-8, 1 - 1e-7)
            logits = logits + uniform.log() - (1 - uniform).log()
        soft = logits.sigmoid()
        hard = (logits > 0).type_as(soft)
        return soft + (hard - soft).detach()


class SparseBlock(nn.Module):
    """torchvision's BasicBlock, whose branch adds nothing where the mask is 0."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.unit = MaskUnit(block.conv1.in_channels, block.conv1.stride[0])

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        mask = self.unit(x)
        needed = F.max_pool2d(mask.detach(), 3, 1, padding=1)  # what the second convolution reads
        branch = block.conv1(x)
        macs = [one.weight.numel() * mask.numel() for one in (block.conv1, block.conv2)]
        self.used = macs[0] * needed.mean() + macs[1] * mask.mean()
        self.total, self.mask = sum(macs), mask
        branch = F.relu(block.bn1(branch)) * needed
        branch = block.bn2(block.conv2(branch)) * mask
        return F.relu(branch + (x if block.downsample is None else block.downsample(x)))


class SparseResNet(nn.Module):
    """torchvision's ResNet of basic blocks, of which each decides where it is computed."""

    def __init__(self, resnet: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(resnet.conv1, resnet.bn1, nn.ReLU(), resnet.maxpool)
        stages = [resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4]
        self.blocks = nn.Sequential(*(SparseBlock(block) for stage in stages for block in stage))
        self.head = resnet.fc

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    def penalty(self, budget: float = 0.5, strength: float = 10.0, progress: float = 1.0) -> Tensor:
        """To be added to the loss: the distance from a share of the products, with bounds that relax."""
        strict = math.cos(progress * math.pi / 2) ** 2
        lower, upper = strict * budget, 1 - strict * (1 - budget)
        used, total = [one.used for one in self.blocks], [one.total for one in self.blocks]
        loss = (sum(used) / sum(total) - budget) ** 2
        for one in self.blocks:
            share = one.used / one.total
            loss = loss + (F.relu(lower - share) ** 2 + F.relu(share - upper) ** 2) / len(self.blocks)
        return strength * loss
