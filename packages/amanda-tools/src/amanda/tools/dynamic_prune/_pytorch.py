"""What autoray has no word for, in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor


def parameter(value: NDArray[Any] | Tensor, like: Tensor) -> Tensor:
    """A trainable tensor of its own where `like` is; of half precision it would not train."""
    import torch

    dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float32
    with torch.inference_mode(False):
        return torch.nn.Parameter(torch.as_tensor(value).detach().to(like.device, dtype, copy=True))


def renewed(former: Tensor, value: Tensor) -> Tensor:
    """A parameter with other values, or these where they lie elsewhere."""
    import torch

    if former.device != value.device or former.dtype != value.dtype:
        return value
    with torch.no_grad():
        return former.copy_(value)


def sigmoid(value: Tensor) -> Tensor:
    """The logistic function."""
    return value.sigmoid()


def winners(values: Tensor, count: int) -> Tensor:
    """0/1 mask of the largest along the last axis; of equal ones the first."""
    import torch

    values = values.detach()
    order = values.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(values).scatter_(-1, order[..., :count], 1.0)


def local(x: Tensor, kernel: Tensor, stride: tuple[int, int], layout: str) -> Tensor:
    """A convolution of 3x3 with a margin of one: (N, height, width).  kernel: (3, 3, C)."""
    from torch.nn import functional

    weight = kernel.permute(2, 0, 1)[None]
    return functional.conv2d(x, weight, stride=stride, padding=1)[:, 0]


def spread(mask: Tensor, kernel: list[list[float]], stride: tuple[int, int]) -> Tensor:
    """The sum of a kernel put at each position of (N, height, width)."""
    from torch.nn import functional

    weight = mask.new_tensor(kernel)[None, None]
    return functional.conv_transpose2d(mask[:, None], weight, stride=stride)[:, 0]


def padded(mask: Tensor, more: tuple[int, int]) -> Tensor:
    """With rows and columns of zeros behind."""
    from torch.nn import functional

    return functional.pad(mask, (0, more[1], 0, more[0]))


def attend(
    prune: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` whose probabilities, (N, H, T, S), go through `prune`."""
    import torch
    from torch.nn import functional

    if query.shape[-2] != key.shape[-2] or query.dim() not in (3, 4):
        return NotImplemented
    if query.dim() == 3:
        mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None]
        query, key, value = query[:, None], key[:, None], value[:, None]
        return attend(prune, query, key, value, mask, dropout_p, is_causal, scale)[:, 0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        kept = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if kept else scores + attn_mask
    blind = scores.isneginf().all(-1, keepdim=True)
    probabilities = scores.softmax(-1).masked_fill(blind, 0.0)
    return functional.dropout(prune(probabilities), dropout_p) @ value
