"""JAX's rule of StandardMapping: `standard` writes an op's type, phase, layouts and weight into its context.

Tools find the rule by this distribution's entry point; docs/vocabulary.md lists the keys. It imports no tool.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from amanda import AmandaError, OpContext

WORDS: Mapping[str, str] = {
    "argmax": "argmax", "argmin": "argmin", "and": "bitwise_and", "not": "bitwise_not", "or": "bitwise_or",
    "broadcast_in_dim": "expand", "concatenate": "cat", "convert_element_type": "to",
    "cumsum": "cumsum", "dynamic_slice": "getitem", "gather": "getitem", "slice": "getitem",
    "scatter": "setitem", "dynamic_update_slice": "setitem", "integer_pow": "pow", "logistic": "sigmoid",
    "max": "maximum", "min": "minimum",
    "ragged_dot_general": "grouped_mm", "reduce_max": "amax", "reduce_min": "amin", "reduce_sum": "sum",
    "reduce_and": "all", "reduce_or": "any", "reduce_prod": "prod", "rem": "remainder", "select_n": "where",
    "squeeze": "squeeze", "expand_dims": "unsqueeze", "transpose": "permute",
    "stop_gradient": "detach", "copy": "clone", "copy_p": "clone", "rev": "flip",
}  # fmt: skip
"""Words for primitives whose own name is another; `jax.nn.relu` and its like have theirs as functions."""
_WINDOW_AXES = {1: "W", 2: "HW", 3: "DHW"}
_PRODUCTS = ("linear", "matmul")


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op; a backward op has those of its forward op already."""
    if "shape" not in context:
        # Optax' updates bind the same primitives as a model, so only the file of the calling line tells them
        # apart.
        context["phase"] = "optimizer" if "/optax/" in context.get_source() else "forward"
        _describe_op(context)
    if context.is_backward():
        context["phase"] = "backward"
        context["backward_type"] = f"{context['type']}_backward"
        context["weight_grad_index"] = _weight_grad_index(context)
    else:
        context["backward_type"] = context["weight_grad_index"] = None


def shape(value: Any) -> tuple[int, ...] | None:
    """Return the extents of an array; None for any other value."""
    extents = None if isinstance(value, type) else getattr(value, "shape", None)
    return None if extents is None else tuple(extents)


def dtype(value: Any) -> str | None:
    """Return the name of an array's element type; None for any other value."""
    kind = None if isinstance(value, type) else getattr(value, "dtype", None)
    return None if kind is None else str(kind)


def _describe_op(context: OpContext) -> None:
    """Write the keys of StandardMapping that forward and backward ops share."""
    name, inputs, attributes = context.get_forward_op_type(), context.get_inputs(), context.get_attrs()
    word, weight_index, layout, weight_layout = WORDS.get(name, name), None, None, None
    if name == "dot_general":
        word, weight_index, weight_layout = _describe_product(context, inputs, attributes)
    elif name == "conv_general_dilated":
        word, layout, weight_layout = _describe_convolution(attributes)
        weight_index = 1
    elif name in ("reduce_window_max", "reduce_window_sum"):
        word, layout = _describe_pooling(name, attributes)
    context["type"] = word
    context["in_place"] = False
    context["weight_index"] = weight_index
    context["layout"], context["weight_layout"] = layout, weight_layout
    context["shape"], context["dtype"] = shape, dtype  # the functions, for tools to read any array


def _describe_product(
    context: OpContext, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> tuple[str, int | None, str | None]:
    """Return the word for a product, the index of its weight, and the weight's axes: "IO" or "OI".

    A product of an array with the one contracted axis of a matrix is a `linear`, if a model holds the matrix,
    or a "matmul" with a weight if that is on the left. Without one such matrix it is a "matmul" without one.
    """
    contracted_axes, batch_axes = attributes["dimension_numbers"]  # each of the left and of the right input
    variables = [context.get_variable(i) for i in (0, 1)]
    weight_indices = [i for i in (0, 1) if variables[i] is not None]
    if len(weight_indices) == 2:
        # A weight that is sliced, a stack with `parts`, is a sequence that the program goes along.
        unsliced = [i for i in weight_indices if not hasattr(variables[i], "parts")]
        weight_indices = unsliced if len(unsliced) == 1 else weight_indices
    # Two weights, none, or a batch axis: which one a model would call its weight is not decidable.
    if len(weight_indices) != 1 or any(batch_axes):
        return "matmul", None, None
    (weight_index,) = weight_indices
    weight_axes = contracted_axes[weight_index]
    if len(inputs[weight_index].shape) != 2 or len(weight_axes) != 1:
        return "matmul", None, None
    return "linear" if weight_index == 1 else "matmul", weight_index, "IO" if weight_axes[0] == 0 else "OI"


def _describe_convolution(attributes: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the word for a convolution, and the axes of its input and of its weight."""
    numbers = attributes["dimension_numbers"]
    rank = len(numbers.lhs_spec) - 2
    is_transposed = any(dilation != 1 for dilation in attributes["lhs_dilation"])
    word = f"conv{'_transpose' if is_transposed else ''}{rank}d"
    return word, _axes_text(numbers.lhs_spec, "NC", rank), _axes_text(numbers.rhs_spec, "OI", rank)


def _axes_text(positions: Sequence[int], first_axes: str, rank: int) -> str:
    """Spell axes in order: "NHWC".  positions: of the axes in `first_axes`, then of the window's axes."""
    axis_by_position = dict(zip(positions, first_axes + _WINDOW_AXES.get(rank, "?" * rank), strict=True))
    return "".join(axis_by_position[position] for position in sorted(positions))


def _describe_pooling(name: str, attributes: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the word for a pooling, and its input's axes; None if the window's extents leave these open.

    The word's number is that of the spatial axes; if those are open, of the axes that are pooled.
    """
    extents = attributes["window_dimensions"]
    rank = len(extents) - 2
    pooled_axes = [i for i, extent in enumerate(extents) if extent > 1]
    layout = None
    if rank in _WINDOW_AXES and pooled_axes and pooled_axes[0] > 0:
        if pooled_axes[-1] <= rank:  # not the last axis, which has the channels
            layout = f"N{_WINDOW_AXES[rank]}C"
        elif pooled_axes[0] > 1:  # not the second axis, which has the channels
            layout = f"NC{_WINDOW_AXES[rank]}"
    kind = "max" if name.endswith("max") else "avg"
    return f"{kind}_pool{rank if layout else max(len(pooled_axes), 1)}d", layout


def _weight_grad_index(context: OpContext) -> int | None:
    """Return the index of the weight's gradient, the same as among the inputs; None if shapes differ."""
    index = context["weight_index"]
    if index is None:
        return None
    grads = context.get_grad_inputs() if context.is_after() else None
    try:
        weight_shape = shape(context.get_inputs()[index])
    except AmandaError:  # the inputs are dropped after the op's first execution
        return int(index)
    has_gradient = grads is None or (index < len(grads) and shape(grads[index]) == weight_shape)
    return int(index) if has_gradient else None
