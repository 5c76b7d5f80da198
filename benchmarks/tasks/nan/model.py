"""A model whose attention gives NaN where a mask hides a whole row."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """One head of attention over 8 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / 8
        weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        out: torch.Tensor = self.out(weights @ value)
        return out


class Model(nn.Module):
    """Attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(32, 64), Attention(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.attention(self.embed(x), mask))
        return out
