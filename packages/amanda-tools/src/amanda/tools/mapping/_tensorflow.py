"""TensorFlow's part of StandardMapping; the types of operations are the same in every mode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._phases import in_construction
from amanda.tools.mapping._products import MATRIX_PRODUCTS, PRODUCTS, convolution_axes, parameter_factor

_TYPES_BY_WORD = {
    "add": "Add AddV2 AssignAddVariableOp AssignAdd", "sub": "Sub AssignSubVariableOp AssignSub",
    "mul": "Mul MulNoNan", "div": "Div RealDiv DivNoNan", "floor_divide": "FloorDiv", "remainder": "FloorMod",
    "amax": "Max", "amin": "Min", "batch_norm": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    "bitwise_and": "BitwiseAnd LogicalAnd", "bitwise_not": "Invert LogicalNot",
    "bitwise_or": "BitwiseOr LogicalOr", "cat": "Concat ConcatV2", "clamp": "ClipByValue",
    "conv_transpose2d": "Conv2DBackpropInput",
    "conv_transpose3d": "Conv3DBackpropInput Conv3DBackpropInputV2",
    "cross_entropy": "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
    "depthwise_conv2d": "DepthwiseConv2dNative", "eq": "Equal", "ge": "GreaterEqual",
    "getitem": "StridedSlice Slice", "gt": "Greater", "le": "LessEqual", "leaky_relu": "LeakyRelu",
    "log_softmax": "LogSoftmax", "lt": "Less", "matmul": "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    "max_pool2d": "MaxPool MaxPoolV2 MaxPoolWithArgmax", "max_pool3d": "MaxPool3D", "avg_pool2d": "AvgPool",
    "avg_pool3d": "AvgPool3D", "ne": "NotEqual", "permute": "Transpose",
    "setitem": "ResourceStridedSliceAssign", "stack": "Pack", "to": "Cast", "unbind": "Unpack",
    "unsqueeze": "ExpandDims", "where": "Select SelectV2",
}  # fmt: skip

_LOWERED = (
    "Abs Acos Acosh ArgMax ArgMin Asin Asinh Atan Atan2 Atanh Ceil Conv2D Conv3D Cos Cosh Einsum Elu Erf "
    "Erfc Exp Expm1 Floor Lgamma Log Log1p Maximum Mean Minimum Neg Pow Prod Reciprocal Relu Relu6 Reshape "
    "Round Rsqrt Selu Sigmoid Sign Sin Sinh Softmax Softplus Softsign Split Sqrt Square Squeeze Sum Tan Tanh "
    "Tile"
)

WORDS = {name: word for word, names in _TYPES_BY_WORD.items() for name in names.split()} | {
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

HANDLES = ("resource", "variant")
"""Element types of handles: of what variables, lists, iterators and optional values hold."""

PASSES = frozenset({"Identity", "Cast", "ReadVariableOp", "Enter", "Switch", "Reshape", "Transpose"})
"""Types that give all of their first input, in another form maybe."""

_OP_WITH_LAYOUT = re.compile(r"(?:conv_transpose|depthwise_conv|conv|max_pool|avg_pool)[23]d|batch_norm")


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op of TensorFlow; backward ops inherit those of their op."""
    if "shape" not in context:  # the first callback at the op
        # What initialises variables is called by a layer of Keras, or is a node of a graph with that scope.
        is_eager = context.namespace.matches("*/*/eager")
        makes_model = in_construction() if is_eager else "Initializer" in context.get_scope().split("/")
        context["phase"] = "construction" if makes_model else "forward"
        _describe_op(context)
    if context.is_forward():
        context["backward_type"] = context["weight_grad_index"] = None
        return
    context["phase"] = "backward"
    name = context.get_backward_op().__name__
    context["backward_type"] = backward_type(name, context["type"])
    context["weight_grad_index"] = _weight_grad_index(context, name)


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Return the extents of a tensor, None for an unknown one; None for one of unknown rank, or no tensor."""
    extents = getattr(value, "shape", None)
    if extents is None or getattr(extents, "rank", 0) is None:
        return None
    return tuple(extents)


def dtype(value: Any) -> str | None:
    """Return the name of a tensor's element type; None for what has none."""
    element_type = getattr(value, "dtype", None)
    return None if element_type is None else str(getattr(element_type, "name", element_type))


def _describe_op(context: OpContext) -> None:
    """Write the keys that a forward op and its backward ops share: type, weight, layouts, accessors."""
    name, inputs, attributes = context.get_forward_op_type(), context.get_inputs(), context.get_attrs()
    kind = WORDS.get(name, name)
    # Gather is an embedding only if it reads a table that is trained.
    if name in ("GatherV2", "Gather") and is_parameter(context, inputs, 0):
        kind = "embedding"
    weight = weight_index(context, kind, inputs)
    context["type"] = kind
    context["in_place"] = name in IN_PLACE
    context["weight_index"] = weight
    context["layout"] = layout(kind, attributes) if _OP_WITH_LAYOUT.fullmatch(kind) else None
    if weight is not None and convolution_axes(kind) is not None:
        context["weight_groups"] = groups = _group_count(kind, weight, inputs, attributes)
        context["weight_layout"] = convolution_axes(kind, groups, channels_last=True)
    # Functions, by which tools read a value of the op.
    context["shape"] = shape
    context["dtype"] = dtype


def layout(kind: str, attributes: dict[str, Any]) -> str:
    """Return the axes of the data of a convolution, pooling or normalisation, TensorFlow's default else."""
    axes = attributes.get("data_format") or ("NDHWC" if "3d" in kind else "NHWC")
    return axes.decode() if isinstance(axes, bytes) else str(axes)


def weight_index(context: OpContext, kind: str, inputs: Sequence[Any]) -> int | None:
    """Return where the weight is: by the schema, or a product's only factor from a variable; else None."""
    if kind in MATRIX_PRODUCTS:
        return parameter_factor(kind, lambda i: is_parameter(context, inputs, i))
    if kind in PRODUCTS:
        return PRODUCTS[kind].weight
    weight_index_of_layer = {"batch_norm": 1, "embedding": 0}
    return weight_index_of_layer.get(kind)


def is_parameter(context: OpContext, inputs: Sequence[Any], index: int) -> bool:
    """Return True if an input was read from a variable, also through a cast or a reshape."""
    if index in context.get_parameters():
        return True
    value = inputs[index]
    # Up to 8 producers back, since a loop of a graph leads through ops without end.
    for _ in range(8):
        try:
            producer = value.op
        except AttributeError:  # an eager tensor has none
            return False
        if producer.type in READS:
            return True
        if producer.type not in PASSES or not producer.inputs:
            return False
        value = producer.inputs[0]
    return False


def _group_count(kind: str, weight_index: int, inputs: Sequence[Any], attributes: dict[str, Any]) -> int:
    """Return the number of groups of a convolution, by the shapes of data and kernel; 1 where unknown."""
    kernel_extents = shape(inputs[weight_index])
    # The last axes of a kernel are (input channels, output channels), of a transposed one the reverse.
    kernel_channels = None if kernel_extents is None else kernel_extents[-2]
    if kind.startswith("depthwise"):  # each channel is a group
        return 1 if kernel_channels is None else kernel_channels
    # TensorFlow has no attribute of groups: the kernel has fewer channels than the data.
    extents = _result_extents(inputs[0]) if kind.startswith("conv_transpose") else shape(inputs[0])
    data_channels = None if extents is None else extents[layout(kind, attributes).index("C")]
    return max(data_channels // kernel_channels, 1) if data_channels and kernel_channels else 1


def _result_extents(sizes: Any) -> Sequence[int | None] | None:
    """Return the extents that the input `sizes` of a transposed convolution states, as far as known."""
    import tensorflow as tf

    extents = tf.get_static_value(sizes, partial=True)
    return None if extents is None else tuple(None if extent is None else int(extent) for extent in extents)


_GRADIENT_NAME = re.compile(r".*(?:Grad|Backprop)(?:V\d|Input|Filter|InputV\d|FilterV\d|WithArgmax)?(?:V\d)?")


def backward_type(name: str, kind: str) -> str:
    """Return the word for an operation in the gradient of an op of type `kind`.

    name: TensorFlow's type of the operation, e.g. "Sum".
    What computes the op's own gradient has the op's word, e.g. "conv2d_backward"; a part of it has the
    word of its own: "sum_backward" in the backward of add.  "accumulate_grad" adds gradients up.
    """
    # Gradients of a value with several readers are summed by AddN.
    if name == "AddN":
        return "accumulate_grad"
    word = kind if _GRADIENT_NAME.fullmatch(name) else WORDS.get(name, name)
    return f"{word}_backward"


def _weight_grad_index(context: OpContext, name: str) -> int | None:
    """Return which gradient of an operation is the weight's; None without one."""
    kind, weight_index = context["type"], context["weight_index"]
    if weight_index is None:
        return None
    if kind == "batch_norm":
        return 1 if name.startswith("FusedBatchNormGrad") else None
    if kind in MATRIX_PRODUCTS:
        is_product = WORDS.get(name) in MATRIX_PRODUCTS
        gives_weight_grad = is_product and _is_gradient_of_factor(context, weight_index)
    else:
        gives_weight_grad = "BackpropFilter" in name
    return 0 if gives_weight_grad else None  # these have one output


def _is_gradient_of_factor(context: OpContext, position: int) -> bool:
    """Return True if a product in the gradient of a product is the gradient of the factor at a position."""
    left_marks, right_marks = ("grad_a", "grad_x"), ("grad_b", "grad_y")  # of MatMul, BatchMatMul
    # Newer versions mark the products of a gradient; without the mark each may be the factor's.
    for name in (left_marks, right_marks)[position]:
        try:
            return bool(context.get_backward_op().get_attr(name))
        except (AttributeError, ValueError):
            continue
    return True
