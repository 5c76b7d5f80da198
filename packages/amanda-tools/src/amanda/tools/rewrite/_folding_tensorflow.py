"""The convolution that is a convolution and a normalisation in TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from amanda.tools.rewrite._match import Match, OpCall


def folded(match: Match) -> Any:
    """A convolution with the folded weight, and the other outputs of FusedBatchNorm."""
    norm = match.ops["norm"]
    _, gamma, beta, mean, variance = norm.inputs
    scale = gamma * tf.math.rsqrt(variance + norm.attributes["epsilon"])
    y = _convolved(match.ops["convolution"], scale, beta - mean * scale)
    reserved = (tf.zeros([0], mean.dtype),) if norm.name == "FusedBatchNormV3" else ()
    return y, mean, variance, mean, variance, *reserved


def folded_affine(match: Match) -> Any:
    """A convolution with the folded weight, of the two ops by which Keras normalises."""
    scale, shift = match["scale"], match["shift"]
    if "bias" in match:
        shift = shift + match["bias"] * scale
    return _convolved(match.ops["convolution"], scale, shift)


def _convolved(convolution: OpCall, scale: Any, shift: Any) -> Any:
    x, weight = convolution.inputs
    if convolution.type == "depthwise_conv2d":  # its weight has (height, width, in, out for each in)
        per_channel = tf.reshape(scale, weight.shape[2:])
    else:
        per_channel = scale
    y = convolution(x, weight * tf.cast(per_channel, weight.dtype))
    if convolution.attributes.get("data_format") in (b"NCHW", "NCHW"):
        return tf.nn.bias_add(y, tf.cast(shift, y.dtype), "NCHW")
    return y + tf.cast(shift, y.dtype)
