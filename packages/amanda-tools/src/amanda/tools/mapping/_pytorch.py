"""PyTorch's part of StandardMapping, and ATen's names beside the vocabulary's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._phases import phase_in_torch
from amanda.tools.mapping._products import MATRIX_PRODUCTS, PRODUCTS, parameter_factor

_SAME = {
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

SPATIAL = {"1": "W", "2": "HW", "3": "DHW"}
_SPATIAL_OP = re.compile(
    r"(conv_transpose|conv|max_unpool|fractional_max_pool|(?:adaptive_)?(?:max|avg)_pool"
    r"|(?:reflection|replication)_pad|upsample_[a-z]+?)([123])d"
)
_NORMS = ("batch_norm", "instance_norm", "group_norm")
_BY_RANK = {2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op of PyTorch."""
    if "shape" not in context:
        context["phase"] = phase_in_torch(context)
        _describe_op(context)
    if context.is_forward():
        context["backward_type"] = context["weight_grad_index"] = None
        return
    context["phase"] = "backward"
    node = context.get_backward_op().__name__
    context["backward_type"] = backward_type(node, context["type"])
    context["weight_grad_index"] = _weight_grad_index(context, node)


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Return the extents of a tensor, None for one that is not a number; None for a tensor without a shape.

    Nested tensors are such, and parameters of lazy modules.
    """
    if isinstance(value, type):
        return None
    try:
        extents = getattr(value, "shape", None)
    except Exception:  # of a nested tensor, a parameter of a lazy module, a class that refuses
        return None
    if not isinstance(extents, tuple):
        return None
    return tuple(extent if isinstance(extent, int) else None for extent in extents)


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
    """Return True for a class of tensors that says itself what ops do, and is none that tools can read.

    None for a class that is none of tensors.
    """
    import torch

    if not issubclass(tensor_class, torch.Tensor):
        return None
    parameter_module: Any = torch.nn.parameter
    if issubclass(tensor_class, parameter_module.UninitializedTensorMixin):
        return True
    # DTensors and results of collectives hold plain tensors that tools can reach.
    is_readable = (
        hasattr(tensor_class, "to_local")
        or hasattr(tensor_class, "trigger_wait")
        or "nested" in tensor_class.__module__
    )
    dispatch: Any = tensor_class.__torch_dispatch__
    has_dispatch = dispatch is not torch.Tensor.__torch_dispatch__
    # A FakeTensor has a shape alone and stands for a value of a graph; it hides nothing.
    return has_dispatch and not (is_readable or tensor_class.__module__ == "torch._subclasses.fake_tensor")


def _describe_op(context: OpContext) -> None:
    """Write the keys of an op that hold in its forward and backward pass."""
    name = context.get_forward_op_type()
    inputs = context.get_inputs()
    in_place = name.endswith("_") and not name.endswith("__")
    kind = word(name.removesuffix("_") if in_place else name)
    if kind == "convolution":  # (input, weight, bias, stride, padding, dilation, transposed, ...)
        is_transposed = len(inputs) > 6 and bool(inputs[6])
        kind = f"conv{'_transpose' * is_transposed}{len(shape(inputs[1]) or ()) - 2}d"
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


_WEIGHT_AT = {
    "batch_norm": 1, "instance_norm": 1, "layer_norm": 2, "group_norm": 2, "rms_norm": 2, "prelu": 1,
    "embedding": 0, "embedding_bag": 0, "native_group_norm": 1,
}  # fmt: skip


def weight_index(kind: str, name: str, inputs: Sequence[Any]) -> int | None:
    """Return where the weight is: by the op's schema; in a product, the factor that is a parameter."""
    product = PRODUCTS.get(kind)
    index = _WEIGHT_AT.get(name, _WEIGHT_AT.get(kind)) if product is None else product.weight
    if index is None and kind in MATRIX_PRODUCTS:
        return parameter_factor(kind, lambda i: i < len(inputs) and _is_parameter(inputs[i]))
    # Shapes tell apart what is None, a number, or a weight of a lazy module.
    present = index is not None and index < len(inputs) and shape(inputs[index]) is not None
    return index if present else None


def _is_parameter(value: Any) -> bool:
    """Return True if a tensor is a parameter, or a view of a parameter such as `weight.t()`."""
    from torch.nn import Parameter

    return isinstance(value, Parameter) or isinstance(getattr(value, "_base", None), Parameter)


def layout(kind: str, extents: Sequence[int | None] | None) -> str | None:
    """Return the axes of the data input: channels first, batched or not; None of other ops."""
    if extents is None:
        return None
    # Of any rank: (N, C) is the input of BatchNorm1d as well.
    if kind in _NORMS:
        return _BY_RANK.get(len(extents))
    spatial = _SPATIAL_OP.fullmatch(kind)
    if spatial is None:
        return None
    axes = "NC" + SPATIAL[spatial[2]]
    return axes[len(axes) - len(extents) :] if len(extents) in (len(axes), len(axes) - 1) else None


_NODE = re.compile(r"(.+?)((?:Backward)*)\d*")


def backward_type(node: str, kind: str) -> str:
    """Return the word for a node of the autograd graph that an op of type `kind` made.

    The node that computes the op's own gradient has the op's word, e.g. "conv2d_backward"; one
    that is a part of it has the word of its own: "transpose_backward" in the backward of linear.
    """
    stem, order = _stem_and_order(node)
    if stem != kind:
        stem = node_word(stem, kind)
    return stem + "_backward" * order


def _stem_and_order(node: str) -> tuple[str, int]:
    """Return the name of a node without its suffixes, and how many "Backward" it ends in."""
    match = _NODE.fullmatch(node)
    assert match is not None
    return match[1], len(match[2]) // len("Backward")


def node_word(stem: str, kind: str) -> str:
    """Return the word for the stem of a node's name: "NativeBatchNorm" is batch_norm."""
    if stem.startswith("GeneratedBackwardFor_"):  # of an operator that a library defines, by its formula
        return kind
    name = snake(stem)
    name_word = word(name)
    if name_word in (kind, *KERNELS.get(kind, ())) or ("conv" in name_word and kind.startswith("conv")):
        return kind
    if name_word.startswith("scaled_dot_product"):
        return "scaled_dot_product_attention"
    return name_word


def snake(name: str) -> str:
    """Return a name in snake case: `max_pool2d_with_indices` for `MaxPool2DWithIndices`."""
    lowered = re.sub(r"(?<=[a-z])(\d)D(?![a-z])", r"\1d", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", lowered).lower()


# Of an op's word: which node gives the weight's gradient in the weight's shape, and in which place.
_WEIGHT_GRAD_AT = {
    # addmm and mm give the gradient of the transpose; t turns it into the weight's shape.
    "linear": {"t": 0, "linear": 1, "mkldnn_linear": 1},
    "batch_norm": {"native_batch_norm": 1, "cudnn_batch_norm": 1, "miopen_batch_norm": 1},
    "layer_norm": {"native_layer_norm": 1},
    "group_norm": {"native_group_norm": 1},
    "rms_norm": {"fused_rms_norm": 1},
    "prelu": {"view": 0},
    "bilinear": {"trilinear": 1},
    "embedding": {"embedding": 0},
    "embedding_bag": {"embedding_bag": 0},
}


def _weight_grad_index(context: OpContext, node: str) -> int | None:
    """Return which gradient of a node is the weight's, in the weight's shape; None without one."""
    kind, weight = context["type"], context["weight_index"]
    stem, order = _stem_and_order(node)
    if weight is None or order != 1 or context.get_backward_order() != 1:
        return None
    name = snake(stem)
    if kind in _WEIGHT_GRAD_AT:
        return _WEIGHT_GRAD_AT[kind].get(name)
    if kind in MATRIX_PRODUCTS:
        return weight if word(name) in MATRIX_PRODUCTS else None
    return 1 if kind.startswith("conv") and "conv" in name else None
