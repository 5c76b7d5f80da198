"""JAX's half of StandardMapping: a rule, which the tools find by this distribution's entry point.

`standard` writes the keys that docs/vocabulary.md lists. It imports no tool.
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
_AXES = {1: "W", 2: "HW", 3: "DHW"}
_PRODUCTS = ("linear", "matmul")


def standard(context: OpContext) -> None:
    """Write every key of StandardMapping for an op of JAX."""
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
    kind, weight, layout, weight_layout = WORDS.get(name, name), None, None, None
    if name == "dot_general":
        kind, weight, weight_layout = _describe_product(context, inputs, attributes["dimension_numbers"])
    elif name == "conv_general_dilated":
        kind, layout, weight_layout = _describe_convolution(attributes)
        weight = 1
    elif name in ("reduce_window_max", "reduce_window_sum"):
        kind, layout = _describe_pooling(name, attributes)
    context["type"] = kind
    context["in_place"] = False
    context["weight_index"], context["layout"], context["weight_layout"] = weight, layout, weight_layout
    context["shape"], context["dtype"] = shape, dtype


def _describe_product(
    context: OpContext, inputs: Sequence[Any], numbers: Any
) -> tuple[str, int | None, str | None]:
    """Return the word for a product, its weight, and the axes of that.

    A product of an array with the one contracted axis of a matrix is a `linear`, if a model holds the matrix.
    """
    (lhs_axes, rhs_axes), batch = numbers
    variables = [context.get_variable(i) for i in (0, 1)]
    weights = [i for i in (0, 1) if variables[i] is not None]
    if len(weights) == 2:
        unsliced = [i for i in weights if not hasattr(variables[i], "parts")]
        # A weight that is sliced is a sequence that the program goes along.
        weights = unsliced if len(unsliced) == 1 else weights
    # Two weights, none, or a batch axis: which one a model would call its weight is not decidable.
    if len(weights) != 1 or any(batch):
        return "matmul", None, None
    index = weights[0]
    contracted = (lhs_axes, rhs_axes)[index]
    if len(inputs[index].shape) != 2 or len(contracted) != 1:
        return "matmul", None, None
    return "linear" if index == 1 else "matmul", index, "IO" if contracted[0] == 0 else "OI"


def _describe_convolution(attributes: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the word for a convolution, and the axes of its input and of its weight."""
    numbers = attributes["dimension_numbers"]
    rank = len(numbers.lhs_spec) - 2
    transposed = any(dilation != 1 for dilation in attributes["lhs_dilation"])
    word = f"conv{'_transpose' if transposed else ''}{rank}d"
    return word, _axes_text(numbers.lhs_spec, "NC", rank), _axes_text(numbers.rhs_spec, "OI", rank)


def _axes_text(places: Sequence[int], first: str, rank: int) -> str:
    """Spell axes in the order of indexing.  places: those of the axes named in `first`, then the window's."""
    axes = dict(zip(places, first + _AXES.get(rank, "?" * rank), strict=True))
    return "".join(axes[place] for place in sorted(axes))


def _describe_pooling(name: str, attributes: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the word for a pooling, and the axes of its input: channels are ahead of the window or last."""
    window = [i for i, extent in enumerate(attributes["window_dimensions"]) if extent > 1]
    rank = len(attributes["window_dimensions"]) - 2
    layout = None
    if rank in _AXES and window and window[0] > 0:
        if window[-1] <= rank:
            layout = f"N{_AXES[rank]}C"
        elif window[0] > 1:
            layout = f"NC{_AXES[rank]}"
    kind = "max" if name.endswith("max") else "avg"
    return f"{kind}_pool{rank if layout else max(len(window), 1)}d", layout


def _weight_grad_index(context: OpContext) -> int | None:
    """Return the index of the weight's gradient: a backward op returns gradients in the order of inputs."""
    index = context["weight_index"]
    if index is None:
        return None
    grads = context.get_grad_inputs() if context.is_after() else None
    try:
        extents = shape(context.get_inputs()[index])
    except AmandaError:
        return int(index)
    has_gradient = grads is None or (index < len(grads) and shape(grads[index]) == extents)
    return int(index) if has_gradient else None
