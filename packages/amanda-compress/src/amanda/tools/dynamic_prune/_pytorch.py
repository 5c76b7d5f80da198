"""PyTorch's attention, with pruned probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def attend(
    prune: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    run: dict[Any, Any] | None,
    recomputed: bool,
) -> Any:
    """Return `scaled_dot_product_attention` with probabilities that `prune` changes.

    run, recomputed: of the routine, which `prune` is given too.
    """
    import torch
    from torch.nn import functional

    if query.shape[-2] != key.shape[-2] or query.dim() not in (3, 4):
        return NotImplemented
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        kept = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if kept else scores + attn_mask
    blind = scores.isneginf().all(-1, keepdim=True)
    probabilities = scores.softmax(-1).masked_fill(blind, 0.0)
    return functional.dropout(prune(probabilities, run=run, recomputed=recomputed), dropout_p) @ value


ATTENTIONS = {"torch": attend}
"""Functions for attention with pruned probabilities, by the library of the tensors."""
