"""What autoray has no word for, in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def parameter(array: NDArray[Any], like: Tensor) -> Tensor:
    """A trainable tensor where `like` is; of half precision it would not train."""
    import torch

    dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float32
    with torch.inference_mode(False):
        return torch.nn.Parameter(torch.as_tensor(array).to(like.device, dtype))


def tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    """An array in the type of `like`, where it is."""
    import torch

    return torch.as_tensor(array).to(like.device, like.dtype)


def stop(value: Tensor) -> Tensor:
    """The value, through which no gradient goes."""
    return value.detach()


def sigmoid(value: Tensor) -> Tensor:
    """The logistic function."""
    return value.sigmoid()


def winners(values: Tensor, count: int) -> Tensor:
    """0/1 mask of the largest along the last axis; of equal ones the first."""
    import torch

    values = values.detach()
    order = values.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(values).scatter_(-1, order[..., :count], 1.0)
