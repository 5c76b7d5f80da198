"""What ATen's other operators cost, by the eager names and by those of the kernels that they call."""

from __future__ import annotations

from math import prod

from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import no_cost, visits

_FREE = """
    _chunk_cat _conj _efficientzerotensor _linalg_check_errors _neg_view _reshape_copy _to_copy _to_sparse
    _unsafe_index _unsafe_index_put _unsafe_masked_index adjoint argsort argwhere as_strided_scatter
    atleast_1d atleast_2d atleast_3d block_diag bucketize cartesian_prod cauchy channel_shuffle col2im
    column_stack combinations complex conj conj_physical diag diag_embed diagflat diagonal_scatter dstack
    embedding_dense embedding_sparse empty_permuted empty_strided exponential eye feature_alpha_dropout
    fft_fftfreq fft_fftshift fft_ifftshift fft_rfftfreq from_numpy geometric
    hash_tensor histc hstack im2col imag
    is_nonzero isclose isneginf isposinf isreal kthvalue lift lift_fresh lift_fresh_copy linalg_diagonal
    log_normal logspace lu_unpack max_unpool1d max_unpool2d max_unpool3d median mode msort multinomial
    nanmedian native_channel_shuffle new_empty_strided nonzero_static normal_functional polar positive put
    random real reflection_pad3d replication_pad1d replication_pad3d resize_as resolve_conj resolve_neg
    rot90 scalar_tensor searchsorted select_scatter set set_data slice_inverse slice_scatter sort
    sparse_coo_tensor sparse_compressed_tensor sparse_mask sum_to_size sym_size to_dense to_sparse
    tril_indices triu_indices unfold unique_consecutive unique_dim _unique2 unravel_index unsafe_chunk
    unsafe_split unsafe_split_with_sizes values view_as_complex view_as_real vstack
""".split()
_ONE_STEP = """
    _embedding_bag _fused_rms_norm _segment_reduce _sparse_softmax _unsafe_masked_index_put_accumulate amax
    amin aminmax angle clamp_max clamp_min copysign ctc_loss _ctc_loss digamma dist embedding_bag
    fractional_max_pool2d fractional_max_pool3d frexp gcd hardshrink heaviside histogram histogramdd hypot
    index_reduce lcm ldexp lgamma logaddexp logaddexp2 logcumsumexp logit nansum nextafter norm_except_dim
    renorm scatter_reduce segment_reduce softshrink softsign special_i0 special_i1 std_mean sum trace
    _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors polygamma
""".split()
_STEPS = {
    "_batch_norm_with_update": 7, "binary_cross_entropy": 6,
    "binary_cross_entropy_with_logits": 8, "huber_loss": 4, "log_sigmoid": 4,
    "log_sigmoid_forward": 4, "multi_margin_loss": 4, "multilabel_margin_loss": 4, "rrelu_with_noise": 2,
    "multilabel_margin_loss_forward": 4, "smooth_l1_loss": 4, "soft_margin_loss": 4,
    "_weight_norm_interface": 3,
}  # fmt: skip


def covariance(op: Shapes) -> Cost:
    """Variables (v, n), less their means, by their transpose; one variable is a vector."""
    shape = op.inputs[0]
    variables, observations = shape if len(shape) == 2 else (1, prod(shape))
    return Cost.of_macs(variables**2 * observations, 3 * prod(shape))


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FREE, no_cost),
    **dict.fromkeys(_ONE_STEP, visits(1)),
    **{name: visits(steps) for name, steps in _STEPS.items()},
    "cov": covariance, "corrcoef": covariance,
}  # fmt: skip
"""Formulas by ATen's names."""

MOVES = frozenset(_FREE)
"""Names of operators that compute nothing."""

ELEMENTWISE = frozenset((*_FREE, *_ONE_STEP, *_STEPS))
"""Names of operators whose gradients cost as much for each element."""
