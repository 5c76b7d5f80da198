"""Convolution and batch normalisation as one convolution, where running statistics are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda
from amanda.tools.rewrite._match import Match
from amanda.tools.rewrite._pattern import Capture, Maybe, Op, Rule


def fold_batch_norm() -> Sequence[Rule]:
    """The weight of the convolution takes the scale of each channel, its bias the shift.

    With W, b of the convolution and the statistics m, v: W' = W g / sqrt(v + eps) and
    b' = (b - m) g / sqrt(v + eps) + beta.  Source: Jacob et al. 2018, eq. 14.  Both are computed at every
    execution, so that they follow the parameters, whose gradients they have.
    """
    convolution = Op(_CONVOLUTIONS, name="convolution")
    norm = Op("batch_norm", convolution, name="norm")
    name = "fold_batch_norm"
    # Keras computes the normalisation by these two.
    sum_ = Maybe(Op(("add", "BiasAdd"), convolution, Capture("bias"), where=_is_per_channel))
    scaled = Op("mul", sum_, Capture("scale"), where=_is_per_channel)
    affine = Op("add", scaled, Capture("shift"), where=_is_per_channel)
    return Rule(norm, _folded, when=_infers, name=name), Rule(affine, _folded_affine, name=name)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "depthwise_conv2d")


def _infers(match: Match) -> bool:
    norm = match.ops["norm"]
    if norm.framework == "pytorch":
        *_, mean, variance, training, _, _, _ = norm.inputs
        return not training and mean is not None and variance is not None
    return not norm.attributes["is_training"]


def _folded(match: Match) -> Any:
    if match.framework == "pytorch":
        from amanda.tools.rewrite._folding_pytorch import folded
    else:
        from amanda.tools.rewrite._folding_tensorflow import folded
    return folded(match)


def _folded_affine(match: Match) -> Any:
    from amanda.tools.rewrite._folding_tensorflow import folded_affine

    return folded_affine(match)


def _is_per_channel(context: amanda.OpContext) -> bool:
    """Whether one of two inputs is a vector along the last axis, in which TensorFlow has channels."""
    if not context.namespace.matches("tensorflow"):
        return False
    if (context.get_attrs().get("data_format") or b"NHWC") not in (b"NHWC", "NHWC"):
        return False
    shapes = [context["shape"](value) for value in context.get_inputs()[:2]]
    return any(one is not None and len(one) == 1 for one in shapes)
