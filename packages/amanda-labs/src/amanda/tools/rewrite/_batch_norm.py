"""Folding of batch normalisation with running statistics into the convolution before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda
from amanda.tools.mapping import CONVOLUTIONS
from amanda.tools.rewrite._match import Match, OpCall
from amanda.tools.rewrite._pattern import Capture, Maybe, Op, Rule


def fold_batch_norm() -> Sequence[Rule]:
    """Return rules that fold the scale of each channel into a convolution's weight, the shift into its bias.

    With W, b of the convolution and the statistics m, v: W' = W g / sqrt(v + eps) and
    b' = (b - m) g / sqrt(v + eps) + beta.  Source: Jacob et al. 2018, eq. 14.  Both are computed at every
    execution, so that they follow the parameters and pass gradients to them.
    """
    name = "fold_batch_norm"
    convolution = Op(tuple(CONVOLUTIONS), name="convolution")
    norm = Op("batch_norm", convolution, name="norm", where=lambda context: name in context["rewrites"])
    # Keras normalises by a multiplication and an addition.
    sum_ = Maybe(Op(("add", "BiasAdd"), convolution, Capture("bias"), where=_is_per_channel))
    scaled = Op("mul", sum_, Capture("scale"), where=_is_per_channel)
    affine = Op("add", scaled, Capture("shift"), where=_is_per_channel)
    return Rule(norm, _folded, when=_infers, name=name), Rule(affine, _folded_affine, name=name)


def _infers(match: Match) -> bool:
    """Return True if the normalisation uses running statistics."""
    norm = match.ops["norm"]
    mean, variance = norm.inputs[3:5]
    training = norm.inputs[5] if len(norm.inputs) > 5 else norm.attributes["is_training"]
    return not training and mean is not None and variance is not None


def _folded(match: Match) -> Any:
    return match.ops["norm"].rewrites["fold_batch_norm"](match)


def folded_in_pytorch(match: Match) -> Any:
    """Return the convolution with the folded weight and bias."""
    import torch

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


def folded_in_tensorflow(match: Match) -> Any:
    """Return a convolution with the folded weight, and the other outputs of FusedBatchNorm."""
    import tensorflow as tf

    norm = match.ops["norm"]
    _, gamma, beta, mean, variance = norm.inputs
    scale = gamma * tf.math.rsqrt(variance + norm.attributes["epsilon"])
    y = _convolved(match.ops["convolution"], scale, beta - mean * scale)
    reserved = (tf.zeros([0], mean.dtype),) if norm.name == "FusedBatchNormV3" else ()
    return y, mean, variance, mean, variance, *reserved


def _folded_affine(match: Match) -> Any:
    """Return a convolution with the folded weight, for the multiplication and addition of Keras."""
    scale, shift = match["scale"], match["shift"]
    if "bias" in match:
        shift = shift + match["bias"] * scale
    return _convolved(match.ops["convolution"], scale, shift)


def _convolved(convolution: OpCall, scale: Any, shift: Any) -> Any:
    import tensorflow as tf

    x, weight = convolution.inputs
    if convolution.type == "depthwise_conv2d":  # its weight has (height, width, in, out for each in)
        scale = tf.reshape(scale, weight.shape[2:])
    y = convolution(x, weight * tf.cast(scale, weight.dtype))
    channels_first = convolution.attributes.get("data_format") in (b"NCHW", "NCHW")
    return tf.nn.bias_add(y, tf.cast(shift, y.dtype), "NCHW" if channels_first else "NHWC")


def _is_per_channel(context: amanda.OpContext) -> bool:
    """Return True if one of two inputs is a vector along the last axis, and that axis has the channels."""
    if not context["channels_last"]:
        return False
    shapes = [context["shape"](value) for value in context.get_inputs()[:2]]
    return any(one is not None and len(one) == 1 for one in shapes)
