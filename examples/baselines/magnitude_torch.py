"""Magnitude pruning of a PyTorch model by hand, with hooks of gradients (Han et al. 2015).

It knows the modules that have a weight; one that a function is called with, it does not see.
"""

import torch
from torch import Tensor, nn

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def smallest_dropped(weight: Tensor, sparsity: float) -> Tensor:
    """A 0/1 mask of weight's shape that drops the share `sparsity` of smallest magnitude."""
    dropped = weight.abs().flatten().topk(round(weight.numel() * sparsity), largest=False).indices
    return torch.ones(weight.numel()).index_fill(0, dropped, 0).view_as(weight)


class MagnitudePruning:
    """Sets the smallest weights of every known module to zero, and keeps them there in training."""

    def __init__(self, model: nn.Module, sparsity: float = 0.5) -> None:
        self.masks: dict[str, Tensor] = {}
        self.hooks = []
        for name, module in model.named_modules():
            if isinstance(module, KINDS):
                mask = smallest_dropped(module.weight.detach(), sparsity)
                self.masks[name] = mask
                module.weight.data.mul_(mask)
                self.hooks.append(module.weight.register_hook(lambda grad, mask=mask: grad * mask))

    def remove(self) -> None:
        """Let all weights be trained again."""
        for hook in self.hooks:
            hook.remove()
