"""The words of `type` that docs/vocabulary.md lists."""

from __future__ import annotations

from amanda.tools.mapping import _onnxruntime_names, _pytorch_names, _tensorflow_names

_SHARED = """
    add sub rsub mul div floor_divide remainder pow neg abs matmul addmm linear eq ne lt le gt ge bitwise_not
    bitwise_and bitwise_or reshape transpose permute getitem setitem cat clamp conv1d conv2d conv3d
    conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm layer_norm group_norm embedding relu
    sigmoid softmax log_softmax cross_entropy nll_loss dropout scaled_dot_product_attention rnn_tanh lstm gru
    to item
""".split()

_TABLES = (_pytorch_names.WORDS, _tensorflow_names.WORDS, _onnxruntime_names.WORDS)

SEVERAL_WEIGHTS = frozenset(
    {"rnn_tanh", "rnn_relu", "lstm", "gru", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3",
     "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_grouped_mm", "grouped_mm"}
)  # fmt: skip
"""Types of ops that multiply by several weights each."""

VOCABULARY = frozenset((*_SHARED, *(word for table in _TABLES for word in table.values())))
"""Words that mean the same in every framework; what is in no list keeps the framework's own name."""
