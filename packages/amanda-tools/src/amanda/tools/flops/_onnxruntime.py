"""Costs of ONNX' operators that have no word in the vocabulary, or other inputs than the word's."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from amanda.tools.flops import _formulas as of
from amanda.tools.flops._cost import Cost, Formula, Shapes, table
from amanda.tools.flops._formulas import no_cost, visits

COPIES = frozenset(
    """
    BlackmanWindow CenterCropPad Col2Im Compress ConcatFromSequence ConstantOfShape DepthToSpace
    DequantizeLinear DynamicQuantizeLinear EyeLike Gather GatherElements GatherND HammingWindow HannWindow
    Multinomial NonMaxSuppression QuantizeLinear RandomNormal RandomNormalLike RandomUniform
    RandomUniformLike Resize ReverseSequence Scatter ScatterElements ScatterND SpaceToDepth SplitToSequence
    StringNormalizer TensorScatter Trilu Unique Upsample
    """.split()
)
"""Types of operators that compute nothing and write their result into other memory."""

MOVES = COPIES | frozenset(
    "Constant If Loop Optional OptionalGetElement OptionalHasElement Scan SequenceAt SequenceConstruct "
    "SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Size".split()
)
"""Types of operators that compute nothing."""


def product_and_sum(op: Shapes) -> Cost:
    """Count alpha A B + beta C, either factor transposed."""
    left = op.inputs[0]
    depth = left[0] if op.attributes.get("transA") else left[-1]
    has_bias = len(op.inputs) > 2 and op.inputs[2] is not None
    return Cost.of_macs(prod(op.out) * depth, prod(op.out) if has_bias else 0)


def attention_layer(op: Shapes) -> Cost:
    """Count x (batch, length, in) by weights (in, 3 width), then attention."""
    (batch, length, _), (depth, projected) = op.inputs[:2]
    return Cost.of_macs(batch * length * (depth * projected + 2 * length * op.out[-1]))


def grouped_attention(op: Shapes) -> Cost:
    """Count each query (batch, length, width) by all keys that are held."""
    query, present = op.inputs[0], op.outputs[1] if len(op.outputs) > 1 else None
    return Cost.of_macs(2 * prod(op.out) * (present[-2] if present else query[-2]))


def quantised_convolution(op: Shapes) -> Cost:
    """Count the convolution of the first input and the fourth; scales and zero points lie between."""
    return of.convolution(replace(op, weight=3))


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(MOVES, no_cost),
    **table(
        (of.pooling, "MaxPool AveragePool LpPool"), (product_and_sum, "Gemm FusedGemm"),
        (of.by_weight, "QLinearMatMul MatMulNBits MatMulIntegerToFloat DynamicQuantizeMatMul MatMulBnb4"),
        (attention_layer, "Attention"), (grouped_attention, "GroupQueryAttention"),
        (of.convolution, "Conv FusedConv ConvInteger"), (quantised_convolution, "QLinearConv"),
        (of.transposed_convolution, "ConvTranspose"), (of.recurrent_layer, "LSTM GRU RNN"),
        (visits(1), """
            BitShift GlobalAveragePool GlobalLpPool GlobalMaxPool Hardmax MaxUnpool ReduceL1 ReduceL2
            ReduceLogSum ReduceMax ReduceMin ReduceSumSquare Shrink Swish ThresholdedRelu
        """),
        (visits(4), "ReduceLogSumExp"), (visits(5), "LRN"), (visits(7), "MeanVarianceNormalization"),
    ),
}  # fmt: skip
"""Formulas by ONNX' types."""
