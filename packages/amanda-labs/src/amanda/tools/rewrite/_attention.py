"""Fusion of attention in single ops into PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.tools.rewrite._match import Match
from amanda.tools.rewrite._pattern import Capture, Maybe, Op, Rule


def fuse_attention() -> Sequence[Rule]:
    """Return the rule that replaces softmax(q k^T scale + mask) v, with dropout, by one fused call.

    Active dropout drops other elements than the original, as many on average.
    """
    name = "fuse_attention"
    scores = Op("matmul", Capture("query"), Capture("key"), where=lambda context: name in context["rewrites"])
    scaled = Maybe(Op(("mul", "div"), scores, Capture("scale"), name="scaling"))
    masked = Maybe(Op("add", scaled, Capture("mask"), name="masking"))
    weights = Op("softmax", masked, Capture("dim"), name="softmax")
    cast = Maybe(Op(("to", "type"), weights, name="cast"))
    dropped = Maybe(Op("dropout", cast, name="dropout"))
    fused = Op("matmul", dropped, Capture("value"))
    return (Rule(fused, attention, when=is_attention, name=name),)


def is_attention(match: Match) -> bool:
    """Return True if the fused call takes these shapes, axis and constants."""
    query, key, value, mask = (match.get(name) for name in ("query", "key", "value", "mask"))
    if min(query.dim(), key.dim(), value.dim()) < 3 or match["dim"] not in (-1, query.dim() - 1):
        return False
    if query.dtype != value.dtype or not query.is_floating_point():
        return False
    if "masking" in match.ops and len(match.ops["masking"].inputs) > 2:  # alpha
        return False
    if "mask" in match and not _is_mask(mask, (*query.shape[:-1], key.shape[-1])):
        return False
    scale = match.get("scale", 1.0)
    return isinstance(scale, (int, float)) or (scale.numel() == 1 and not scale.requires_grad)


def _is_mask(mask: Any, shape: Sequence[int]) -> bool:
    """Return True if a tensor can be added to scores without broadcasting the scores."""
    sizes = getattr(mask, "shape", None)
    if sizes is None or len(sizes) > len(shape):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(sizes), reversed(shape), strict=False))


def attention(match: Match) -> Any:
    """Return the output of the fused call; the captured keys are transposed: (..., head, length)."""
    from torch.nn.functional import scaled_dot_product_attention

    query, mask = match["query"], match.get("mask")
    if mask is not None:
        mask = mask.to(query.dtype)
        mask = mask if mask.dim() > 1 else mask.reshape(1, -1)  # the kernels want two axes
    scale = float(match.get("scale", 1.0))
    if "scaling" in match.ops and match.ops["scaling"].type == "div":
        scale = 1 / scale
    dropout = 0.0
    if "dropout" in match.ops:
        _, p, training = match.ops["dropout"].inputs
        dropout = p if training else 0.0
    return scaled_dot_product_attention(
        query, match["key"].transpose(-2, -1), match["value"], dropout_p=dropout, scale=scale,
        attn_mask=mask,
    )  # fmt: skip
