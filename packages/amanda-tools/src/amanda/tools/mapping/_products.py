"""Products: the ops that multiply tensors and add up, in one table for every framework and every tool."""

from __future__ import annotations

from collections.abc import Mapping
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

_BY_NAME: Mapping[str, Product] = {
    # TensorFlow gives the extents of the result first, ONNX scale and zero point behind each factor.
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInput", "Conv3DBackpropInputV2"), Product((2, 1), weight=1)
    ),
    "QLinearConv": Product((0, 3), weight=3, bias=8), "QLinearMatMul": Product((0, 3), weight=3),
}  # fmt: skip
"""Products whose framework has other positions, by the framework's name of the op."""


def are_transposed(attributes: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return for the first and the second factor of a matrix product whether the op transposes it.

    attributes: of the op, under the names of any framework.
    """
    left, right = (("transA", "transpose_a", "adj_x"), ("transB", "transpose_b", "adj_y"))
    return any(map(attributes.get, left)), any(map(attributes.get, right))


def product_of(context: OpContext) -> Product | None:
    """Return the roles of the inputs of an op; None of an op that is no product.

    context: with the `type` that StandardMapping writes.
    """
    return _BY_NAME.get(context.get_op_type()) or PRODUCTS.get(context["type"])
