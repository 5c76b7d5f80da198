"""Products and the axes of their weights, in one table for every framework and every tool."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from amanda import OpContext


class Product(NamedTuple):
    """The roles of the inputs of a product, by their positions.

    factors: inputs that are multiplied, the data ahead of a weight; empty where all tensors are factors.
    weight: the factor that the op's schema calls the weight; None where any factor may be a parameter.
    bias: the input that is added; None of an op without one.
    """

    factors: tuple[int, ...]
    weight: int | None = None
    bias: int | None = None


_WITH_SUM = Product((1, 2), bias=0)
_LAYER = Product((0, 1), weight=1, bias=2)

MATRIX_PRODUCTS: Mapping[str, Product] = {
    "linear": _LAYER, "matmul": Product((0, 1)),
    "addmm": _WITH_SUM, "addmv": _WITH_SUM, "baddbmm": _WITH_SUM, "addbmm": _WITH_SUM,
}  # fmt: skip
"""Products of two matrices, of batches of matrices, or of vectors, by the word of the op."""

CONVOLUTIONS: Mapping[str, Product] = dict.fromkeys(
    ("conv1d", "conv2d", "conv3d", "depthwise_conv2d", "depthwise_conv3d"), _LAYER
)
"""Convolutions, without the transposed ones, by the word of the op."""

TRANSPOSED_CONVOLUTIONS: Mapping[str, Product] = dict.fromkeys(
    ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _LAYER
)
"""Transposed convolutions by the word of the op."""

PRODUCTS: Mapping[str, Product] = {
    **MATRIX_PRODUCTS, **CONVOLUTIONS, **TRANSPOSED_CONVOLUTIONS, "conv_tbc": _LAYER,
    "bilinear": Product((0, 1, 2), weight=2, bias=3), "trilinear": Product((0, 1, 2)),
    "einsum": Product(()), "grouped_mm": Product((0, 1), bias=3),
    "scaled_dot_product_attention": Product((0, 1, 2)),
}  # fmt: skip
"""Products by the word of the op; a layer of several products, such as an LSTM, is in `SEVERAL_WEIGHTS`."""

SEVERAL_WEIGHTS = frozenset(
    {"rnn_tanh", "rnn_relu", "lstm", "gru", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3",
     "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_grouped_mm", "grouped_mm"}
)  # fmt: skip
"""Types of ops that multiply by several weights each."""

# Products whose framework has other positions, by the framework's name of the op.
_PRODUCTS_BY_OP_NAME: Mapping[str, Product] = {
    # TensorFlow gives the extents of the result first, ONNX scale and zero point behind each factor.
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInput", "Conv3DBackpropInputV2"), Product((2, 1), weight=1)
    ),
    "QLinearConv": Product((0, 3), weight=3, bias=8), "QLinearMatMul": Product((0, 3), weight=3),
}  # fmt: skip


def are_transposed(attributes: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a product transposes its first and second factor, by attributes of any framework."""
    first, second = (("transA", "transpose_a", "adj_x"), ("transB", "transpose_b", "adj_y"))
    return any(map(attributes.get, first)), any(map(attributes.get, second))


def product_of(context: OpContext) -> Product | None:
    """Return the roles of the inputs of an op, by StandardMapping's `type`; None if it is no product."""
    # The framework's name first: one word may have other positions in another framework.
    return _PRODUCTS_BY_OP_NAME.get(context.get_forward_op_type()) or PRODUCTS.get(context["type"])


def parameter_factor(kind: str, is_parameter: Callable[[int], bool]) -> int | None:
    """Return the position of the one factor of a matrix product that is a parameter; None of 0 or several."""
    factors = [i for i in MATRIX_PRODUCTS[kind].factors if is_parameter(i)]
    return factors[0] if len(factors) == 1 else None


_CONVOLUTION = re.compile(r"(conv_transpose|depthwise_conv|conv)([123])d")
_WINDOW_AXES = {"1": "W", "2": "HW", "3": "DHW"}
_CHANNEL_AXES = {"conv": "OI", "conv_transpose": "IO", "depthwise_conv": "IM"}
# TensorFlow's order, behind the axes of the window.
_CHANNEL_AXES_IN_TENSORFLOW = {"conv": "IO", "conv_transpose": "OI", "depthwise_conv": "IM"}
_GROUP_ATTRIBUTES = ("groups", "group", "feature_group_count")


# A str, so that tools that know nothing of groups compare it with plain letters.
class WeightLayout(str):
    """Axes of a transposed convolution's weight in groups, as letters: I of all groups, M outputs of each."""

    groups: int

    def __new__(cls, axes: str, groups: int) -> WeightLayout:
        layout = super().__new__(cls, axes)
        layout.groups = groups
        return layout

    def __reduce__(self) -> Any:
        return WeightLayout, (str(self), self.groups)


def write_weight_axes(context: OpContext) -> None:
    """Write `weight_groups` and `weight_layout`, each unless the framework's rule has written it."""
    if "weight_index" not in context:  # a rule that writes some of the keys alone
        return
    if "weight_groups" in context and "weight_layout" in context:  # at an earlier point of the op
        return
    index = context["weight_index"]
    is_convolution = index is not None and convolution_axes(context["type"]) is not None
    if "weight_groups" not in context:
        names = _GROUP_ATTRIBUTES if is_convolution else ()
        group_counts = (context.get_attrs().get(name) for name in names)
        context["weight_groups"] = next((int(count) for count in group_counts if count), 1)
    if "weight_layout" not in context:
        if is_convolution:
            context["weight_layout"] = convolution_axes(context["type"], context["weight_groups"])
        else:
            context["weight_layout"] = None if index is None else _product_axes(context, index)


@lru_cache(maxsize=1024)
def convolution_axes(kind: str, groups: int = 1, channels_last: bool = False) -> str | None:
    """Return the axes of a convolution's weight, such as "OIHW" or, channels last, "HWIO"; None of other ops.

    O are output channels of all groups, I input channels of one group.  Of a transposed convolution in
    groups, I are input channels of all groups, and M output channels of one.

    >>> convolution_axes("conv_transpose2d"), convolution_axes("conv_transpose2d", groups=3)
    ('IOHW', 'IMHW')
    """
    if kind == "conv_tbc":
        return "WIO"
    convolution = _CONVOLUTION.fullmatch(kind)
    if convolution is None:
        return None
    word, window_axes = convolution[1], _WINDOW_AXES[convolution[2]]
    is_transposed_in_groups = word == "conv_transpose" and groups > 1
    channel_axes = (_CHANNEL_AXES_IN_TENSORFLOW if channels_last else _CHANNEL_AXES)[word]
    if is_transposed_in_groups:
        channel_axes = channel_axes.replace("O", "M")
    axes = window_axes + channel_axes if channels_last else channel_axes + window_axes
    return WeightLayout(axes, groups) if is_transposed_in_groups else axes


def _product_axes(context: OpContext, index: int) -> str | None:
    """Return "OI" or "IO" for a weight that is a factor of a matrix product; None of other ranks and ops."""
    kind, extents = context["type"], context["shape"](context.get_inputs()[index])
    # Only ONNX' Gemm says by an attribute whether a linear layer transposes.
    if kind == "linear" and context.get_forward_op_type() != "Gemm":
        return "OI"
    if kind not in MATRIX_PRODUCTS or (kind != "linear" and (extents is None or len(extents) != 2)):
        return None
    # A factor on the right has inputs first, unless it is transposed; one on the left the reverse.
    side = MATRIX_PRODUCTS[kind].factors.index(index)  # 0 left, 1 right
    is_transposed, is_right = are_transposed(context.get_attrs())[side], side == 1
    return "OI" if is_transposed == is_right else "IO"


def spatial_axes(layout: str) -> list[int]:
    """Return the positions of the axes of a layout that are neither batch nor channels."""
    return [i for i, axis in enumerate(layout) if axis not in "NC"]
