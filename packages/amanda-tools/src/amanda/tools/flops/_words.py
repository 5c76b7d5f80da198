"""Costs by the words of StandardMapping, and which words are elementwise, products or moves of data."""

from __future__ import annotations

from amanda.tools.flops import _formulas as of
from amanda.tools.flops._cost import Formula, table
from amanda.tools.flops._formulas import no_cost, visits

STAYS = frozenset(
    "alias detach empty empty_like identity item movedim new_empty pin_memory reshape squeeze unsqueeze "
    "variable view".split()
)
"""Words of ops that compute nothing and move nothing."""

MOVES = STAYS | frozenset(
    """
    allclose alpha_dropout arange as_strided bernoulli broadcast_tensors broadcast_to cat chunk clone
    constant_pad_nd contiguous copy diagonal dropout2d embedding equal expand expand_as feature_dropout fill
    flip full full_like gather getitem hsplit index index_add index_copy index_fill index_put index_select
    linspace masked_scatter masked_select meshgrid narrow new_full new_ones new_zeros nonzero normal numpy
    one_hot ones ones_like pad permute pixel_shuffle pixel_unshuffle rand rand_like randint randint_like
    randn randn_like randperm reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d
    resize roll scatter scatter_add select setitem slice split split_with_sizes stack take take_along_dim
    tensor tensor_split tile to tolist transpose tril triu type type_as unbind unfold uniform vsplit zero
    zeros zeros_like
    """.split()
)
"""Words of ops that compute nothing."""

_CONVOLUTIONS = "conv1d conv2d conv3d"
_TRANSPOSED = "conv_transpose1d conv_transpose2d conv_transpose3d"
_RECURRENT = "lstm gru rnn_tanh rnn_relu"

CONTRACTIONS = frozenset(
    "linear einsum matmul addmm addmv addbmm baddbmm bilinear trilinear grouped_mm depthwise_conv2d conv_tbc "
    f"{_CONVOLUTIONS} {_TRANSPOSED} {_RECURRENT}".split()
)
"""Words of ops each of whose gradients takes as many multiply-accumulates as the op itself."""

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(MOVES, no_cost),
    **table(
        (visits(1), """
            abs acos acosh add add_n all any argmax argmin asin asinh atan atan2 atanh bias_add bitwise_and
            bitwise_not bitwise_or bitwise_xor ceil clamp cos cosh count_nonzero cummax cummin cumprod cumsum
            div eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmod ge gt hardtanh isfinite isin isinf
            isnan le leaky_relu linalg_vector_norm log log10 log1p log2 logical_and logical_not logical_or
            logical_xor logsigmoid lt masked_fill max maximum mean min minimum mul nan_to_num ne neg nll_loss
            norm pow prelu prod reciprocal relu relu6 remainder round rrelu rsqrt rsub sign sin sinh sqrt
            square squared_difference sub sum tan tanh threshold topk trunc where adaptive_max_pool1d
            adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
            adaptive_avg_pool3d
        """),
        (visits(2), "addcmul addcdiv dropout"),
        (visits(3), "softplus sigmoid elu selu hardsigmoid lerp var mse_loss l1_loss"),
        (visits(4), "rms_norm silu hardswish std normalize glu logsumexp"),
        (visits(of.SOFTMAX), "softmax log_softmax"),
        (visits(6), "cross_entropy mish"),
        (visits(of.LAYER_NORM), "instance_norm layer_norm group_norm"),
        (visits(8), "gelu"),
        (of.batch_norm, "batch_norm"),
        (of.pooling, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
        (of.pooling, "lp_pool1d lp_pool2d lp_pool3d"),
        (of.convolution, _CONVOLUTIONS), (of.transposed_convolution, _TRANSPOSED),
        (of.depthwise_convolution, "depthwise_conv2d"),
        (of.linear, "linear"), (of.matrix_product, "matmul"),
        (of.matrix_product_and_sum, "addmm addmv baddbmm"), (of.bilinear, "bilinear"),
        (of.attention, "scaled_dot_product_attention"), (of.einsum, "einsum"), (of.recurrent, _RECURRENT),
    ),
}  # fmt: skip
"""Formula by the op's word."""

ELEMENTWISE = frozenset(FORMULAS) - CONTRACTIONS - {"scaled_dot_product_attention"}
"""Words of ops each of whose gradients takes one operation for each element, or none."""
