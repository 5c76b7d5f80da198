"""Values of ops and arguments of their rules; a move rearranges any array as an op of a framework does."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from string import ascii_letters
from typing import TYPE_CHECKING, Any, TypeAlias

import amanda
from amanda.tools.axes import windows_of
from amanda.tools.effective_path._rules import OUTSIDE, READING_FIRST_INPUT, WINDOWED, Indices, InputIndex
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import are_transposed, local, spatial_axes
from amanda.tools.trace import Op

if TYPE_CHECKING:
    from numpy.typing import NDArray


def jax_rule_key(context: amanda.OpContext) -> str:
    """Return the key of an op's rule: a product over axes of any order is an einsum."""
    op_type: str = context["type"]
    return "einsum" if context.get_forward_op_type() == "dot_general" and op_type != "linear" else op_type


def jax_attributes(context: amanda.OpContext) -> Mapping[str, Any]:
    """Return the parameters of a primitive; for dot_general also its einsum equation, as "equation"."""
    parameters = context.get_attrs()
    if context.get_forward_op_type() != "dot_general":
        return parameters
    ranks = [len(tensor.shape) for tensor in context.get_inputs()]
    contracted_axes, batch_axes = parameters["dimension_numbers"]
    return {**parameters, "equation": _einsum_equation(ranks, contracted_axes, batch_axes)}


def _einsum_equation(ranks: Sequence[int], contracted_axes: Sequence[Any], batch_axes: Sequence[Any]) -> str:
    """Return the einsum equation of a dot_general: axes of the batch, of the first factor, of the second.

    contracted_axes, batch_axes: pairs of lists of axes, one list for each factor.
    """
    unused_letters = iter(ascii_letters)
    first_letters, second_letters = ([""] * rank for rank in ranks)  # "" for an axis without a letter yet
    batch_letters = []
    for first_axis, second_axis in zip(*batch_axes, strict=True):
        first_letters[first_axis] = second_letters[second_axis] = next(unused_letters)
        batch_letters.append(first_letters[first_axis])
    for first_axis, second_axis in zip(*contracted_axes, strict=True):
        first_letters[first_axis] = second_letters[second_axis] = next(unused_letters)
    # All other axes are of one factor alone, and so of the result.
    free_letters = []
    for factor_letters in (first_letters, second_letters):
        for axis, letter in enumerate(factor_letters):
            if not letter:
                factor_letters[axis] = next(unused_letters)
                free_letters.append(factor_letters[axis])
    first, second, result = map("".join, (first_letters, second_letters, [*batch_letters, *free_letters]))
    return f"{first},{second}->{result}"


Move: TypeAlias = "Callable[[NDArray[Any]], Any]"
"""Function that moves the elements of an array as an op moves the elements of its input.

The rule `rearrangement` gives it the flat indices of the input; -1 in its result is no element of the input.
"""


def jax_moves(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of JAX by op type; some raise NotImplementedError for parameters that no move has."""
    parameters = op.attributes

    def broadcast(a: NDArray[Any]) -> NDArray[Any]:
        """Return an array broadcast to the shape of the result."""
        extents = [1] * len(parameters["shape"])
        # JAX names the axes of the result that the operand's axes become; all others are new.
        for axis, size in zip(parameters["broadcast_dimensions"], a.shape, strict=True):
            extents[axis] = size
        return np.broadcast_to(a.reshape(extents), parameters["shape"])

    def slice_input(a: NDArray[Any]) -> NDArray[Any]:
        """Return the slice between constant bounds; raise NotImplementedError for computed ones."""
        if "start_indices" not in parameters:
            raise NotImplementedError("a gather, or a slice from a computed index")
        steps = parameters["strides"] or [None] * a.ndim
        return a[tuple(map(slice, parameters["start_indices"], parameters["limit_indices"], steps))]

    def pad(a: NDArray[Any]) -> NDArray[Any]:
        """Pad with -1; raise NotImplementedError for padding between elements, and for crops."""
        config = parameters["padding_config"]
        widths_by_axis = [(before, behind) for before, behind, _between in config]
        has_interior = any(between for *_, between in config)
        crops = any(width < 0 for widths in widths_by_axis for width in widths)
        # np.pad has no form for padding between elements, nor for cropping.
        if has_interior or crops:
            raise NotImplementedError(f"a pad by {config}")
        return np.pad(a, widths_by_axis, constant_values=-1)

    return {
        "permute": lambda a: a.transpose(parameters["permutation"]), "expand": broadcast,
        "getitem": slice_input, "pad": pad, "flip": lambda a: np.flip(a, parameters["dimensions"]),
    }  # fmt: skip


_NON_NUMERIC_DTYPES = ("resource", "variant", "string", "complex")
_FUSED_TYPES = ("FusedConv", "MultiHeadAttention", "SkipLayerNormalization")


def to_host_array(tensor: Any) -> NDArray[Any] | None:
    """Return a copy on the host, float32 if NumPy lacks the type; None for nested and meta tensors.

    Of a distributed tensor it has the part of this process.
    """
    if getattr(tensor, "is_nested", False) or getattr(tensor, "is_meta", False):
        return None
    host_array = np.array(tensors_of(tensor).to_numpy(local(tensor)))
    is_numpy_dtype = host_array.dtype.isbuiltin == 1
    # Element types of ml_dtypes, such as bfloat16: float32 holds each of them exactly.
    return host_array if is_numpy_dtype else host_array.astype(np.float32)


@dataclass(eq=False)
class OpValues:
    """An execution of an op of the program: copies of its inputs and outputs, and facts for the op's rule.

    type: the key of its rule.  weight, layout, weight_layout, dtype: as StandardMapping writes them.
    moves: function of the framework that returns moves by op type.  reads_shapes_alone: True if the rule
    reads no values.  inputs, outputs: arrays, and values that are not tensors.
    """

    type: str
    attributes: Mapping[str, Any]
    weight: int | None
    layout: str | None
    weight_layout: str | None
    moves: Callable[[OpValues], Mapping[str, Move]]
    dtype: Callable[[Any], str | None]
    reads_shapes_alone: bool
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()

    def copy_for_rules(self, value: Any) -> Any:
        """Copy a tensor, or a list of them, for rules; other values, and tensors of no numbers, stay.

        If rules read shapes alone, tensors of three axes or more become zeros that take no memory.
        """
        if isinstance(value, (list, tuple)):
            return [self.copy_for_rules(item) for item in value]
        dtype = self.dtype(value)
        if dtype is None or dtype.startswith(_NON_NUMERIC_DTYPES):
            return value
        # A view of one zero instead of a copy: rules of moved elements read nothing but shapes.  Smaller
        # tensors may be scores or indices, which are read.
        if self.reads_shapes_alone and len(value.shape) > 2:
            return np.broadcast_to(np.float32(0), tuple(value.shape))
        return to_host_array(value)

    def find_varying_inputs(self, op: Op, varying_tensors: Container[Any]) -> list[InputIndex]:
        """Return the indices of the op's inputs that vary with the model's inputs.

        Weights, and the scales and statistics of norms, never do, even if they are among varying_tensors.
        """
        return [
            (position, i) for position, tensor_or_list in enumerate(op.inputs)
            for i, tensor in enumerate(
                tensor_or_list if isinstance(tensor_or_list, tuple) else (tensor_or_list,)
            )
            # Statistics of a norm may be updated, but do not depend on the model's inputs.
            if tensor in varying_tensors and position != self.weight
            and (position == 0 or self.type not in READING_FIRST_INPUT)
        ]  # fmt: skip

    def rule_arguments(self) -> dict[str, Any]:
        """Return the arguments of the op's rule by name: `tables`, `axes`, `scales`, `move`, ..."""
        # Scales are needed to fold a constant into the sum before it; the op's own rule needs nothing else.
        if self.type in SCALES:
            return {"scales": SCALES[self.type](self)}
        if self.type in _ARGUMENTS:
            return _ARGUMENTS[self.type](self)
        move = self.moves(self).get(self.type)
        return {} if move is None else {"move": move}

    def attribute_or_input(self, *names: str, at: int | None = None, default: Any = None) -> Any:
        """Return the first attribute of these names that is not None, else the input at a position.

        Returns `default` if there is neither, and if the input is a list.
        """
        value = next((self.attributes[name] for name in names if self.attributes.get(name) is not None), None)
        if value is None and at is not None and at < len(self.inputs):
            value = None if isinstance(self.inputs[at], (list, tuple)) else self.inputs[at]
        return default if value is None else value

    def integers(self, *names: str, at: int | None = None) -> list[int]:
        """Return `attribute_or_input` as a list of integers, empty if there is neither."""
        return [int(number) for number in np.atleast_1d(self.attribute_or_input(*names, at=at, default=()))]


def _reduced_axes(op: OpValues) -> list[int] | None:
    """Return the axes of a reduction; None for all axes, also for an empty list, but not in TensorFlow."""
    axes = op.integers("dim", "axes", at=1)
    # TensorFlow means no axis by an empty list, and the others mean all.
    return axes if axes or "keep_dims" in op.attributes else None


def _attention_arguments(op: OpValues) -> dict[str, Any]:
    """Return the mask, causality and scale of an attention."""
    mask = next((value for value in op.inputs[3:] if isinstance(value, np.ndarray)), None)
    return {"mask": mask, "causal": op.attributes.get("is_causal"), "scale": op.attributes.get("scale")}


def _window_tables(op: OpValues) -> list[Indices]:
    """Return for each spatial axis (outputs, window) coordinates of inputs, OUTSIDE for the padding."""
    layout, weight_layout = op.layout or "", op.weight_layout
    axes = spatial_axes(layout)
    input_sizes = [op.inputs[0].shape[i] for i in axes]
    output_sizes = [op.outputs[0].shape[i] for i in axes]
    if op.type.startswith("adaptive"):
        tables = list(map(_adaptive_windows, input_sizes, output_sizes))
    else:
        kernel: list[int] = []  # empty for a pooling, whose window is among the attributes
        if weight_layout:
            kernel = [op.inputs[1].shape[weight_layout.index(layout[i])] for i in axes]
        tables = [
            window.positions(input_size, output_size)
            for window, input_size, output_size in zip(
                windows_of(op.attributes, layout, kernel), input_sizes, output_sizes, strict=True
            )
        ]
    return [
        # Padding is not an element: its coordinate makes the flat index negative.
        np.where((table >= 0) & (table < size), table, OUTSIDE)
        for table, size in zip(tables, input_sizes, strict=True)
    ]


def _adaptive_windows(size: int, count: int) -> Indices:
    """Return (outputs, window) positions for adaptive windows, which divide an axis and may overlap.

    size: of the axis.  count: number of windows.  Positions past the end of a window are `size`.
    """
    starts = np.arange(count) * size // count
    # Rounded up, as PyTorch rounds the ends of adaptive windows.
    ends = -(-(np.arange(1, count + 1) * size) // count)
    positions = starts[:, None] + np.arange((ends - starts).max())
    return np.where(positions < ends[:, None], positions, size)


def _norm_scales(op: OpValues) -> Sequence[Any]:
    """Return the scales by which a batch norm multiplies the channels of its first input, in a list of one.

    The scales broadcast with the input.  In training the variance is the batch's.
    """
    data, gamma, _beta, _mean, running_variance = op.inputs[:5]
    # TensorFlow's attribute tells its op from those of frameworks with the channels in the second place.
    default_layout = "NHWC" if "is_training" in op.attributes else "NC"
    channel = (op.layout or default_layout).index("C")
    variance = running_variance
    if variance is None or op.attribute_or_input("training", "is_training", "training_mode"):
        variance = data.var(axis=tuple(axis for axis in range(data.ndim) if axis != channel))
    epsilon = op.attribute_or_input("eps", "epsilon", default=1e-5)
    # In float64: the sum of contributions is compared with theta times the value, and rounding would decide.
    scale = (1 if gamma is None else gamma) / np.sqrt(variance.astype(np.float64) + epsilon)
    return [scale.reshape([-1 if axis == channel else 1 for axis in range(data.ndim)])]


_ARGUMENTS: dict[str, Callable[[OpValues], dict[str, Any]]] = {
    **dict.fromkeys(WINDOWED, lambda op: {"tables": _window_tables(op)}),
    **dict.fromkeys(("mean", "sum", "amax"), lambda op: {"axes": _reduced_axes(op)}),
    "cat": lambda op: {"axis": int(op.attribute_or_input("dim", "axis", at=1, default=0))},
    "stack": lambda op: {"axis": int(op.attribute_or_input("dim", "axis", default=0))},
    "einsum": lambda op: {"equation": _decode_text(op.attribute_or_input("equation", at=0))},
    "linear": lambda op: {"transposed": (False, op.weight_layout != "IO")},
    "matmul": lambda op: {"transposed": are_transposed(op.attributes)},
    "scaled_dot_product_attention": _attention_arguments,
}
"""Functions that return the arguments of a rule, by the word of the op."""

SCALES: dict[str, Callable[[OpValues], Sequence[Any]]] = {
    "BiasAdd": lambda op: (1, 1), "bias_add": lambda op: (1, 1), "neg": lambda op: (-1,),
    "add": lambda op: (1, op.attributes.get("alpha", 1)),
    "sub": lambda op: (1, -op.attributes.get("alpha", 1)),
    "rsub": lambda op: (-op.attributes.get("alpha", 1), 1),
    # Each factor scales the other one.
    "mul": lambda op: op.inputs[:2][::-1], "div": lambda op: op.inputs[1:2], "batch_norm": _norm_scales,
}  # fmt: skip
"""Functions that return the factor of each input, by the word of the op; for `div` the divisor."""


def _all_moves(op: OpValues, framework_moves: Mapping[str, Move]) -> Mapping[str, Move]:
    """Return the moves by op type: those that all frameworks share, overridden by those of one framework."""
    axis = op.attribute_or_input("dim", "axis", default=0)

    def split_as_outputs(a: NDArray[Any]) -> list[NDArray[Any]]:
        # Some frameworks give the parts as a list, others as several outputs.
        parts = op.outputs[0] if isinstance(op.outputs[0], list) else op.outputs
        return np.split(a, np.cumsum([part.shape[axis] for part in parts])[:-1], axis=axis)

    def broadcast_to_output(a: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(a, op.outputs[0].shape)

    return {
        **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk"), split_as_outputs),
        **dict.fromkeys(("expand", "expand_as"), broadcast_to_output),
        "unbind": lambda a: [np.take(a, i, axis=axis) for i in range(a.shape[axis])], **framework_moves,
    }  # fmt: skip


def _torch_moves(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of PyTorch by op type; each reads the arguments of the op's call."""
    attributes, dim = op.attributes, op.attributes.get("dim", 0)

    def pad(a: NDArray[Any]) -> NDArray[Any]:
        """Pad indices as `pad` of PyTorch does; raise NotImplementedError as `_pad_indices` does."""
        # PyTorch lists the widths before and behind each axis from the last axis on, NumPy from the first.
        widths_before, widths_behind = attributes["pad"][::2], attributes["pad"][1::2]
        last_widths = list(zip(widths_before, widths_behind, strict=True))[::-1]
        return _pad_indices(a, [(0, 0)] * (a.ndim - len(last_widths)) + last_widths, attributes)

    def permute(a: NDArray[Any]) -> NDArray[Any]:
        """Move the named axes, or put all in an order; reverse them without arguments."""
        if "source" in attributes:
            return np.moveaxis(a, attributes["source"], attributes["destination"])
        return np.transpose(a, attributes.get("dims"))

    def transpose(a: NDArray[Any]) -> NDArray[Any]:
        """Exchange two axes, by default the last two, as `mT` has no arguments; a vector stays, as by `T`."""
        first_axis = int(op.attribute_or_input("dim0", "axis0", default=-2))
        second_axis = int(op.attribute_or_input("dim1", "axis1", default=-1))
        return a.swapaxes(first_axis, second_axis) if a.ndim > 1 else a

    return _all_moves(op, {
        "permute": permute, "transpose": transpose,
        "getitem": lambda a: a[_numpy_index(attributes["index"])],
        "select": lambda a: np.take(a, attributes["index"], axis=dim),
        "narrow": lambda a: np.take(a, attributes["start"] + np.arange(attributes["length"]), axis=dim),
        "flip": lambda a: np.flip(a, attributes.get("dims")), "pad": pad,
        "index_select": lambda a: np.take(a, op.inputs[2], axis=dim),
        "repeat": lambda a: np.tile(a, attributes["repeats"]),
        "roll": lambda a: np.roll(a, attributes["shifts"], attributes.get("dims") or None),
    })  # fmt: skip


def _tensorflow_moves(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of TensorFlow by op type; arguments such as axes are constant inputs of the op."""

    def slice_input(a: NDArray[Any]) -> Any:
        """Return the part that a StridedSlice, or a Slice if there is no step, reads."""
        starts, ends_or_sizes, *steps = (op.integers(at=i) for i in range(1, len(op.inputs)))
        if steps:
            return a[_strided_slice_index(starts, ends_or_sizes, steps[0], op.attributes)]
        # -1 stands for the rest of the axis.
        ends = [None if size < 0 else start + size for start, size in zip(starts, ends_or_sizes, strict=True)]
        return a[tuple(map(slice, starts, ends))]

    return _all_moves(op, {
        "permute": lambda a: a.transpose(op.integers(at=1)), "getitem": slice_input,
        "split": lambda a: np.split(a, op.attributes["num_split"], axis=int(op.inputs[0])),
        **dict.fromkeys(("pad", "Pad", "PadV2"), lambda a: _pad_indices(a, op.inputs[1].tolist(), {})),
    })  # fmt: skip


def _onnx_moves(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of ONNX by op type.

    Arguments such as axes are constant inputs of the op, or attributes in older models.
    """

    def slice_input(a: NDArray[Any]) -> NDArray[Any]:
        """Return the part that a Slice reads; axes that it does not name are read whole."""
        starts, ends = op.integers("starts", at=1), op.integers("ends", at=2)
        axes = op.integers("axes", at=3) or range(len(starts))
        steps = op.integers(at=4) or [1] * len(starts)
        index = [slice(None)] * a.ndim
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
            index[axis] = _clipped_slice(start, end, step, a.shape[axis])
        return a[tuple(index)]

    def pad(a: NDArray[Any]) -> NDArray[Any]:
        """Pad indices as Pad of ONNX does; raise NotImplementedError as `_pad_indices` does."""
        # ONNX lists the widths before all axes first, then those behind them.
        widths = op.integers("pads", at=1)
        axis_count = len(widths) // 2
        widths_before, widths_behind = widths[:axis_count], widths[axis_count:]
        widths_by_axis = [(0, 0)] * a.ndim
        padded_axes = op.integers(at=3) or range(axis_count)
        for axis, before, behind in zip(padded_axes, widths_before, widths_behind, strict=True):
            widths_by_axis[axis] = (before, behind)
        return _pad_indices(a, widths_by_axis, op.attributes)

    return _all_moves(op, {
        "permute": lambda a: a.transpose(op.attributes.get("perm")), "getitem": slice_input, "pad": pad
    })  # fmt: skip


def _pad_indices(
    indices: NDArray[Any], widths_by_axis: Sequence[Sequence[int]], attributes: Mapping[str, Any]
) -> NDArray[Any]:
    """Pad flat indices with -1, no element; raise NotImplementedError for other modes, and for crops."""
    mode = _decode_text(attributes.get("mode", "constant"))
    if mode != "constant" or min(map(min, widths_by_axis), default=0) < 0:
        raise NotImplementedError(f"a pad in mode {mode} by {widths_by_axis}")
    return np.pad(indices, widths_by_axis, constant_values=-1)


def _numpy_index(index: Any) -> Any:
    """Return an index with arrays of NumPy for its tensors; a list of indices becomes a tuple."""
    if isinstance(index, (list, tuple)):
        return tuple(map(_numpy_index, index))
    return to_host_array(index) if hasattr(index, "detach") else index


def _clipped_slice(first: int, last: int, step: int, size: int) -> slice:
    """Return the slice of NumPy for bounds of ONNX: those before the start of the axis count as the start.

    NumPy would count a bound that is still negative from the end again.
    """
    first, last = (bound + size if bound < 0 else bound for bound in (first, last))
    if last < 0:
        # A negative step runs through element 0, for which NumPy's slices have no number.
        return slice(max(first, 0), None if step < 0 else 0, step)
    return slice(max(first, 0), last, step)


def _strided_slice_index(
    begin: Sequence[int], end: Sequence[int], step: Sequence[int], attributes: Mapping[str, Any]
) -> Any:
    """Return the index of NumPy for a StridedSlice, a tuple with one entry for each of `begin`."""

    def index_entry(i: int) -> Any:
        """Return entry i: an ellipsis, None for a new axis, an integer for an axis that goes, or a slice."""
        masks = ("ellipsis", "new_axis", "shrink_axis", "begin", "end")
        # Bit i of each mask is about entry i of the slice.
        masks_set = {mask for mask in masks if int(attributes.get(f"{mask}_mask", 0)) >> i & 1}
        if "ellipsis" in masks_set:
            return ...
        if "new_axis" in masks_set:
            return None
        if "shrink_axis" in masks_set:
            return begin[i]
        return slice(
            None if "begin" in masks_set else begin[i], None if "end" in masks_set else end[i], step[i]
        )

    return tuple(map(index_entry, range(len(begin))))


def _decode_text(value: Any) -> str:
    """Return a text, decoded if it is bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _onnx_rule_key(context: amanda.OpContext) -> str:
    """Return the key of a node's rule: the mapped type, or ONNX's own if the node computes more.

    There are rules for mapped types alone, so a fused or quantised node has none.
    """
    onnx_type, inputs = context.get_forward_op_type(), context.get_inputs()
    is_quantised = onnx_type.startswith("QLinear") or onnx_type.endswith("Integer")
    computes_more = onnx_type in _FUSED_TYPES or is_quantised
    if onnx_type == "Gemm":
        computes_more = bool(context.get_attrs().get("transA"))
    if onnx_type == "Attention":
        # Attention of ONNX has four axes and at most a mask besides query, key and value; ONNX Runtime's op
        # of the same name projects as well.
        computes_more = len(context["shape"](inputs[0]) or ()) != 4 or len(inputs) > 4
    return onnx_type if computes_more else str(context["type"])


def _mapping_rule(
    moves: Any, rule_key: Callable[[amanda.OpContext], str] = itemgetter("type"),
    attributes: Callable[[amanda.OpContext], Mapping[str, Any]] = amanda.OpContext.get_attrs,
) -> Any:  # fmt: skip
    """Return a mapping rule that writes the facts of an op by functions of its framework."""
    return partial(_write_facts, moves, rule_key, attributes)


def _write_facts(moves: Any, rule_key: Any, attributes: Any, context: amanda.OpContext) -> None:
    context["effective path"] = moves, rule_key(context), attributes(context)


def _all_jax_moves(op: OpValues) -> Mapping[str, Any]:
    return _all_moves(op, jax_moves(op))


FRAMEWORKS = [
    ["pytorch", _mapping_rule(_torch_moves)], ["tensorflow", _mapping_rule(_tensorflow_moves)],
    ["onnxruntime", _mapping_rule(_onnx_moves, _onnx_rule_key)],
    ["jax", _mapping_rule(_all_jax_moves, jax_rule_key, jax_attributes)],
]  # fmt: skip
"""Mapping rules that write the function of a framework's moves, the key of the op's rule, and attributes."""
