"""What ONNX' operators cost that have no word in the vocabulary, or other inputs than the word's."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import convolution, no_cost, transposed_convolution, visits

_FREE = """
    BlackmanWindow CenterCropPad Col2Im Compress ConcatFromSequence Constant ConstantOfShape DepthToSpace
    DequantizeLinear DynamicQuantizeLinear EyeLike Gather GatherElements GatherND HammingWindow HannWindow If
    Loop Multinomial NonMaxSuppression Optional OptionalGetElement OptionalHasElement QuantizeLinear
    RandomNormal RandomNormalLike RandomUniform RandomUniformLike Resize ReverseSequence Scan Scatter
    ScatterElements ScatterND SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
    SequenceLength Shape Size SpaceToDepth SplitToSequence StringNormalizer TensorScatter Trilu
    Unique Upsample
""".split()
_ONE_STEP = """
    BitShift GlobalAveragePool GlobalLpPool GlobalMaxPool Hardmax MaxUnpool ReduceL1 ReduceL2 ReduceLogSum
    ReduceMax ReduceMin ReduceSumSquare Shrink Swish ThresholdedRelu
""".split()


def product_and_sum(op: Shapes) -> Cost:
    """alpha A B + beta C, either factor transposed."""
    left = op.inputs[0]
    depth = left[0] if op.attributes.get("transA") else left[-1]
    has_bias = len(op.inputs) > 2 and op.inputs[2] is not None
    return Cost.of_macs(prod(op.out) * depth, prod(op.out) if has_bias else 0)


def attention_layer(op: Shapes) -> Cost:
    """com.microsoft's Attention: x (batch, length, in) by weights (in, 3 width), then attention."""
    (batch, length, _), (depth, projected) = op.inputs[:2]
    width = op.out[-1]
    return Cost.of_macs(batch * length * (depth * projected + 2 * length * width))


def grouped_attention(op: Shapes) -> Cost:
    """com.microsoft's GroupQueryAttention: each query (batch, length, width) by all keys that are held."""
    query, present = op.inputs[0], op.outputs[1] if len(op.outputs) > 1 else None
    held = present[-2] if present else query[-2]
    return Cost.of_macs(2 * prod(op.out) * held)


def quantised_product(op: Shapes) -> Cost:
    """The product of the first input and a weight, with its scale and zero point between or behind."""
    return Cost.of_macs(prod(op.out) * op.inputs[0][-1])


def quantised_convolution(op: Shapes) -> Cost:
    """The convolution of the first input and the fourth; scales and zero points lie between."""
    return convolution(replace(op, weight=3))


def recurrent(op: Shapes) -> Cost:
    """Every step multiplies the input and the state by the two weights."""
    return Cost.of_macs(prod(op.inputs[0][:-1]) * (prod(op.inputs[1]) + prod(op.inputs[2])))


def pooling(op: Shapes) -> Cost:
    """Every output element visits its window."""
    return Cost(0, prod(op.out) * prod(op.attributes.get("kernel_shape", ())))


_QUANTISED = ("MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulBnb4")

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FREE, no_cost),
    **dict.fromkeys(_ONE_STEP, visits(1)),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), pooling),
    "Gemm": product_and_sum, "QLinearMatMul": quantised_product,
    **dict.fromkeys(_QUANTISED, quantised_product),
    "FusedGemm": product_and_sum, "Attention": attention_layer, "GroupQueryAttention": grouped_attention,
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger"), convolution),
    "QLinearConv": quantised_convolution, "ConvTranspose": transposed_convolution,
    "LSTM": recurrent, "GRU": recurrent, "RNN": recurrent,
    "ReduceLogSumExp": visits(4), "MeanVarianceNormalization": visits(7), "LRN": visits(5),
}  # fmt: skip
"""Formulas by ONNX' types."""

MOVES = frozenset(_FREE)
"""Types of operators that compute nothing."""

COPIES = MOVES - frozenset(
    "Constant If Loop Optional OptionalGetElement OptionalHasElement Scan SequenceAt SequenceConstruct "
    "SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Size".split()
)
"""Types of those that write their result into other memory."""
