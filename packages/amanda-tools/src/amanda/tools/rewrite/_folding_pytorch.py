"""The convolution that is a convolution and a normalisation in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from amanda.tools.rewrite._match import Match


def folded(match: Match) -> Any:
    """The convolution with the folded weight and bias."""
    convolution, norm = match.ops["convolution"], match.ops["norm"]
    x, weight, *others = convolution.inputs
    bias, others = (others[0], others[1:]) if others else (None, [])
    _, gamma, beta, mean, variance, _, _, epsilon, _ = norm.inputs
    scale = torch.rsqrt(variance + epsilon)
    if gamma is not None:
        scale = scale * gamma
    shift = -mean * scale if bias is None else (bias - mean) * scale
    if beta is not None:
        shift = shift + beta
    per_channel = scale.reshape(-1, *[1] * (weight.dim() - 1))
    return convolution(x, (weight * per_channel).to(weight.dtype), shift.to(weight.dtype), *others)
