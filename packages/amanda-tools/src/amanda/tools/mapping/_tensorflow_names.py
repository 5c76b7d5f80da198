"""TensorFlow's types of operations beside the words of the vocabulary."""

from __future__ import annotations

_SAME = {
    "add": "Add AddV2 AssignAddVariableOp AssignAdd",
    "sub": "Sub AssignSubVariableOp AssignSub",
    "mul": "Mul MulNoNan",
    "div": "Div RealDiv DivNoNan",
    "floor_divide": "FloorDiv",
    "remainder": "FloorMod",
    "amax": "Max",
    "amin": "Min",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "batch_norm": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    "bitwise_and": "BitwiseAnd LogicalAnd",
    "bitwise_not": "Invert LogicalNot",
    "bitwise_or": "BitwiseOr LogicalOr",
    "cat": "Concat ConcatV2",
    "clamp": "ClipByValue",
    "conv2d": "Conv2D",
    "conv3d": "Conv3D",
    "conv_transpose2d": "Conv2DBackpropInput",
    "conv_transpose3d": "Conv3DBackpropInput Conv3DBackpropInputV2",
    "cross_entropy": "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
    "depthwise_conv2d": "DepthwiseConv2dNative",
    "eq": "Equal",
    "ge": "GreaterEqual",
    "getitem": "StridedSlice Slice",
    "gt": "Greater",
    "le": "LessEqual",
    "leaky_relu": "LeakyRelu",
    "log_softmax": "LogSoftmax",
    "lt": "Less",
    "matmul": "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    "max_pool2d": "MaxPool MaxPoolV2 MaxPoolWithArgmax",
    "max_pool3d": "MaxPool3D",
    "avg_pool2d": "AvgPool",
    "avg_pool3d": "AvgPool3D",
    "ne": "NotEqual",
    "permute": "Transpose",
    "setitem": "ResourceStridedSliceAssign",
    "squeeze": "Squeeze",
    "stack": "Pack",
    "to": "Cast",
    "unbind": "Unpack",
    "unsqueeze": "ExpandDims",
    "where": "Select SelectV2",
}

_LOWERED = (
    "Abs Acos Acosh Asin Asinh Atan Atan2 Atanh Ceil Cos Cosh Einsum Elu Erf Erfc Exp Expm1 Floor Lgamma "
    "Log Log1p Maximum Mean Minimum Neg Pow Prod Reciprocal Relu Relu6 Reshape Round Rsqrt Selu Sigmoid Sign "
    "Sin Sinh Softmax Softplus Softsign Split Sqrt Square Sum Tan Tanh Tile"
)

WORDS = {name: word for word, names in _SAME.items() for name in names.split()} | {
    name: name.lower() for name in _LOWERED.split()
}
"""TensorFlow's type of an operation to the vocabulary's word, where there is one."""

IN_PLACE = frozenset({
    "AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "Assign", "AssignAdd", "AssignSub",
    "ResourceStridedSliceAssign",
})  # fmt: skip
"""Types that write their result into the variable that is their first input."""

READS = frozenset({"ReadVariableOp", "VariableV2", "Variable"})
"""Types that give what a variable holds."""

PASSES = frozenset({"Identity", "Cast", "ReadVariableOp", "Enter", "Switch", "Reshape", "Transpose"})
"""Types that give all of their first input, in another form maybe."""
