"""2:4 pruning as in NVIDIA's APEX (ASP): masks as buffers of modules, and an optimizer whose step is patched.

`prune_trained_model` of APEX: masks are computed once, from the weights of a trained model, then it is
trained on with them. Source: Mishra et al. 2021, "Accelerating sparse deep neural networks".
"""

from itertools import combinations
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def mask_2_4(matrix: Tensor) -> Tensor:
    """Of every four consecutive values of a row the two of most magnitude: the best of six patterns."""
    patterns = torch.zeros(6, 4)
    for row, pair in enumerate(combinations(range(4), 2)):
        patterns[row, list(pair)] = 1
    groups = matrix.abs().reshape(-1, 4)
    best = (groups @ patterns.T).argmax(1)
    return patterns[best].reshape(matrix.shape)


def mask_of(weight: Tensor) -> Tensor:
    """The mask of a weight (out, in, ...), whose groups of four lie along the inputs."""
    last = weight.movedim(1, -1)
    return mask_2_4(last.reshape(-1, last.shape[-1])).view(last.shape).movedim(-1, 1).contiguous()


class ASP:
    """Prunes the weights of modules, then holds them at zero through the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.pruned: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            if isinstance(module, KINDS) and module.weight.shape[1] % 4 == 0:
                module.register_buffer("mask", mask_of(module.weight.detach()))
                module.weight.data.mul_(module.mask)
                self.pruned.append((name, module))
        self.optimizer, self.step = optimizer, optimizer.step
        optimizer.step = MethodType(lambda _, *args: self.masked_step(*args), optimizer)

    @property
    def masks(self) -> dict[str, Tensor]:
        """By the module's path."""
        return {name: module.mask for name, module in self.pruned}

    def masked_step(self, *args: Any) -> Any:
        """The optimizer's step, with gradients masked before it and weights after it."""
        for _, module in self.pruned:
            if module.weight.grad is not None:
                module.weight.grad.mul_(module.mask)
        loss = self.step(*args)
        for _, module in self.pruned:
            module.weight.data.mul_(module.mask)
        return loss

    def remove(self) -> None:
        """Leave the pruned model and the optimizer as they are without masks."""
        self.optimizer.step = self.step
        for _, module in self.pruned:
            del module.mask
