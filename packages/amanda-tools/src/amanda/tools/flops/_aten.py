"""Costs of ATen's operators that have no word in the vocabulary, and of the kernels behind those that do."""

from __future__ import annotations

from math import prod

from amanda.tools.flops import _formulas as of
from amanda.tools.flops import _linalg, _words
from amanda.tools.flops._cost import Cost, Formula, Shapes, table
from amanda.tools.flops._formulas import no_cost, product_of, visits


def covariance(op: Shapes) -> Cost:
    """Count variables (v, n), less their means, by their transpose; one variable is a vector."""
    shape = op.inputs[0]
    variables, observations = shape if len(shape) == 2 else (1, prod(shape))
    return Cost.of_macs(variables**2 * observations, 3 * prod(shape))


def products_of_lists(op: Shapes) -> Cost:
    """Count each matrix of one list by that of the other."""
    pairs = zip(op.inputs[0], op.inputs[1], strict=True)
    return Cost.of_macs(sum(prod(left) * right[-1] for left, right in pairs))


def outer_product(op: Shapes) -> Cost:
    """Count for each element that of a matrix and a product."""
    return Cost.of_macs(prod(op.out))


def convolution_in_time(op: Shapes) -> Cost:
    """Count for every output element (time, batch, out) the kernel (width, in, out)."""
    return Cost.of_macs(prod(op.out) * prod(op.inputs[1][:2]), prod(op.out))


def any_convolution(op: Shapes) -> Cost:
    """Count a convolution, whose argument says whether it is transposed."""
    return (of.transposed_convolution if op.attributes.get("transposed") else of.convolution)(op)


def convolution_backward(op: Shapes) -> Cost:
    """Count the gradients of data and kernel that are asked for, each as much as the convolution."""
    grad, data, weight = op.inputs[:3]
    macs = prod(data if op.attributes.get("transposed") else grad) * prod(weight) // weight[0]
    return Cost.of_macs(macs * sum(map(bool, op.attributes["output_mask"][:2])))


def distances(op: Shapes) -> Cost:
    """Count differences of each pair of rows (..., d), their powers and sums."""
    return Cost(0, 3 * prod(op.out) * op.inputs[0][-1])


def distances_by_product(op: Shapes) -> Cost:
    """Count rows with two more elements, for the norms, by those of the other side."""
    return Cost.of_macs(prod(op.out) * (op.inputs[0][-1] + 2), prod(op.out))


def trilinear(op: Shapes) -> Cost:
    """Count every element of the product of three tensors, each with new axes of extent 1."""
    operands = [list(shape) for shape in op.inputs[:3]]
    for shape, axes in zip(operands, [op.attributes[f"expand{i}"] for i in (1, 2, 3)], strict=True):
        for axis in sorted(axes):
            shape.insert(axis, 1)
    return Cost.of_macs(prod(map(max, *operands)))


MOVES = frozenset(
    """
    _chunk_cat _conj _efficientzerotensor _linalg_check_errors _neg_view _reshape_copy _to_copy _to_sparse
    _unsafe_index _unsafe_index_put _unsafe_masked_index adjoint argsort argwhere as_strided_scatter
    atleast_1d atleast_2d atleast_3d block_diag bucketize cartesian_prod cauchy channel_shuffle col2im
    column_stack combinations complex conj conj_physical diag diag_embed diagflat diagonal_scatter dstack
    embedding_dense embedding_sparse empty_permuted empty_strided exponential eye feature_alpha_dropout
    fft_fftfreq fft_fftshift fft_ifftshift fft_rfftfreq from_numpy geometric hash_tensor histc hstack im2col
    imag is_nonzero isclose isneginf isposinf isreal kthvalue lift lift_fresh lift_fresh_copy linalg_diagonal
    log_normal logspace lu_unpack max_unpool1d max_unpool2d max_unpool3d median mode msort multinomial
    nanmedian native_channel_shuffle new_empty_strided nonzero_static normal_functional polar positive put
    random real reflection_pad3d replication_pad1d replication_pad3d resize_as resolve_conj resolve_neg rot90
    scalar_tensor searchsorted select_scatter set set_data slice_inverse slice_scatter sort sparse_coo_tensor
    sparse_compressed_tensor sparse_mask sum_to_size sym_size to_dense to_sparse tril_indices triu_indices
    unfold unique_consecutive unique_dim _unique2 unravel_index unsafe_chunk unsafe_split
    unsafe_split_with_sizes values view_as_complex view_as_real vstack
    """.split()
)
"""Names of operators that compute nothing."""

_ELEMENTWISE = {
    **dict.fromkeys(MOVES, no_cost),
    **table(
        (visits(1), """
            _embedding_bag _fused_rms_norm _segment_reduce _sparse_softmax
            _unsafe_masked_index_put_accumulate amax amin aminmax angle clamp_max clamp_min copysign ctc_loss
            _ctc_loss digamma dist embedding_bag fractional_max_pool2d fractional_max_pool3d frexp gcd
            hardshrink heaviside histogram histogramdd hypot index_reduce lcm ldexp lgamma logaddexp
            logaddexp2 logcumsumexp logit nansum nextafter norm_except_dim renorm scatter_reduce
            segment_reduce softshrink softsign special_i0 special_i1 std_mean sum trace
            _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors polygamma
        """),
        (visits(2), "rrelu_with_noise"),
        (visits(3), "_weight_norm_interface"),
        (visits(4), "huber_loss log_sigmoid log_sigmoid_forward multi_margin_loss multilabel_margin_loss"),
        (visits(4), "multilabel_margin_loss_forward smooth_l1_loss soft_margin_loss"),
        (visits(6), "binary_cross_entropy"),
        (visits(7), "_batch_norm_with_update"),
        (visits(8), "binary_cross_entropy_with_logits"),
    ),
}  # fmt: skip

ELEMENTWISE = _words.ELEMENTWISE | frozenset(_ELEMENTWISE)
"""Words and names of operators whose gradients cost as much for each element."""

_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                 "attention_math", "fused_attention_overrideable")
]  # fmt: skip

FORMULAS: dict[str, Formula] = {
    **_ELEMENTWISE,
    **_linalg.FORMULAS,
    **table(
        (product_of(0, 1), "_int_mm _scaled_mm _scaled_mm_v2 _sparse_mm hspmm _sparse_sparse_matmul vdot"),
        (product_of(0, 1), "_cslt_sparse_mm"), (product_of(0, 2), "_sparse_semi_structured_mm"),
        (product_of(1, 2), "addbmm _sparse_addmm sspaddmm sparse_sampled_addmm _addmm_activation"),
        (product_of(1, 3), "_sparse_semi_structured_addmm"),
        (of.by_weight, "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu mkldnn_linear"),
        (of.by_weight, "_dyn_quant_matmul_4bit fbgemm_linear_int8_weight"),
        (any_convolution, """
            _convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward thnn_conv2d
            slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d cudnn_convolution
            cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution convolution conv_depthwise3d
            miopen_depthwise_convolution _conv_depthwise2d _nnpack_spatial_convolution _mps_convolution
        """),
        (of.transposed_convolution, """
            slow_conv_transpose2d slow_conv_transpose3d cudnn_convolution_transpose
            miopen_convolution_transpose _mps_convolution_transpose
        """),
        (of.attention, " ".join(_ATTENTION)),
        (of.attention_backward, " ".join(f"{name}_backward" for name in _ATTENTION)),
        (of.grouped_product, "grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
        (products_of_lists, "_foreach_mm"), (outer_product, "addr"), (trilinear, "_trilinear"),
        (convolution_in_time, "conv_tbc"), (convolution_backward, "convolution_backward"),
        (of.recurrent_layer, "mkldnn_rnn_layer"), (covariance, "cov corrcoef"),
        (distances, "_cdist_forward _pdist_forward pdist"), (distances_by_product, "_euclidean_dist"),
        (visits(4), "_pdist_backward _cdist_backward _thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    ),
}  # fmt: skip
"""Formulas by ATen's names."""
