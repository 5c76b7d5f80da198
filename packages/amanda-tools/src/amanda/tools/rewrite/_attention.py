"""Attention that is written out, as PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda
from amanda.tools.rewrite._match import Match
from amanda.tools.rewrite._pattern import Capture, Maybe, Op, Rule


def fuse_attention() -> Sequence[Rule]:
    """softmax(q k^T scale + mask) v, with dropout: one call of scaled_dot_product_attention.

    Where dropout is active other elements are dropped than by the original, as many on average.
    """
    scores = Op("matmul", Capture("query"), Capture("key"), where=_is_pytorch)
    scaled = Maybe(Op(("mul", "div"), scores, Capture("scale"), name="scaling"))
    masked = Maybe(Op("add", scaled, Capture("mask"), name="masking"))
    weights = Op("softmax", masked, Capture("dim"), name="softmax")
    cast = Maybe(Op(("to", "type"), weights, name="cast"))
    dropped = Maybe(Op("dropout", cast, name="dropout"))
    fused = Op("matmul", dropped, Capture("value"))
    return (Rule(fused, _attention, when=_is_attention, name="fuse_attention"),)


def _is_pytorch(context: amanda.OpContext) -> bool:
    return context.namespace.matches("pytorch")


def _is_attention(match: Match) -> bool:
    from amanda.tools.rewrite._attention_pytorch import is_attention

    return is_attention(match)


def _attention(match: Match) -> Any:
    from amanda.tools.rewrite._attention_pytorch import attention

    return attention(match)
