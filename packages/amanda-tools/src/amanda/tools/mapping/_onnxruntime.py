"""ONNX Runtime's part of StandardMapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._products import MATRIX_PRODUCTS, parameter_factor, product_of

_SAME = {
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

_AXES = {1: "W", 2: "HW", 3: "DHW"}
_NORMS = ("batch_norm", "instance_norm", "group_norm")
# Where the weight is, by the type of a node or the word; of products the table of all frameworks tells.
_WEIGHT_AT = {
    "batch_norm": 1, "instance_norm": 1, "group_norm": 1, "layer_norm": 1, "rms_norm": 1, "prelu": 1,
    "embedding": 0, "SkipLayerNormalization": 2, "SkipSimplifiedLayerNormalization": 2,
}  # fmt: skip


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op of ONNX Runtime, which has no backward pass."""
    if "shape" in context:
        return
    name, inputs = context.get_forward_op_type(), context.get_inputs()
    kind = context["type"] = _op_word(context, name, inputs)
    weight = _weight_index(context, kind, name, inputs)
    context["in_place"] = False
    context["phase"] = "forward"
    context["backward_type"] = context["weight_grad_index"] = None
    context["weight_index"] = weight
    context["layout"] = _layout(kind, name, shape(inputs[0]) if inputs else None)
    context["shape"] = shape
    context["dtype"] = dtype


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Extents of a tensor, None for one that is known as it runs; None for one of unknown rank."""
    extents = getattr(value, "shape", None)
    return None if extents is None else tuple(extents)


def dtype(value: Any) -> str | None:
    """Name of a tensor's element type."""
    element_type = getattr(value, "dtype", None)
    return None if element_type is None else str(element_type.name)


def _op_word(context: OpContext, name: str, inputs: Sequence[Any]) -> str:
    """Return the vocabulary's word for a node; its own type where there is none."""
    if name in SPATIAL:
        # Axes beside batch and channels, by data or kernel, whichever has a known rank.
        ranks = [len(extents) for extents in map(shape, inputs[:2]) if extents is not None]
        axes = next((rank - 2 for rank in ranks if rank > 2), None)
        return name if axes is None else f"{SPATIAL[name]}{axes}d"
    if name == "Gather" and _is_initializer(context, 0) and context.get_attrs().get("axis", 0) == 0:
        return "embedding"
    if name == "Attention" and context.get_op().domain != "com.microsoft":
        return "scaled_dot_product_attention"
    if name == "Mean":
        return "add_n"
    return WORDS.get(name, name)


def _weight_index(context: OpContext, kind: str, name: str, inputs: Sequence[Any]) -> int | None:
    """Return where the weight is: by the schema, or a product's only factor in an initializer; else None."""
    product = product_of(context)
    index = _WEIGHT_AT.get(name, _WEIGHT_AT.get(kind)) if product is None else product.weight
    if index is None and kind in MATRIX_PRODUCTS:
        return parameter_factor(kind, lambda i: _is_initializer(context, i))
    return index if index is not None and index < len(inputs) and shape(inputs[index]) is not None else None


def _is_initializer(context: OpContext, index: int) -> bool:
    """Return True if an input is an initializer, or computed from one alone."""
    return index < len(context.get_inputs()) and context.get_variable(index) is not None


def _layout(kind: str, name: str, extents: Sequence[int | None] | None) -> str | None:
    """Axes of the data input, channels first as everywhere in ONNX; None of other ops and unknown ranks."""
    if extents is None or not (name in SPATIAL or kind in _NORMS):
        return None
    return "NC" + _AXES.get(len(extents) - 2, "") if 2 <= len(extents) <= 5 else None
