"""PyTorch: masks are computed with tensors, where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def plain(weight: Tensor) -> Tensor:
    """A weight as a tensor that masks are computed with: outside autograd, in float32 at least."""
    import torch

    weight = weight.detach()
    weight = weight if type(weight) is torch.Tensor else weight.as_subclass(torch.Tensor)
    return weight if weight.element_size() >= 4 else weight.float()


def as_mask(kept: Any, weight: Tensor) -> Tensor:
    """A mask of 0 and 1 in the weight's own type, on its device."""
    import torch

    with torch.inference_mode(False):
        return torch.as_tensor(kept, device=weight.device).to(weight.dtype)


def row(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors one after another, where the first one is."""
    import torch

    first, *others = (one.to(tensors[0].device).reshape(-1) for one in tensors)
    return torch.cat([first, *others]) if others else first


def lowest_dropped(scores: Tensor, count: int) -> Tensor:
    """Of scores in one row, false for the `count` lowest and true for the others.

    Of equal scores those are dropped that `torch.topk` picks, as in torch.nn.utils.prune.  On a CPU topk
    needs six times the memory of the scores, so it is asked only where equal ones leave a choice.
    """
    import torch

    if count and scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        ordered = scores.clone().numpy()
        ordered.partition(count - 1)
        dropped = scores <= float(ordered[count - 1])
        if int(dropped.count_nonzero()) == count:
            return dropped.logical_not_()
    kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    kept[scores.topk(count, largest=False).indices] = False
    return kept


def ranks(values: Tensor) -> Tensor:
    """The rank of each value along the last axis, 0 for the lowest; equal ones from the first."""
    return values.argsort(dim=-1, stable=True).argsort(dim=-1)


def like(array: Any, other: Tensor) -> Tensor:
    """An array as a tensor where another is."""
    import torch

    return torch.as_tensor(array, device=other.device)


def numbers(tensor: Any) -> Any:
    """An array of NumPy with the same content."""
    return tensor.cpu().clone().numpy() if hasattr(tensor, "cpu") else tensor


def stored(array: Any) -> Tensor:
    """A copy to be written into later."""
    import torch

    with torch.inference_mode(False):
        return torch.as_tensor(array).clone(memory_format=torch.contiguous_format)
