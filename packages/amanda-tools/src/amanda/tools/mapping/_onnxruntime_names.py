"""ONNX' types of operators beside the words of the vocabulary."""

from __future__ import annotations

_SAME = {
    "add_n": "Sum",
    "amax": "ReduceMax",
    "amin": "ReduceMin",
    "arange": "Range",
    "batch_norm": "BatchNormalization",
    "bitwise_and": "And BitwiseAnd",
    "bitwise_not": "Not BitwiseNot",
    "bitwise_or": "Or BitwiseOr",
    "bitwise_xor": "Xor BitwiseXor",
    "cat": "Concat",
    "clamp": "Clip",
    "eq": "Equal",
    "ge": "GreaterOrEqual",
    "gelu": "FastGelu BiasGelu QuickGelu",
    "getitem": "Slice",
    "group_norm": "GroupNormalization GroupNorm",
    "gt": "Greater",
    "hardsigmoid": "HardSigmoid",
    "hardswish": "HardSwish",
    "instance_norm": "InstanceNormalization",
    "layer_norm": "LayerNormalization SkipLayerNormalization",
    "le": "LessOrEqual",
    "leaky_relu": "LeakyRelu",
    "linear": "Gemm",
    "log_softmax": "LogSoftmax",
    "lt": "Less",
    "matmul": "MatMul FusedMatMul MatMulInteger QLinearMatMul",
    "maximum": "Max",
    "mean": "ReduceMean",
    "minimum": "Min",
    "one_hot": "OneHot",
    "permute": "Transpose",
    "prod": "ReduceProd",
    "remainder": "Mod",
    "reshape": "Reshape Flatten",
    "rms_norm": "RMSNormalization SimplifiedLayerNormalization SkipSimplifiedLayerNormalization",
    "rnn_tanh": "RNN",
    "scaled_dot_product_attention": "MultiHeadAttention",
    "sum": "ReduceSum",
    "to": "Cast CastLike",
}

_LOWERED = (
    "Abs Acos Acosh Add ArgMax ArgMin Asin Asinh Atan Atanh Ceil Celu Cos Cosh CumSum Div Dropout Einsum "
    "Elu Erf Exp Expand Floor GRU Gelu Identity IsInf IsNaN Log LSTM Mish Mul Neg NonZero PRelu Pad Pow "
    "Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softmax Softplus Softsign Split Sqrt Squeeze Sub "
    "Tan Tanh Tile TopK Unsqueeze Where"
)

WORDS = {name: word for word, names in _SAME.items() for name in names.split()} | {
    name: name.lower() for name in _LOWERED.split()
}
"""ONNX' type to the vocabulary's word, where there is one that does not depend on ranks."""

SPATIAL = {
    "Conv": "conv", "FusedConv": "conv", "ConvInteger": "conv", "QLinearConv": "conv",
    "ConvTranspose": "conv_transpose", "MaxPool": "max_pool", "AveragePool": "avg_pool", "LpPool": "lp_pool",
    "GlobalAveragePool": "adaptive_avg_pool", "GlobalMaxPool": "adaptive_max_pool",
}  # fmt: skip
"""The same of types whose word ends in the number of their spatial axes: "conv2d"."""
