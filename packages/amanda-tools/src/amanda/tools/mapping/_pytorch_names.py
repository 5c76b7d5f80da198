"""Names: ATen's beside the vocabulary's, and the kernels in which autograd computes an op's gradient."""

from __future__ import annotations

_SAME = {
    "abs": "absolute",
    "acos": "arccos",
    "acosh": "arccosh",
    "adjoint": "matrix_H mH H",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "batch_norm": "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_batch_norm_impl_index native_batch_norm_legit batch_norm_with_update",
    "cat": "concat concatenate",
    "clamp": "clip",
    "cross_entropy": "cross_entropy_loss",
    "div": "divide true_divide",
    "dropout": "native_dropout _fused_dropout",
    "embedding_bag": "_embedding_bag _embedding_bag_forward_only",
    "eq": "equal_to",
    "erf": "special_erf",
    "erfc": "special_erfc",
    "erfinv": "special_erfinv",
    "exp2": "special_exp2",
    "expm1": "special_expm1",
    "ge": "greater_equal",
    "group_norm": "native_group_norm",
    "grouped_mm": "_grouped_mm transformers::grouped_mm_fallback",
    "gt": "greater",
    "item": "_local_scalar_dense",
    "layer_norm": "native_layer_norm",
    "le": "less_equal",
    "lgamma": "special_gammaln",
    "log1p": "special_log1p",
    "log_softmax": "_log_softmax special_log_softmax",
    "logsumexp": "special_logsumexp",
    "lt": "less",
    "matmul": "mm bmm mv dot linalg_matmul",
    "max_pool1d": "max_pool1d_with_indices",
    "max_pool2d": "max_pool2d_with_indices",
    "max_pool3d": "max_pool3d_with_indices",
    "adaptive_avg_pool2d": "_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d",
    "adaptive_avg_pool3d": "_adaptive_avg_pool3d",
    "mul": "multiply",
    "ne": "not_equal",
    "neg": "negative",
    "nll_loss": "nll_loss_nd nll_loss2d",
    "permute": "movedim moveaxis",
    "prelu": "_prelu_kernel prelu_kernel",
    "reshape": "view view_as reshape_as _reshape_alias reshape_alias _unsafe_view unsafe_view flatten "
    "unflatten ravel",
    "rms_norm": "_fused_rms_norm fused_rms_norm",
    "round": "special_round",
    "sigmoid": "special_expit",
    "softmax": "_softmax special_softmax _safe_softmax safe_softmax",
    "sub": "subtract",
    "transpose": "t numpy_T mT swapaxes swapdims",
    "trunc": "fix",
}

WORDS = {name: word for word, names in _SAME.items() for name in names.split()}
"""ATen's name to the vocabulary's word, where they differ."""

KERNELS = {
    "linear": ("addmm", "matmul", "mkldnn_linear"),
    "rnn_tanh": ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn"),
    "rnn_relu": ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn"),
    "lstm": ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn", "lstm_mps"),
    "transpose": ("permute",),
    "gru": ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn"),
}
"""Words of the nodes that compute an op's own gradient, by the op's word."""
