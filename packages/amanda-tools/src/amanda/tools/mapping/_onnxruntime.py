"""ONNX Runtime's part of StandardMapping: words, weights, layouts and accessors of the nodes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._products import MATRIX_PRODUCTS, parameter_factor, product_of

_NODE_TYPES_BY_WORD = {
    "add_n": "Sum", "amax": "ReduceMax", "amin": "ReduceMin", "arange": "Range",
    "batch_norm": "BatchNormalization", "bitwise_and": "And BitwiseAnd", "bitwise_not": "Not BitwiseNot",
    "bitwise_or": "Or BitwiseOr", "bitwise_xor": "Xor BitwiseXor", "cat": "Concat", "clamp": "Clip",
    "eq": "Equal", "ge": "GreaterOrEqual", "gelu": "FastGelu BiasGelu QuickGelu", "getitem": "Slice",
    "group_norm": "GroupNormalization GroupNorm", "gt": "Greater", "instance_norm": "InstanceNormalization",
    "layer_norm": "LayerNormalization SkipLayerNormalization", "le": "LessOrEqual", "leaky_relu": "LeakyRelu",
    "linear": "Gemm", "log_softmax": "LogSoftmax", "lt": "Less",
    "matmul": "MatMul FusedMatMul MatMulInteger QLinearMatMul", "maximum": "Max", "mean": "ReduceMean",
    "minimum": "Min", "one_hot": "OneHot", "permute": "Transpose", "prod": "ReduceProd", "remainder": "Mod",
    "reshape": "Reshape Flatten",
    "rms_norm": "RMSNormalization SimplifiedLayerNormalization SkipSimplifiedLayerNormalization",
    "rnn_tanh": "RNN", "scaled_dot_product_attention": "MultiHeadAttention", "sum": "ReduceSum",
    "to": "Cast CastLike",
}  # fmt: skip

_LOWERED = (
    "Abs Acos Acosh Add ArgMax ArgMin Asin Asinh Atan Atanh Ceil Celu Cos Cosh CumSum Div Dropout Einsum "
    "Elu Erf Exp Expand Floor GRU Gelu HardSigmoid HardSwish Identity IsInf IsNaN Log LSTM Mish Mul Neg "
    "NonZero PRelu Pad Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softmax Softplus Softsign Split "
    "Sqrt Squeeze Sub Tan Tanh Tile TopK Unsqueeze Where"
)

WORDS = {name: word for word, names in _NODE_TYPES_BY_WORD.items() for name in names.split()} | {
    name: name.lower() for name in _LOWERED.split()
}
"""ONNX' type to the vocabulary's word, where there is one that does not depend on ranks."""

# The same of types whose word ends in the number of their spatial axes: "conv2d".
SPATIAL_WORDS = {
    "Conv": "conv", "FusedConv": "conv", "ConvInteger": "conv", "QLinearConv": "conv",
    "ConvTranspose": "conv_transpose", "MaxPool": "max_pool", "AveragePool": "avg_pool", "LpPool": "lp_pool",
    "GlobalAveragePool": "adaptive_avg_pool", "GlobalMaxPool": "adaptive_max_pool",
}  # fmt: skip

_WINDOW_AXES = {1: "W", 2: "HW", 3: "DHW"}
_NORMS = ("batch_norm", "instance_norm", "group_norm")
# Where the weight is, by the type of a node or the word; of products the table of all frameworks tells.
_WEIGHT_INDEX_OF_LAYER = {
    "batch_norm": 1, "instance_norm": 1, "group_norm": 1, "layer_norm": 1, "rms_norm": 1, "prelu": 1,
    "embedding": 0, "SkipLayerNormalization": 2, "SkipSimplifiedLayerNormalization": 2,
}  # fmt: skip


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for a node, once; a node has no backward pass."""
    if "shape" in context:  # an earlier callback at this op wrote all keys
        return
    node_type, inputs = context.get_forward_op_type(), context.get_inputs()
    kind = context["type"] = _vocabulary_word(context, node_type, inputs)
    weight_index = _weight_index(context, kind, node_type, inputs)
    context["in_place"] = False
    context["phase"] = "forward"
    context["backward_type"] = context["weight_grad_index"] = None
    context["weight_index"] = weight_index
    context["layout"] = _layout(kind, node_type, shape(inputs[0]) if inputs else None)
    context["shape"] = shape
    context["dtype"] = dtype


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Return the extents of a tensor, None for one that is known as it runs; None of unknown rank."""
    extents = getattr(value, "shape", None)
    return None if extents is None else tuple(extents)


def dtype(value: Any) -> str | None:
    """Return the name of a tensor's element type; None for what has none."""
    element_type = getattr(value, "dtype", None)
    return None if element_type is None else str(element_type.name)


def _vocabulary_word(context: OpContext, node_type: str, inputs: Sequence[Any]) -> str:
    """Return the vocabulary's word for a node; its own type where there is none."""
    if node_type in SPATIAL_WORDS:
        # Axes beside batch and channels, by data or kernel, whichever has a known rank.
        ranks = [len(extents) for extents in map(shape, inputs[:2]) if extents is not None]
        axis_count = next((rank - 2 for rank in ranks if rank > 2), None)
        return node_type if axis_count is None else f"{SPATIAL_WORDS[node_type]}{axis_count}d"
    if node_type == "Gather" and _is_initializer(context, 0) and context.get_attrs().get("axis", 0) == 0:
        return "embedding"
    # ONNX' own Attention alone: that of com.microsoft multiplies by weights as well.
    if node_type == "Attention" and context.get_op().domain != "com.microsoft":
        return "scaled_dot_product_attention"
    if node_type == "Mean":
        return "add_n"
    return WORDS.get(node_type, node_type)


def _weight_index(context: OpContext, kind: str, node_type: str, inputs: Sequence[Any]) -> int | None:
    """Return the weight's position by the schema, or of the only factor that is an initializer; else None."""
    product = product_of(context)
    if product is None:
        index = _WEIGHT_INDEX_OF_LAYER.get(node_type, _WEIGHT_INDEX_OF_LAYER.get(kind))
    else:
        index = product.weight
    if index is None and kind in MATRIX_PRODUCTS:  # of which the schema names no weight
        return parameter_factor(kind, lambda i: _is_initializer(context, i))
    has_weight = index is not None and index < len(inputs) and shape(inputs[index]) is not None
    return index if has_weight else None


def _is_initializer(context: OpContext, index: int) -> bool:
    """Return True if an input is an initializer, or computed from one alone."""
    return index < len(context.get_inputs()) and context.get_variable(index) is not None


def _layout(kind: str, node_type: str, extents: Sequence[int | None] | None) -> str | None:
    """Return the axes of the data input, channels first as always in ONNX; None of other ops and ranks."""
    if extents is None or not (node_type in SPATIAL_WORDS or kind in _NORMS):
        return None
    return "NC" + _WINDOW_AXES.get(len(extents) - 2, "") if 2 <= len(extents) <= 5 else None
