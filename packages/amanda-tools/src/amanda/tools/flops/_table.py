"""Costs by name: words of StandardMapping, and frameworks' own names of ops without a word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from amanda.tools.flops import _formulas as of
from amanda.tools.flops._cost import Extents, Formula, size, table
from amanda.tools.flops._formulas import no_cost, operations, product_at, products, visits
from amanda.tools.kit import leaves
from amanda.tools.mapping import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    itemsize,
    local,
    torch_word,
)

COPIES = frozenset("""
    adjoint allclose alpha_dropout arange argsort argwhere as_strided as_strided_scatter atleast_1d
    atleast_2d atleast_3d bernoulli block_diag broadcast_tensors broadcast_to bucketize cartesian_prod cat
    cauchy channel_shuffle chunk _chunk_cat clone col2im column_stack combinations complex _conj conj
    conj_physical constant_pad_nd contiguous copy diag diag_embed diagflat diagonal diagonal_scatter
    dropout2d dstack _efficientzerotensor embedding embedding_dense embedding_sparse empty_permuted
    empty_strided equal expand expand_as exponential eye feature_alpha_dropout feature_dropout fft_fftfreq
    fft_fftshift fft_ifftshift fft_rfftfreq fill flip from_numpy full full_like gather geometric getitem
    hash_tensor histc hsplit hstack im2col imag index index_add index_copy index_fill index_put index_select
    is_nonzero isclose isneginf isposinf isreal kthvalue lift lift_fresh lift_fresh_copy _linalg_check_errors
    linalg_diagonal linspace log_normal logspace lu_unpack masked_scatter masked_select max_unpool1d
    max_unpool2d max_unpool3d median meshgrid mode msort _nested_from_padded_tensor
    _nested_tensor_from_tensor_list nested_to_padded_tensor to_padded_tensor multinomial nanmedian narrow
    native_channel_shuffle _neg_view new_empty_strided new_full new_ones new_zeros nonzero nonzero_static
    normal normal_functional numpy one_hot ones ones_like pad permute pixel_shuffle pixel_unshuffle polar
    positive put rand rand_like randint randint_like randn randn_like random randperm real reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d _reshape_copy resize resize_as resolve_conj resolve_neg roll rot90 scalar_tensor scatter
    scatter_add searchsorted select select_scatter set set_data setitem slice slice_inverse slice_scatter sort
    sparse_compressed_tensor sparse_coo_tensor sparse_mask split split_with_sizes stack sum_to_size sym_size
    take take_along_dim tensor tensor_split tile to _to_copy to_dense _to_sparse to_sparse tolist transpose
    tril tril_indices triu triu_indices type type_as unbind unfold uniform _unique2 unique_consecutive
    unique_dim unravel_index unsafe_chunk _unsafe_index _unsafe_index_put _unsafe_masked_index unsafe_split
    unsafe_split_with_sizes values view_as_complex view_as_real vsplit vstack zero zeros zeros_like
    AssignVariableOp BatchToSpaceND BlackmanWindow BroadcastTo CenterCropPad Col2Im Compress
    ConcatFromSequence ConstantOfShape DeepCopy DepthToSpace DequantizeLinear DynamicPartition
    DynamicQuantizeLinear DynamicStitch EyeLike Fill Gather GatherElements GatherND GatherNd GatherV2
    HammingWindow HannWindow LinSpace MirrorPad Multinomial MultinomialV2 NonMaxSuppression OneHot OnesLike
    Pad PadV2 QuantizeLinear RandomNormal RandomNormalLike RandomStandardNormal RandomUniform
    RandomUniformInt RandomUniformLike Range Resize ResizeNearestNeighbor ResourceGather ReverseSequence
    ReverseV2 Roll Scatter ScatterElements ScatterND ScatterNd SpaceToBatchND SpaceToDepth SplitToSequence
    SplitV StatelessRandomNormalV2 StatelessRandomUniformV2 StringNormalizer TensorListStack TensorScatter
    TensorScatterUpdate Trilu TruncatedNormal Unique Upsample ZerosLike
    """.split())  # fmt: skip
"""Names of ops that compute nothing and write their result into other memory."""

MOVES = COPIES | frozenset("""
    alias detach empty empty_like identity item movedim new_empty pin_memory reshape squeeze unsqueeze
    variable view _nested_get_values _nested_view_from_buffer _nested_view_from_jagged
    AnonymousIteratorV3 Assert BroadcastArgs BroadcastGradientArgs Case ConcatOffset Const
    Constant ControlTrigger CropAndResize EmptyTensorList EnsureShape Enter Exit Identity IdentityN If
    InvertPermutation IteratorGetNext IteratorGetNextSync Loop LoopCond MakeIterator Merge NextIteration NoOp
    Optional OptionalFromValue OptionalGetElement OptionalGetValue OptionalHasElement OptionalHasValue
    OptionalNone PartitionedCall Placeholder PlaceholderWithDefault PreventGradient Rank ReadVariableOp
    RemoteCall Scan SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    Shape ShapeN Size Snapshot StatefulPartitionedCall StatelessIf StatelessRandomGetKeyCounter
    StatelessWhile StopGradient Switch TensorListFromTensor TensorListGetItem TensorListLength
    TensorListPopBack TensorListPushBack TensorListReserve TensorListSetItem VarHandleOp Variable VariableV2
    VarIsInitializedOp Where While
    """.split())  # fmt: skip
"""Names of ops that compute nothing."""

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

# Attention has gradients of another cost than its forward pass, and a formula of its own.
CONTRACTIONS = frozenset([*PRODUCTS, *_RECURRENT]) - {"scaled_dot_product_attention"}
"""Words of ops each of whose gradients takes as many multiply-accumulates as the op itself."""

_PRODUCT_NODE = re.compile(r"(addmm|baddbmm|addmv|matmul|mm|bmm|mv|dot)backward\d*", re.IGNORECASE)


def factors_of_node(name: str) -> Sequence[int] | None:
    """Return the positions of the two factors of a product by the name of PyTorch's node; else None."""
    node = _PRODUCT_NODE.fullmatch(name)
    return None if node is None else MATRIX_PRODUCTS[torch_word(node[1].lower())].factors


def gradients_of_factors(word: str, gradients: Sequence[Any]) -> int:
    """Return how many of the gradients that a backward op gives are products, and not None.

    word: of the backward op.  gradients: of an op's inputs in order; a single one may be of any input.
    """
    if len(gradients) == 1:
        return int(gradients[0] is not None)
    product = PRODUCTS.get(word)  # a layer of several products gives the gradients of data and weights first
    # `factors` is empty for einsum, each of whose gradients is a product.
    positions = (0, 1) if product is None else product.factors or range(len(gradients))
    return sum(i < len(gradients) and gradients[i] is not None for i in positions)


_ELEMENTWISE = {
    **dict.fromkeys(MOVES, no_cost),
    **table(
        (visits(1), """
            abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
            adaptive_max_pool2d adaptive_max_pool3d add add_n all amax amin aminmax angle any argmax argmin
            asin asinh atan atan2 atanh bias_add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp
            clamp_max clamp_min copysign cos cosh count_nonzero _ctc_loss ctc_loss cummax cummin cumprod
            cumsum digamma dist div embedding_bag eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmod
            fractional_max_pool2d fractional_max_pool3d frexp _fused_rms_norm gcd ge gt hardshrink hardtanh
            heaviside histogram histogramdd _histogramdd_bin_edges _histogramdd_from_bin_cts
            _histogramdd_from_bin_tensors hypot index_reduce isfinite isin isinf isnan lcm ldexp le
            leaky_relu lgamma linalg_vector_norm log log10 log1p log2 logaddexp logaddexp2 logcumsumexp
            logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill max maximum mean
            min minimum mul nan_to_num nansum ne neg nextafter nll_loss norm norm_except_dim polygamma pow
            prelu prod reciprocal relu relu6 remainder renorm round rrelu rsqrt rsub scatter_reduce
            _segment_reduce segment_reduce sign sin sinh softshrink softsign _sparse_softmax special_i0
            special_i1 sqrt square squared_difference std_mean sub sum tan tanh threshold topk trace trunc
            _unsafe_masked_index_put_accumulate where AddN All Any ApproximateEqual BiasAdd BitShift Cumprod
            Cumsum EuclideanNorm GlobalAveragePool GlobalLpPool GlobalMaxPool Hardmax IsFinite IsInf IsNan
            L2Loss MaxUnpool ReduceL1 ReduceL2 ReduceLogSum ReduceSumSquare SegmentSum Shrink
            SquaredDifference Swish ThresholdedRelu TopKV2 UnsortedSegmentSum Xdivy Xlogy
        """),
        (visits(2), "addcdiv addcmul dropout rrelu_with_noise ResourceApplyGradientDescent"),
        (visits(3), "elu hardsigmoid l1_loss lerp mse_loss selu sigmoid softplus var _weight_norm_interface"),
        (visits(4), """
            glu hardswish huber_loss log_sigmoid log_sigmoid_forward logsumexp multi_margin_loss
            multilabel_margin_loss multilabel_margin_loss_forward normalize rms_norm silu smooth_l1_loss
            soft_margin_loss std ReduceLogSumExp ResourceApplyKerasMomentum ResourceApplyMomentum
        """),
        (visits(5), "log_softmax softmax LRN ResourceApplyAdagradV2"),
        (visits(6), "binary_cross_entropy cross_entropy mish"),
        (visits(7), "_batch_norm_with_update group_norm instance_norm layer_norm MeanVarianceNormalization"),
        (visits(8), "binary_cross_entropy_with_logits gelu ResourceApplyRMSProp"),
        (visits(12), "ResourceApplyAdam"),
        (of.batch_norm, "batch_norm"),
        (of.pooling, """
            max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d
            MaxPool AveragePool LpPool
        """),
    ),
}  # fmt: skip

ELEMENTWISE = frozenset(_ELEMENTWISE)
"""Names of ops each of whose gradients takes one operation for each element, or none."""

BY_SHAPES_ALONE = (
    frozenset(name for name, formula in _ELEMENTWISE.items() if formula not in (of.batch_norm, of.pooling))
    .difference(["instance_norm", "_unsafe_masked_index_put_accumulate"])
    .union([*MATRIX_PRODUCTS, "scaled_dot_product_attention"])
)
"""Words of ops whose formulas, and those of their backward ops, read nothing but shapes.

Those that are taken out have backward ops of other ops, such as `batch_norm_backward`.
"""

_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                 "attention_math", "fused_attention_overrideable")
]  # fmt: skip
_NEAREST = [f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)]
_TAPS = {
    "upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8, "upsample_bicubic2d": 16,
    "_upsample_linear1d_aa": 2, "_upsample_bilinear2d_aa": 4, "_upsample_trilinear3d_aa": 8,
    "_upsample_bicubic2d_aa": 16, "upsample_lanczos2d": 36, "_upsample_lanczos2d_aa": 36,
}  # fmt: skip
_FOREACH = """
    abs add addcdiv addcmul copy div erf exp lerp log max maximum minimum mul neg norm pow reciprocal
    round rsqrt sign sqrt sub zero
""".split()

FORMULAS: dict[str, Formula] = {
    **_ELEMENTWISE,
    **table(
        (of.linear, "linear Gemm FusedGemm"), (of.bilinear, "bilinear"), (of.einsum, "einsum"),
        (of.matrix_product, "matmul SparseMatMul _FusedMatMul"),
        (of.contraction, "dot_general"), (of.ragged_contraction, "ragged_dot_general"),
        (products(lambda op: of.matrix_product(op, 1).macs, lambda op: prod(op.out)), "addmm addmv baddbmm"),
        (product_at(0, 1), "_int_mm _scaled_mm _scaled_mm_v2 _sparse_mm hspmm _sparse_sparse_matmul vdot"),
        (product_at(0, 1), "_cslt_sparse_mm"), (product_at(0, 2), "_sparse_semi_structured_mm"),
        (product_at(1, 2), "addbmm _sparse_addmm sspaddmm sparse_sampled_addmm _addmm_activation"),
        (product_at(1, 3), "_sparse_semi_structured_addmm"),
        (products(lambda op: prod(op.out) * op.inputs[0][-1]), """
            _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu mkldnn_linear
            _dyn_quant_matmul_4bit fbgemm_linear_int8_weight
            QLinearMatMul MatMulNBits MatMulIntegerToFloat DynamicQuantizeMatMul MatMulBnb4
        """),
        (products(lambda op: op.inputs[0][0] * prod(op.out[-1:])), "SparseTensorDenseMatMul"),
        (products(lambda op: prod(op.out)), "addr"),
        (products(lambda op: sum(prod(left) * right[-1] for left, right in zip(*op.inputs[:2], strict=True))),
         "_foreach_mm"),
        (of.grouped_product, "grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
        (of.trilinear, "_trilinear"), (of.covariance, "cov corrcoef"),
        (of.convolution, " ".join([*CONVOLUTIONS, "Conv FusedConv ConvInteger"])),
        (lambda op: of.convolution(replace(op, weight=3)), "QLinearConv"),
        (of.transposed_convolution, f"""
            {" ".join(TRANSPOSED_CONVOLUTIONS)} slow_conv_transpose2d slow_conv_transpose3d
            cudnn_convolution_transpose miopen_convolution_transpose _mps_convolution_transpose ConvTranspose
        """),
        (of.any_convolution, """
            _convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward thnn_conv2d
            slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d cudnn_convolution
            cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution convolution conv_depthwise3d
            miopen_depthwise_convolution _conv_depthwise2d _nnpack_spatial_convolution _mps_convolution
        """),
        (of.convolution_backward, "convolution_backward"),
        (of.depthwise_convolution, "depthwise_conv2d depthwise_conv3d"),  # in place of `convolution` above
        (products(lambda op: prod(op.out) * prod(op.inputs[1][:2]), lambda op: prod(op.out)), "conv_tbc"),
        (of.attention, " ".join(["scaled_dot_product_attention", *_ATTENTION])),
        (of.attention_backward, " ".join(f"{name}_backward" for name in _ATTENTION)),
        (of.encoder_layer, "_transformer_encoder_layer_fwd"),
        (of.attention_layer, "_native_multi_head_attention"), (of.onnx_attention, "Attention"),
        (of.cached_attention(6), "MultiHeadAttention"),
        (of.grouped_attention, "GroupQueryAttention"),
        (of.recurrent, " ".join(_RECURRENT)), (of.recurrent_layer, "mkldnn_rnn_layer LSTM GRU RNN"),
        (of.blocked_cell, "LSTMBlockCell BlockLSTM BlockLSTMV2"),
        (visits(4), "_thnn_fused_lstm_cell _thnn_fused_gru_cell _pdist_backward _cdist_backward"),
        (operations(lambda op: 3 * prod(op.out) * op.inputs[0][-1]), "_cdist_forward _pdist_forward pdist"),
        (products(lambda op: prod(op.out) * (op.inputs[0][-1] + 2), lambda op: prod(op.out)),
         "_euclidean_dist"),
        (operations(of.elements_of_list), " ".join(f"_foreach_{word} _foreach_{word}_" for word in _FOREACH)),
        (operations(lambda op: 12 * of.elements_of_list(op)),
         "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"),
        (no_cost, "_ToTorchTensor _FromTorchTensor Redistribute NestedRedistribute _DDPSink"),
        (no_cost, "split_with_sizes_copy"),
        (of.of_matrix(of.lu), """
            linalg_lu linalg_lu_factor linalg_lu_factor_ex lu_with_info _lu_with_info _linalg_det
            _linalg_slogdet Lu MatrixDeterminant LogMatrixDeterminant
        """),
        (of.of_square(1 / 3), "linalg_cholesky_ex cholesky linalg_ldl_factor_ex Cholesky"),
        (of.of_square(2 / 3), "cholesky_inverse"),
        (of.of_square(2), "linalg_inv_ex inverse MatrixInverse"),
        (of.of_square(9), "_linalg_eigh linalg_eigh SelfAdjointEigV2"),
        (of.of_square(10), "linalg_eigvals _linalg_eigvals"),
        (of.of_square(12), "linalg_matrix_exp MatrixExponential"),
        (of.of_square(25), "linalg_eig Eig"),
        (of.of_matrix(lambda m, n, k: 2 * of.lu(m, n, k)), "geqrf linalg_householder_product linalg_lstsq"),
        (of.of_matrix(lambda m, n, k: 4 * of.lu(m, n, k)), "linalg_qr Qr"),
        (of.of_matrix(of.svd), "_linalg_svd linalg_svd Svd"),
        (of.of_matrix(lambda m, n, k: of.svd(m, n, k) + 2 * m * n * k), "linalg_pinv"),
        (of.of_system(2, once=2 / 3), "_linalg_solve_ex linalg_solve_ex MatrixSolve"),
        (of.of_system(2), "linalg_lu_solve linalg_ldl_solve"),
        (of.of_system(2, matrix=1), "lu_solve cholesky_solve _cholesky_solve_helper"),
        (of.of_system(1), "linalg_solve_triangular MatrixTriangularSolve"),
        (of.of_system(1, matrix=1), "triangular_solve"),
        (operations(lambda op: 4 * prod(op.inputs[2]) * op.inputs[1][-1]), "ormqr"),
        (visits(3), "linalg_cross"),
        (of.fourier(5), "_fft_c2c"), (of.fourier(2.5), "_fft_r2c _fft_c2r"),
        *((of.fourier(5, n), f"FFT{axes} IFFT{axes}") for n, axes in enumerate(("", "2", "3"), 1)),
        *((of.fourier(2.5, n), f"RFFT{axes} IRFFT{axes}") for n, axes in enumerate(("", "2", "3"), 1)),
        (no_cost, " ".join(_NEAREST)), (visits(1), " ".join(f"{name}_backward" for name in _NEAREST)),
        (of.interpolation(4), "ResizeBilinear"),
        *((of.interpolation(taps), name) for name, taps in _TAPS.items()),
        *((of.interpolation(taps, 0), f"{name}_backward") for name, taps in _TAPS.items()),
        (of.grid_sampling(2), "grid_sampler_2d grid_sampler_2d_backward"),
        (of.grid_sampling(3), "grid_sampler_3d grid_sampler_3d_backward"),
    ),
}  # fmt: skip
"""Formula by name."""

_RESHAPED = frozenset({"transpose", "permute", "resize", "as_strided"})
"""Words of ops that in place change how a tensor is read, and nothing in memory."""


def count_bytes(names: tuple[str, str], inputs: Sequence[int], outputs: Sequence[int], in_place: bool) -> int:
    """Return the bytes that an op reads and writes, given those of each input and output.

    names: the framework's name of the op and its word.
    Of its first input an op that copies reads no more than it writes, as a gather does; the others, such as
    indices, it reads whole.  In place it writes as much as the other inputs hold, or all of the first without
    them.
    """
    written, (first, *sizes) = sum(outputs), inputs or (0,)
    other_inputs = sum(sizes)
    # The usual case: each input is read once and each output written once.
    if MOVES.isdisjoint(names):
        return sum(inputs) + written
    # A view moves nothing.
    if COPIES.isdisjoint(names) or (in_place and names[1] in _RESHAPED):
        return 0
    if in_place:
        return other_inputs + min(written, other_inputs or written)
    return written + min(first, written) + other_inputs


def bytes_of(context: Any, values: Iterable[Any]) -> int:
    """Return the bytes of tensors, in lists too; unknown types are float32.  context: the op's, or shaped."""
    total = 0
    for value in leaves(values):
        # Of a distributed tensor this process moves its own shard.
        if count := size(context["shape"](local(value))):
            # The element type of extents alone is PyTorch's.
            is_extents = isinstance(value, Extents)
            name = str(value.dtype).removeprefix("torch.") if is_extents else context["dtype"](value)
            # Without a known element type float32 is assumed, as most tensors have it.
            total += count * (itemsize(name) or 4)
    return total
