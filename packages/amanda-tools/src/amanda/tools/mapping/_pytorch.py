"""PyTorch's part of StandardMapping, and ATen's names beside the vocabulary's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._phases import phase_in_torch
from amanda.tools.mapping._products import MATRIX_PRODUCTS, PRODUCTS, parameter_factor

_ATEN_NAMES_BY_WORD = {
    "abs": "absolute", "adjoint": "matrix_H mH H",
    "batch_norm": "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_batch_norm_impl_index native_batch_norm_legit batch_norm_with_update",
    "cat": "concat concatenate", "clamp": "clip", "cross_entropy": "cross_entropy_loss",
    "div": "divide true_divide", "dropout": "native_dropout _fused_dropout",
    "embedding_bag": "_embedding_bag _embedding_bag_forward_only", "eq": "equal_to", "ge": "greater_equal",
    "group_norm": "native_group_norm", "grouped_mm": "_grouped_mm transformers::grouped_mm_fallback",
    "gt": "greater", "item": "_local_scalar_dense", "layer_norm": "native_layer_norm", "le": "less_equal",
    "lgamma": "special_gammaln", "log_softmax": "_log_softmax special_log_softmax", "lt": "less",
    "matmul": "mm bmm mv dot linalg_matmul",
    "adaptive_avg_pool2d": "_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d",
    "adaptive_avg_pool3d": "_adaptive_avg_pool3d", "mul": "multiply", "ne": "not_equal", "neg": "negative",
    "nll_loss": "nll_loss_nd nll_loss2d", "permute": "movedim moveaxis",
    "prelu": "_prelu_kernel prelu_kernel",
    "reshape": "view view_as reshape_as _reshape_alias reshape_alias _unsafe_view unsafe_view flatten "
    "unflatten ravel",
    "rms_norm": "_fused_rms_norm fused_rms_norm", "sigmoid": "special_expit",
    "softmax": "_softmax special_softmax _safe_softmax safe_softmax", "sub": "subtract",
    "transpose": "t numpy_T mT swapaxes swapdims", "trunc": "fix",
    **{word: f"arc{word[1:]}" for word in "acos acosh asin asinh atan atan2 atanh".split()},
    **{word: f"special_{word}" for word in "erf erfc erfinv exp2 expm1 log1p logsumexp round".split()},
    **{word: f"{word}_with_indices" for word in ("max_pool1d", "max_pool2d", "max_pool3d")},
}  # fmt: skip

WORDS = {name: word for word, names in _ATEN_NAMES_BY_WORD.items() for name in names.split()}
"""ATen's name to the vocabulary's word, where they differ."""

KERNEL_WORDS_BY_OP = {
    "linear": ("addmm", "matmul", "mkldnn_linear"), "transpose": ("permute",),
    "lstm": ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn", "lstm_mps"),
    **dict.fromkeys(("rnn_tanh", "rnn_relu", "gru"), ("mkldnn_rnn_layer", "cudnn_rnn", "miopen_rnn")),
}  # fmt: skip
"""Words of the nodes that compute an op's own gradient, by the op's word."""

_WINDOW_AXES = {"1": "W", "2": "HW", "3": "DHW"}
# Words, and names of nodes, are few, and each op asks for several: their texts are taken apart once.
_match_window_op = lru_cache(maxsize=1024)(re.compile(
    r"(conv_transpose|conv|max_unpool|fractional_max_pool|(?:adaptive_)?(?:max|avg)_pool"
    r"|(?:reflection|replication)_pad|upsample_[a-z]+?)([123])d"
).fullmatch)  # fmt: skip
_NORMS = ("batch_norm", "instance_norm", "group_norm")
_LAYOUT_BY_RANK = {2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op of PyTorch; backward ops inherit those of their op."""
    if "shape" not in context:  # the first callback at the op
        context["phase"] = phase_in_torch(context)
        _describe_op(context)
    if context.is_forward():
        context["backward_type"] = context["weight_grad_index"] = None
        return
    context["phase"] = "backward"
    node_name = context.get_backward_op().__name__
    context["backward_type"] = backward_type(node_name, context["type"])
    context["weight_grad_index"] = _weight_grad_index(context, node_name)


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Return the extents of a tensor, None in the place of a symbolic extent; None for no tensor.

    None also for tensors without a shape: nested ones, and parameters of lazy modules.
    """
    if isinstance(value, type):  # whose `shape` is a descriptor
        return None
    try:
        extents = getattr(value, "shape", None)
    except Exception:  # of a nested tensor, a parameter of a lazy module, a class that refuses
        return None
    if not isinstance(extents, tuple):
        return None
    if _NUMBERS.issuperset(map(type, extents)):
        return tuple(extents)
    return tuple([extent if isinstance(extent, int) else None for extent in extents])


_NUMBERS = frozenset({int})


def dtype(value: Any) -> str | None:
    """Return the name of a tensor's element type; None for what is not a tensor, whatever attributes it has.

    A tensor whose elements its class keeps to itself, such as a quantised one of torchao or one that is
    masked, has the name of the class first.
    """
    tensor_class: Any = type(value)
    is_opaque = _is_opaque(tensor_class)
    if is_opaque is None:
        return None
    if tensor_class.__module__ in ("torch", "torch.nn.parameter") and not is_opaque:  # a hot path
        return _dtype_name(tensor_class, value.dtype, is_opaque=False)
    import torch

    try:
        with torch._C.DisableTorchFunctionSubclass():
            return _dtype_name(tensor_class, value.dtype, is_opaque)
    except Exception:  # of a class that refuses even this
        return f"{tensor_class.__name__}[]"


@lru_cache(maxsize=256)
def _dtype_name(tensor_class: Any, element_type: Any, is_opaque: bool) -> str:
    name = str(element_type).removeprefix("torch.")
    return f"{tensor_class.__name__}[{name}]" if is_opaque else name


@cache
def _is_opaque(tensor_class: Any) -> bool | None:
    """Return True for a class of tensors whose elements tools cannot read, as it dispatches ops by itself.

    False for other classes of tensors, None for any other class.
    """
    import torch

    if not issubclass(tensor_class, torch.Tensor):
        return None
    parameter_module: Any = torch.nn.parameter
    if issubclass(tensor_class, parameter_module.UninitializedTensorMixin):
        return True
    # DTensors and results of collectives hold plain tensors that tools can reach.
    is_readable = (
        hasattr(tensor_class, "to_local")  # a DTensor
        or hasattr(tensor_class, "trigger_wait")  # the result of a collective
        or "nested" in tensor_class.__module__
    )
    dispatch: Any = tensor_class.__torch_dispatch__
    has_dispatch = dispatch is not torch.Tensor.__torch_dispatch__
    # A FakeTensor has a shape alone and stands for a value of a graph; it hides nothing.
    return has_dispatch and not (is_readable or tensor_class.__module__ == "torch._subclasses.fake_tensor")


def _describe_op(context: OpContext) -> None:
    """Write the keys that an op and its backward ops share: type, in_place, weight, layout and accessors."""
    name, inputs = context.get_forward_op_type(), context.get_inputs()
    in_place = name.endswith("_") and not name.endswith("__")
    kind = word(name.removesuffix("_") if in_place else name)
    if kind == "convolution":  # (input, weight, bias, stride, padding, dilation, transposed, ...)
        is_transposed, window_rank = len(inputs) > 6 and bool(inputs[6]), len(shape(inputs[1]) or ()) - 2
        kind = f"{'conv_transpose' if is_transposed else 'conv'}{window_rank}d"
    weight = weight_index(kind, name, inputs)
    if weight is None and kind in MATRIX_PRODUCTS and not context.namespace.matches("*/*/eager"):
        # The values of a graph stand for what it is given when it runs, so they are no parameters themselves.
        weight = parameter_factor(kind, lambda i: i < len(inputs) and context.get_variable(i) is not None)
    context["type"] = kind
    context["in_place"] = in_place or name == "setitem"
    context["weight_index"] = weight
    context["layout"] = layout(kind, shape(inputs[0]) if inputs else None)
    context["shape"] = shape
    context["dtype"] = dtype


def word(name: str) -> str:
    """Return the vocabulary's word for an ATen operator; its own name where there is none."""
    return WORDS.get(name, name)


_WEIGHT_INDEX_OF_LAYER = {
    "batch_norm": 1, "instance_norm": 1, "layer_norm": 2, "group_norm": 2, "rms_norm": 2, "prelu": 1,
    "embedding": 0, "embedding_bag": 0, "native_group_norm": 1,
}  # fmt: skip


def weight_index(kind: str, name: str, inputs: Sequence[Any]) -> int | None:
    """Return the weight's position by the schema, or of the only factor that is a parameter; else None."""
    product = PRODUCTS.get(kind)
    if product is None:
        index = _WEIGHT_INDEX_OF_LAYER.get(name, _WEIGHT_INDEX_OF_LAYER.get(kind))
    else:
        index = product.weight
    if index is None and kind in MATRIX_PRODUCTS:  # of which the schema names no weight
        return parameter_factor(kind, lambda i: i < len(inputs) and _is_parameter(inputs[i]))
    # An input without a shape is None, a number, or the weight of a lazy module.
    has_weight = index is not None and index < len(inputs) and shape(inputs[index]) is not None
    return index if has_weight else None


def _is_parameter(value: Any) -> bool:
    """Return True if a tensor is a parameter, or a view of a parameter such as `weight.t()`."""
    from torch.nn import Parameter

    return isinstance(value, Parameter) or isinstance(getattr(value, "_base", None), Parameter)


def layout(kind: str, extents: Sequence[int | None] | None) -> str | None:
    """Return the axes of the data input, such as "NCHW", or "CHW" unbatched; None of other ops and ranks."""
    if extents is None:
        return None
    # Of any rank: (N, C) is the input of BatchNorm1d as well.
    if kind in _NORMS:
        return _LAYOUT_BY_RANK.get(len(extents))
    window_op = _match_window_op(kind)
    if window_op is None:
        return None
    batched_axes = "NC" + _WINDOW_AXES[window_op[2]]
    if len(extents) == len(batched_axes):
        return batched_axes
    return batched_axes[1:] if len(extents) == len(batched_axes) - 1 else None


_NODE_NAME = re.compile(r"(.+?)((?:Backward)*)\d*")
_DIMENSION, _WORD_BEGIN = re.compile(r"(?<=[a-z])(\d)D(?![a-z])"), re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@lru_cache(maxsize=1024)
def backward_type(node_name: str, kind: str) -> str:
    """Return the word for a node of the autograd graph that an op of type `kind` made.

    The node that computes the op's own gradient has the op's word, e.g. "conv2d_backward"; one
    that is a part of it has the word of its own: "transpose_backward" in the backward of linear.
    """
    stem, backward_count = _stem_and_backward_count(node_name)
    forward_word = stem if stem == kind else node_word(stem, kind)
    return forward_word + "_backward" * backward_count  # two in a double backward


@lru_cache(maxsize=1024)
def _stem_and_backward_count(node_name: str) -> tuple[str, int]:
    """Return a node's name without its suffixes, and how many "Backward" it has: "Mul", 1 of MulBackward0."""
    match = _NODE_NAME.fullmatch(node_name)
    assert match is not None
    return match[1], len(match[2]) // len("Backward")


def node_word(stem: str, kind: str) -> str:
    """Return the word for a node's stem, such as NativeBatchNorm: `kind` if it is a kernel of that op."""
    if stem.startswith("GeneratedBackwardFor_"):  # of an operator that a library defines, by its formula
        return kind
    aten_name = snake(stem)
    name_word = word(aten_name)
    is_kernel = name_word in (kind, *KERNEL_WORDS_BY_OP.get(kind, ()))
    if is_kernel or ("conv" in name_word and kind.startswith("conv")):
        return kind
    if name_word.startswith("scaled_dot_product"):
        return "scaled_dot_product_attention"
    return name_word


@lru_cache(maxsize=1024)
def snake(name: str) -> str:
    """Return a name in snake case: `max_pool2d_with_indices` for `MaxPool2DWithIndices`."""
    return _WORD_BEGIN.sub("_", _DIMENSION.sub(r"\1d", name)).lower()


# Of an op's word: which node gives the weight's gradient in the weight's shape, and in which place.
# In a linear layer addmm and mm give the gradient of the transpose; t turns it into the weight's shape.
_GRAD_INDEX_BY_NODE = {
    "linear": {"t": 0, "linear": 1, "mkldnn_linear": 1},
    "batch_norm": {"native_batch_norm": 1, "cudnn_batch_norm": 1, "miopen_batch_norm": 1},
    "layer_norm": {"native_layer_norm": 1}, "group_norm": {"native_group_norm": 1},
    "rms_norm": {"fused_rms_norm": 1}, "prelu": {"view": 0}, "bilinear": {"trilinear": 1},
    "embedding": {"embedding": 0}, "embedding_bag": {"embedding_bag": 0},
}  # fmt: skip


def _weight_grad_index(context: OpContext, node_name: str) -> int | None:
    """Return which gradient of a node is the weight's, in the weight's shape; None in a double backward."""
    kind, weight_index = context["type"], context["weight_index"]
    stem, backward_count = _stem_and_backward_count(node_name)
    is_first_order = backward_count == 1 and context.get_backward_order() == 1
    if weight_index is None or not is_first_order:
        return None
    aten_name = snake(stem)
    if kind in _GRAD_INDEX_BY_NODE:
        return _GRAD_INDEX_BY_NODE[kind].get(aten_name)
    if kind in MATRIX_PRODUCTS:  # a node of a product has one gradient for each factor, in their order
        return weight_index if word(aten_name) in MATRIX_PRODUCTS else None
    is_convolution = kind.startswith("conv") and "conv" in aten_name
    return 1 if is_convolution else None  # of the gradients of data, weight and bias
