"""Attention of PyTorch whose probabilities are pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
