"""Prune the convolutions of an unmodified model, forward and backward.

    python examples/pruning.py

The tool is Listing 1 of the Amanda paper. It is written in the words of StandardMapping, so
nothing in its analysis routines belongs to one framework.
"""

import torch
from torch import Tensor, nn

import amanda
from amanda.tools.mapping import StandardMapping


def magnitude_mask(weight: Tensor, sparsity: float = 0.5) -> Tensor:
    """A 0/1 mask of weight's shape that drops the share `sparsity` of smallest magnitude."""
    dropped = int(weight.numel() * sparsity)
    smallest = weight.abs().flatten().topk(dropped, largest=False).indices
    mask = torch.ones_like(weight).flatten()
    mask[smallest] = 0
    return mask.view_as(weight)


class PruningTool(amanda.Tool):
    """Masks the weights of convolutions, and their gradients."""

    def __init__(self, sparsity: float = 0.5) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.instrumentation)
        self.add_inst_for_op(self.backward_instrumentation, backward=True, require_outputs=True)

    def instrumentation(self, context: amanda.OpContext) -> None:
        if context["type"] in ["conv2d"]:
            weight = context.get_inputs()[context["weight_index"]]
            mask = magnitude_mask(weight.detach(), self.sparsity)
            context["mask"] = mask
            context.insert_before_op(self.mask_forward_weight, inputs=[context["weight_index"]], mask=mask)

    def backward_instrumentation(self, context: amanda.OpContext) -> None:
        if context["backward_type"] in ["conv2d_backward"]:
            context.insert_after_backward_op(
                self.mask_backward_gradient,
                grad_inputs=[context["weight_grad_index"]],
                mask=context["mask"],
            )

    def mask_forward_weight(self, weight: Tensor, mask: Tensor) -> Tensor:
        return weight * mask

    def mask_backward_gradient(self, weight_grad: Tensor, mask: Tensor) -> Tensor:
        return weight_grad * mask


def main() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    images = torch.rand(2, 3, 12, 12)
    model(images)
    with amanda.apply(PruningTool(sparsity=0.7)):
        model(images).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        zeros = (parameter.grad == 0).float().mean().item()
        print(f"{name:<8} {zeros:4.0%} of its gradient is zero")


if __name__ == "__main__":
    main()
