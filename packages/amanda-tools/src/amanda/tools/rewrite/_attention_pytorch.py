"""When attention that is written out is PyTorch's fused one, and the call of that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amanda.tools.rewrite._match import Match


def is_attention(match: Match) -> bool:
    """Whether shapes, axis and constants are those that the fused one has."""
    query, key, value, mask = (match.get(name) for name in ("query", "key", "value", "mask"))
    if min(query.dim(), key.dim(), value.dim()) < 3 or match["dim"] not in (-1, query.dim() - 1):
        return False
    if query.dtype != value.dtype or not query.is_floating_point():
        return False
    if "masking" in match.ops and len(match.ops["masking"].inputs) > 2:  # alpha
        return False
    if isinstance(mask, torch.Tensor):
        shape = (*query.shape[:-1], key.shape[-1])
        if mask.dim() > len(shape) or not _spreads_over(mask.shape, shape):
            return False
    elif mask is not None:
        return False
    scale = match.get("scale")
    return not isinstance(scale, torch.Tensor) or (scale.numel() == 1 and not scale.requires_grad)


def attention(match: Match) -> torch.Tensor:
    """The fused call. The keys were given transposed: (..., head, length)."""
    query, mask = match["query"], match.get("mask")
    scale = float(match.get("scale", 1.0))
    if "scaling" in match.ops and match.ops["scaling"].type == "div":
        scale = 1 / scale
    dropout = 0.0
    if "dropout" in match.ops:
        _, p, training = match.ops["dropout"].inputs
        dropout = p if training else 0.0
    return torch.nn.functional.scaled_dot_product_attention(
        query, match["key"].transpose(-2, -1), match["value"], dropout_p=dropout, scale=scale,
        attn_mask=None if mask is None else mask.to(query.dtype),
    )  # fmt: skip


def _spreads_over(mask: Sequence[int], shape: Sequence[int]) -> bool:
    return all(size in (1, whole) for size, whole in zip(reversed(mask), reversed(shape), strict=False))
