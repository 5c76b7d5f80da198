"""MindSpore's rule of StandardMapping: it writes an op's type, phase, layout and weight into its context.

Tools find `standard` by this distribution's entry point. docs/vocabulary.md lists the keys; StandardMapping
takes `weight_layout` and `weight_groups` from a table. It imports no tool.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from amanda import AmandaError, OpContext
from mindspore import Parameter

from ._autograd import ACCUMULATE_GRAD
from ._targets import operator_of

_LAYOUT_BY_RANK = {2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}
_WEIGHT_INDEX_BY_TYPE = {
    "linear": 1, "batch_norm": 1, "instance_norm": 1, "layer_norm": 1, "group_norm": 2, "prelu": 1,
}  # fmt: skip


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op; a backward op has those of its forward op already."""
    if "shape" not in context:
        context["phase"] = "optimizer" if _in_optimizer() else "forward"
        _describe_op(context)
    if context.is_backward():
        context["phase"] = "backward"
    _describe_backward_op(context)


def shape(value: Any) -> tuple[int, ...] | None:
    """Return the extents of a tensor; None for other values."""
    extents = None if isinstance(value, type) else getattr(value, "shape", None)
    return None if extents is None else tuple(extents)


def dtype(value: Any) -> str | None:
    """Return the name of a tensor's dtype; None for other values."""
    kind = None if isinstance(value, type) else getattr(value, "dtype", None)
    return None if kind is None else str(kind).lower().removeprefix("mindspore.")


def word(operator: str) -> str:
    """Return the vocabulary's word for an operator, or its name if there is none."""
    return WORDS.get(operator, operator)


def _in_optimizer() -> bool:
    """Return True if an optimizer of MindSpore is among the callers."""
    # An optimizer calls the same operators as a network, so only the stack tells them apart.
    frame: Any = sys._getframe(1)
    while frame is not None:
        if "/mindspore/nn/optim/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _describe_op(context: OpContext) -> None:
    """Write the keys that describe an op."""
    name, inputs = context.get_forward_op_type(), context.get_inputs()
    # An operator in place has the word of the operator; `in_place` tells them apart.
    base_name = name.removeprefix("inplace_")
    base_name = base_name.removesuffix("_") if not base_name.endswith("__") else base_name
    kind = word(base_name)
    # nn.Embedding gathers rows of its table; a gather from another tensor is an indexing.
    if base_name == "gather" and inputs and isinstance(inputs[0], Parameter):
        kind = "embedding"
    weight = weight_index(kind, base_name, inputs, context.get_variable)
    context["type"] = kind
    context["in_place"] = base_name != name or name in ("setitem", "assign", "assign_add", "assign_sub")
    context["weight_index"] = weight
    context["layout"] = layout(kind, shape(inputs[0]) if inputs else None, context.get_attrs())
    context["shape"], context["dtype"] = shape, dtype  # the functions, for tools to read any tensor


def weight_index(
    kind: str, name: str, inputs: Sequence[Any], variable_of: Callable[[int], Any]
) -> int | None:
    """Return the position of an op's weight among its inputs: by the op's schema, else None.

    In a product it is the factor that is a parameter's, if the other is not.
    kind: word for the op.  variable_of: returns the parameter that the input at a position is, or shows.
    """
    if kind == "matmul":
        parameter_positions = [i for i in (0, 1) if i < len(inputs) and isinstance(variable_of(i), Parameter)]
        return parameter_positions[0] if len(parameter_positions) == 1 else None
    if kind == "embedding":
        index: int | None = 0 if name == "gather" else 1
    elif name == "layer_norm_ext":
        index = 2  # the second argument is the normalised shape
    else:
        index = 1 if CONVOLUTION.fullmatch(kind) else _WEIGHT_INDEX_BY_TYPE.get(kind)
    is_tensor = index is not None and index < len(inputs) and shape(inputs[index]) is not None
    return index if is_tensor else None


def layout(kind: str, extents: Sequence[int] | None, attributes: dict[str, Any]) -> str | None:
    """Return the axes of the data input of a convolution, pooling or normalisation: "NCHW"; else None."""
    if extents is None or not (SPATIAL.fullmatch(kind) or kind in ("batch_norm", "group_norm")):
        return None
    data_format = attributes.get("data_format")
    if isinstance(data_format, str) and len(data_format) == len(extents):
        return data_format
    return _LAYOUT_BY_RANK.get(len(extents))


def _describe_backward_op(context: OpContext) -> None:
    """Write the keys that describe a backward op; None for each at a forward op."""
    if context.is_forward():
        context["backward_type"] = context["weight_grad_index"] = None
        return
    node_name = context.get_backward_op().__name__
    context["backward_type"] = backward_type(node_name, context["type"])
    context["weight_grad_index"] = _weight_grad_index(context)


def backward_type(node_name: str, kind: str) -> str:
    """Return the word for an autograd node of an op of type `kind`.

    The node that computes the op's gradient has the op's word, such as "conv2d_backward"; a node for a part
    of the op has another word.
    """
    if node_name == ACCUMULATE_GRAD.__name__:
        return "accumulate_grad"
    node_word = word(operator_of(node_name.removesuffix("Backward")))
    # The gradient node of an embedding is named after the kernel that looks rows up.
    if kind == "embedding" and node_word in ("gather", "index_select"):
        node_word = kind
    return f"{node_word}_backward"


def _weight_grad_index(context: OpContext) -> int | None:
    """Return the position of the weight's gradient, as among the inputs; None of another node or shape."""
    index, kind = context["weight_index"], context["type"]
    if index is None or context["backward_type"] != f"{kind}_backward":
        return None
    grads = context.get_grad_inputs() if context.is_after() else None
    if grads is None:
        return int(index)
    try:
        weight_shape = shape(context.get_inputs()[index])
    except AmandaError:  # the inputs are dropped after the op's first execution
        return int(index)
    has_gradient = index < len(grads) and grads[index] is not None
    return int(index) if has_gradient and shape(grads[index]) == weight_shape else None


CONVOLUTION = re.compile(r"(conv_transpose|conv)([123])d")
SPATIAL = re.compile(r"(?:conv_transpose|conv|max_pool|avg_pool|adaptive_avg_pool)[123]d")

_OPERATORS_BY_WORD = {
    "add": "add_ext add_scalar adds assign_add accumulate_n_v2",
    "add_n": "addn",
    "amax": "reduce_max",
    "amin": "reduce_min",
    "all": "reduce_all",
    "any": "reduce_any",
    "argmax": "argmax_ext arg_max_with_value",
    "argmin": "argmin_ext arg_min_with_value",
    "avg_pool2d": "avg_pool avg_pool2d",
    "adaptive_avg_pool2d": "adaptive_avg_pool2d_ext adaptive_avg_pool_2d",
    "batch_norm": "batch_norm_ext sync_batch_norm",
    "bitwise_not": "logical_not",
    "cat": "concat",
    "clamp": "clamp_scalar clamp_tensor clip_by_value",
    "conv1d": "conv1d_ext conv1d_padding",
    "conv2d": "conv2d_ext conv2d_padding convolution",
    "conv3d": "conv3d_ext conv3d_padding",
    "conv_transpose2d": "conv2d_transpose conv2d_backprop_input",
    "cross_entropy": "softmax_cross_entropy_with_logits sparse_softmax_cross_entropy_with_logits "
    "cross_entropy_loss",
    "div": "divs divmod divmods real_div xdivy",
    "dropout": "dropout_ext func_dropout_ext dropout_do_mask_ext",
    "elu": "elu_ext",
    "eq": "equal eq_scalar",
    "expand": "broadcast_to expand_as",
    "flip": "reverse_v2 reverse",
    "floor_divide": "floor_div floor_div_scalar",
    "ge": "greater_equal greater_equal_scalar",
    "gelu": "ge_lu gelu_ext",
    "getitem": "select_view select_ext_view slice slice_ext slice_ext_view strided_slice narrow narrow_view",
    "group_norm": "group_norm_ext",
    "gt": "greater",
    "layer_norm": "layer_norm_ext layer_norm_v3",
    "le": "less_equal",
    "leaky_relu": "leaky_relu_ext",
    "linear": "dense",
    "log_softmax": "log_softmax_ext",
    "lt": "less",
    "matmul": "matmul_ext mm mm_ext bmm bmm_ext batch_mat_mul mat_mul matrix_multiply",
    "max_pool2d": "max_pool max_pool_with_argmax_v2 max_pool_with_indices max_pool_with_mask",
    "max_pool3d": "max_pool3d",
    "mean": "reduce_mean mean_ext",
    "mul": "muls",
    "ne": "not_equal ne_scalar",
    "neg": "negative",
    "nll_loss": "nllloss nll_loss_2d",
    "numpy": "asnumpy",
    "one_hot": "one_hot_ext",
    "permute": "transpose transpose_view",
    "pow": "pow_tensor_scalar pow_scalar_tensor",
    "prod": "reduce_prod prod_ext",
    "prelu": "p_re_lu",
    "relu": "re_lu",
    "relu6": "re_lu6",
    "remainder": "floor_mod remainder_tensor_tensor remainder_tensor_scalar mod",
    "reshape": "view flatten flatten_ext view_as",
    "setitem": "tensor_scatter_update",
    "silu": "si_lu swish",
    "split": "split_tensor split_with_size split_tensor_view split_with_size_view chunk chunk_view",
    "squeeze": "squeeze_view",
    "stack": "stack_ext",
    "sub": "sub_ext sub_scalar subs assign_sub",
    "sum": "reduce_sum sum_ext",
    "to": "cast to_dtype",
    "transpose": "transpose_ext_view swapaxes t t_ext",
    "unbind": "unstack unstack_ext_view",
    "unsqueeze": "expand_dims expand_dims_view",
    "where": "select",
}

WORDS = {name: word for word, names in _OPERATORS_BY_WORD.items() for name in names.split()}
"""The vocabulary's word by MindSpore's name of an operator, where they differ."""
