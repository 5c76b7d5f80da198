"""Costs of ATen's products that have no word in the vocabulary, and of the kernels behind those that have."""

from __future__ import annotations

from math import prod

from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import attention, convolution, transposed_convolution, visits


def product_of(left: int, right: int) -> Formula:
    """(..., n, k) by (..., k, m), at these positions; a sparse factor counts as a dense one."""

    def formula(op: Shapes) -> Cost:
        last = op.inputs[right]
        return Cost.of_macs(prod(op.inputs[left]) * (last[-1] if len(last) > 1 else 1))

    return formula


def by_packed_weight(op: Shapes) -> Cost:
    """x (..., in) by a weight that is stored in a form of its own, and gives (..., out)."""
    return Cost.of_macs(prod(op.out) * op.inputs[0][-1])


def grouped_product(op: Shapes) -> Cost:
    """Rows of (n, k), or columns of (k, m), each by the matrix of their group; or their groups in depth."""
    left, right = op.inputs[:2]
    rows = prod(left) if len(left) <= len(right) or len(right) == 3 else prod(left[1:])
    return Cost.of_macs(rows * right[-1])


def products_of_lists(op: Shapes) -> Cost:
    """Each matrix of one list by that of the other."""
    pairs = zip(op.inputs[0], op.inputs[1], strict=True)
    return Cost.of_macs(sum(prod(left) * right[-1] for left, right in pairs))


def outer_product(op: Shapes) -> Cost:
    """Each element is that of a matrix and a product."""
    return Cost.of_macs(prod(op.out))


def convolution_in_time(op: Shapes) -> Cost:
    """Every output element (time, batch, out) sums over the kernel (width, in, out)."""
    return Cost.of_macs(prod(op.out) * prod(op.inputs[1][:2]), prod(op.out))


def any_convolution(op: Shapes) -> Cost:
    """`convolution`, whose argument says whether it is transposed."""
    return (transposed_convolution if op.attributes.get("transposed") else convolution)(op)


def convolution_backward(op: Shapes) -> Cost:
    """The gradients of data and kernel that are asked for, each as much as the convolution."""
    grad, data, weight = op.inputs[:3]
    transposed = op.attributes.get("transposed")
    macs = prod(data if transposed else grad) * prod(weight) // weight[0]
    return Cost.of_macs(macs * sum(map(bool, op.attributes["output_mask"][:2])))


def attention_backward(op: Shapes) -> Cost:
    """The scores once more, then the gradients of values, scores, queries and keys."""
    q, k, v = op.inputs[1:4]
    scores = prod(q[:-1]) * k[-2]
    return Cost.of_macs(scores * (3 * q[-1] + 2 * v[-1]), 6 * scores)


def recurrent_layer(op: Shapes) -> Cost:
    """One layer of oneDNN: every step multiplies the input and the state by the two weights."""
    return Cost.of_macs(prod(op.inputs[0][:-1]) * (prod(op.inputs[1]) + prod(op.inputs[2])))


def distances(op: Shapes) -> Cost:
    """Differences of each pair of rows (..., d), their powers and sums."""
    return Cost(0, 3 * prod(op.out) * op.inputs[0][-1])


def distances_by_product(op: Shapes) -> Cost:
    """Rows with two more elements, for the norms, by those of the other side."""
    return Cost.of_macs(prod(op.out) * (op.inputs[0][-1] + 2), prod(op.out))


def trilinear(op: Shapes) -> Cost:
    """Every element of the product of three tensors, each with new axes of extent 1."""
    operands = [list(shape) for shape in op.inputs[:3]]
    for shape, axes in zip(operands, [op.attributes[f"expand{i}"] for i in (1, 2, 3)], strict=True):
        for axis in sorted(axes):
            shape.insert(axis, 1)
    return Cost.of_macs(prod(map(max, *operands)))


_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                 "attention_math", "fused_attention_overrideable")
]  # fmt: skip
_BY_POSITION = {
    "_int_mm": (0, 1), "_scaled_mm": (0, 1), "_scaled_mm_v2": (0, 1), "_sparse_mm": (0, 1), "hspmm": (0, 1),
    "_sparse_sparse_matmul": (0, 1), "_sparse_semi_structured_mm": (0, 2), "_cslt_sparse_mm": (0, 1),
    "addbmm": (1, 2), "_sparse_addmm": (1, 2), "sspaddmm": (1, 2), "sparse_sampled_addmm": (1, 2),
    "_addmm_activation": (1, 2), "_sparse_semi_structured_addmm": (1, 3), "vdot": (0, 1),
}  # fmt: skip
_CONVOLUTIONS = (
    "_convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward thnn_conv2d slow_conv3d "
    "slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d cudnn_convolution cudnn_convolution_relu "
    "cudnn_convolution_add_relu miopen_convolution miopen_depthwise_convolution _conv_depthwise2d "
    "conv_depthwise3d _nnpack_spatial_convolution _mps_convolution convolution"
).split()
_TRANSPOSED = (
    "slow_conv_transpose2d slow_conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose "
    "_mps_convolution_transpose"
).split()
_PACKED = (
    "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _dyn_quant_matmul_4bit "
    "fbgemm_linear_int8_weight mkldnn_linear"
).split()

FORMULAS: dict[str, Formula] = {
    **{name: product_of(*factors) for name, factors in _BY_POSITION.items()},
    **dict.fromkeys(_PACKED, by_packed_weight),
    **dict.fromkeys(_CONVOLUTIONS, any_convolution),
    **dict.fromkeys(_TRANSPOSED, transposed_convolution),
    **dict.fromkeys(_ATTENTION, attention),
    **{f"{name}_backward": attention_backward for name in _ATTENTION},
    **dict.fromkeys(("grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), grouped_product),
    "_foreach_mm": products_of_lists, "addr": outer_product, "_trilinear": trilinear,
    "conv_tbc": convolution_in_time,
    "convolution_backward": convolution_backward, "mkldnn_rnn_layer": recurrent_layer,
    "_cdist_forward": distances, "_pdist_forward": distances, "_pdist_backward": visits(4),
    "pdist": distances, "_cdist_backward": visits(4), "_euclidean_dist": distances_by_product,
    "_thnn_fused_lstm_cell": visits(4), "_thnn_fused_gru_cell": visits(4),
}  # fmt: skip
"""Formulas by ATen's names."""
