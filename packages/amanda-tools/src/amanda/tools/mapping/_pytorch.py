"""PyTorch's half of StandardMapping."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from amanda import OpContext
from amanda.tools.mapping._construction import part_of
from amanda.tools.mapping._products import MATRIX_PRODUCTS, PRODUCTS
from amanda.tools.mapping._pytorch_names import KERNELS, WORDS

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
        context["phase"] = _phase(context)
        _describe_op(context)
    if context.is_backward():
        context["phase"] = "backward"
    _describe_backward_op(context)


def shape(value: Any) -> tuple[int | None, ...] | None:
    """Extents of a tensor, None for one that is no number; None for a tensor without a shape.

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
    """Name of a tensor's element type; None for what is no tensor, whatever attributes it has.

    A tensor whose elements its class keeps to itself, such as a quantised one of torchao or one that is
    masked, has the name of the class first.
    """
    kind: Any = type(value)
    opaque = _is_opaque(kind)
    if opaque is None:
        return None
    if kind.__module__ in ("torch", "torch.nn.parameter") and not opaque:  # a hot path
        return _dtype_name(kind, value.dtype, False)
    import torch

    try:
        with torch._C.DisableTorchFunctionSubclass():
            return _dtype_name(kind, value.dtype, opaque)
    except Exception:  # of a class that refuses even this
        return f"{kind.__name__}[]"


@lru_cache(maxsize=256)
def _dtype_name(tensor_class: Any, kind: Any, opaque: bool) -> str:
    name = str(kind).removeprefix("torch.")
    return f"{tensor_class.__name__}[{name}]" if opaque else name


@cache
def _is_opaque(kind: Any) -> bool | None:
    """Return True for a class of tensors that says itself what ops do, and is none that tools can read.

    None for a class that is none of tensors.
    """
    import torch

    if not issubclass(kind, torch.Tensor):
        return None
    uninitialized: Any = torch.nn.parameter
    if issubclass(kind, uninitialized.UninitializedTensorMixin):
        return True
    is_known = hasattr(kind, "to_local") or hasattr(kind, "trigger_wait") or "nested" in kind.__module__
    overrides: Any = kind.__torch_dispatch__
    is_own = overrides is not torch.Tensor.__torch_dispatch__
    return is_own and not (is_known or _is_fake(kind))


def _is_fake(kind: Any) -> bool:
    """Return True for tensors that have a shape alone, which stand for values in graphs, too."""
    return str(kind.__module__) == "torch._subclasses.fake_tensor"


def _phase(context: OpContext) -> str:
    """Return "backward", "optimizer", "construction" or "forward", by the innermost frame that tells."""
    frame: Any = sys._getframe(1)
    if _in_backward_pass(frame):
        return "backward"
    is_users = False
    while frame is not None:
        part = part_of(frame)
        if part is not None:
            return "forward" if part == "call" else part
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("torch.optim."):
            return "forward" if is_users and _is_differentiated(context) else "optimizer"
        is_users = is_users or not name.startswith(("torch.", "amanda."))
        frame = frame.f_back
    return "forward"


def _in_backward_pass(frame: Any) -> bool:
    """Return True for an op that a Function's backward or a hook calls, not one that is recomputed."""
    import torch

    if torch._C._current_graph_task_id() == -1:
        return False
    function = torch.autograd.function.BackwardCFunction.apply.__code__
    while frame is not None and frame.f_code is not function:
        name = frame.f_globals.get("__name__")
        if name == "torch.utils.checkpoint":
            return False
        if name == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return True


def _is_differentiated(context: OpContext) -> bool:
    """Return True if autograd records the op, as in the closure of an optimizer's step."""
    import torch

    lists = [value if isinstance(value, list) else [value] for value in context.get_inputs()]
    are_recorded = (getattr(x, "requires_grad", False) for values in lists for x in values)
    return torch.is_grad_enabled() and any(are_recorded)


def _describe_op(context: OpContext) -> None:
    name = context.get_op_type()
    inputs = context.get_inputs()
    in_place = name.endswith("_") and not name.endswith("__")
    kind = word(name.removesuffix("_") if in_place else name)
    if kind == "convolution":
        kind = _generic_convolution(inputs)
    weight = weight_index(kind, name, inputs)
    if weight is None and kind in MATRIX_PRODUCTS and not context.namespace.matches("*/*/eager"):
        weight = _weight_of_graph(context, kind, inputs)
    context["type"] = kind
    context["in_place"] = in_place or name == "setitem"
    context["weight_index"] = weight
    context["layout"] = layout(kind, shape(inputs[0]) if inputs else None)
    context["shape"] = shape
    context["dtype"] = dtype


def word(name: str) -> str:
    """The vocabulary's word for an ATen operator; its own name where there is none."""
    return WORDS.get(name, name)


def _generic_convolution(inputs: Sequence[Any]) -> str:
    """`torch.convolution(input, weight, bias, stride, padding, dilation, transposed, ...)`."""
    rank = len(shape(inputs[1]) or ()) - 2
    transposed = len(inputs) > 6 and bool(inputs[6])
    return f"conv_transpose{rank}d" if transposed else f"conv{rank}d"


_WEIGHT_AT = {
    "batch_norm": 1, "instance_norm": 1, "layer_norm": 2, "group_norm": 2, "rms_norm": 2, "prelu": 1,
    "embedding": 0, "embedding_bag": 0, "native_group_norm": 1,
}  # fmt: skip


def weight_index(kind: str, name: str, inputs: Sequence[Any]) -> int | None:
    """Return where the weight is: by the op's schema; in a product, the factor that is a parameter."""
    product = PRODUCTS.get(kind)
    index = _WEIGHT_AT.get(name, _WEIGHT_AT.get(kind)) if product is None else product.weight
    if index is None and kind in MATRIX_PRODUCTS:
        factors = [i for i in PRODUCTS[kind].factors if i < len(inputs) and _is_parameter(inputs[i])]
        return factors[0] if len(factors) == 1 else None
    present = index is not None and index < len(inputs) and shape(inputs[index]) is not None
    return index if present else None


def _weight_of_graph(context: OpContext, kind: str, inputs: Sequence[Any]) -> int | None:
    """The factor that is a parameter of a graph, whose values stand for what it is given when it runs."""
    positions = [i for i in MATRIX_PRODUCTS[kind].factors if i < len(inputs)]
    factors = [i for i in positions if context.get_variable(i) is not None]
    return factors[0] if len(factors) == 1 else None


def _is_parameter(value: Any) -> bool:
    """Return True if a tensor is a parameter, or a view of a parameter such as `weight.t()`."""
    from torch.nn import Parameter

    return isinstance(value, Parameter) or isinstance(getattr(value, "_base", None), Parameter)


def layout(kind: str, extents: Sequence[int | None] | None) -> str | None:
    """Axes of the data input: channels first, as everywhere in PyTorch, batched or not."""
    if extents is None:
        return None
    if kind in _NORMS:
        return _BY_RANK.get(len(extents))
    spatial = _SPATIAL_OP.fullmatch(kind)
    if spatial is None:
        return None
    axes = "NC" + SPATIAL[spatial[2]]
    return axes[len(axes) - len(extents) :] if len(extents) in (len(axes), len(axes) - 1) else None


def _describe_backward_op(context: OpContext) -> None:
    if context.is_forward():
        context["backward_type"] = context["weight_grad_index"] = None
        return
    node = context.get_backward_op().__name__
    context["backward_type"] = backward_type(node, context["type"])
    context["weight_grad_index"] = _weight_grad_index(context, node)


_NODE = re.compile(r"(.+?)((?:Backward)*)\d*")


def backward_type(node: str, kind: str) -> str:
    """The word for a node of the autograd graph that an op of type `kind` made.

    The node that computes the op's own gradient has the op's word, e.g. "conv2d_backward"; one
    that is a part of it has the word of its own: "transpose_backward" in the backward of linear.
    """
    stem, order = _stem_and_order(node)
    if stem != kind:
        stem = node_word(stem, kind)
    return stem + "_backward" * order


def _stem_and_order(node: str) -> tuple[str, int]:
    match = _NODE.fullmatch(node)
    assert match is not None
    return match[1], len(match[2]) // len("Backward")


def node_word(stem: str, kind: str) -> str:
    """The word for the stem of a node's name: "NativeBatchNorm" is batch_norm."""
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
    """`MaxPool2DWithIndices` as `max_pool2d_with_indices`."""
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
    weight = context["weight_index"]
    stem, order = _stem_and_order(node)
    if weight is None or order != 1 or context.get_backward_order() != 1:
        return None
    return _weight_grad_by_node(context["type"], weight, snake(stem))


def _weight_grad_by_node(kind: str, weight: int, name: str) -> int | None:
    if kind in _WEIGHT_GRAD_AT:
        return _WEIGHT_GRAD_AT[kind].get(name)
    if kind in MATRIX_PRODUCTS:
        return weight if word(name) in MATRIX_PRODUCTS else None
    return 1 if kind.startswith("conv") and "conv" in name else None
