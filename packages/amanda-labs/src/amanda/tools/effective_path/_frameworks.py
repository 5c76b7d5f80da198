"""Values and arguments of ops, converted from each framework to names that all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import amanda
from amanda.tools.effective_path import _jax
from amanda.tools.effective_path._rules import FIRST, WINDOWED
from amanda.tools.effective_path._terms import OUTSIDE, Indices, Where
from amanda.tools.kit import tensors_of, windows_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import are_transposed, local, spatial_axes
from amanda.tools.trace import Op

if TYPE_CHECKING:
    from numpy.typing import NDArray

Move: TypeAlias = "Callable[[NDArray[Any]], Any]"
"""Function that moves the elements of an array as an op moves those of its input."""

_NO_NUMBERS = ("resource", "variant", "string", "complex")
_OF_SEVERAL = ("FusedConv", "MultiHeadAttention", "SkipLayerNormalization")


def array(tensor: Any) -> NDArray[Any] | None:
    """Return a copy of a tensor on the host, in float32 if NumPy lacks the type; None without an array."""
    if getattr(tensor, "is_nested", False) or getattr(tensor, "is_meta", False):
        return None
    found = np.array(tensors_of(tensor).to_numpy(local(tensor)))
    return found if found.dtype.isbuiltin == 1 else found.astype(np.float32)


@dataclass(eq=False)
class OpValues:
    """One execution of an op of the program, with its inputs and outputs.

    type: the key of its rule.  weight, layout, weight_layout, dtype: as StandardMapping writes them.
    moves: function of the framework that returns moves by word.  shapes_alone: whether the rule reads no
    values.  inputs, outputs: arrays, and values that are not tensors.
    """

    type: str
    attributes: Mapping[str, Any]
    weight: int | None
    layout: str | None
    weight_layout: str | None
    moves: Callable[[OpValues], Mapping[str, Move]]
    dtype: Callable[[Any], str | None]
    shapes_alone: bool
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()

    def kept(self, value: Any) -> Any:
        """Return a copy of a value for rules, or zeros of its shape if rules read no values."""
        if isinstance(value, (list, tuple)):
            return [self.kept(one) for one in value]
        dtype = self.dtype(value)
        if dtype is None or dtype.startswith(_NO_NUMBERS):
            return value
        if self.shapes_alone and len(value.shape) > 2:
            return np.broadcast_to(np.float32(0), tuple(value.shape))
        return array(value)

    def varying(self, op: Op, tensors: Container[Any]) -> list[Where]:
        """Return the inputs that are among tensors, but no weight, scale or statistic of a normalisation."""
        return [
            (i, j) for i, position in enumerate(op.inputs)
            for j, tensor in enumerate(position if isinstance(position, tuple) else (position,))
            if tensor in tensors and i != self.weight and (self.type not in FIRST or i == 0)
        ]  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return what the rule of the op's word takes: `tables` of windows, `axes`, `scales`, `move`, ..."""
        if self.type in SCALES:
            return {"scales": SCALES[self.type](self)}
        if self.type in _ARGUMENTS:
            return _ARGUMENTS[self.type](self)
        move = self.moves(self).get(self.type)
        return {} if move is None else {"move": move}

    def given(self, *names: str, at: int | None = None, default: Any = None) -> Any:
        """Return the first attribute of these names, else the input at a position, unless that is a list."""
        found = next((self.attributes[one] for one in names if self.attributes.get(one) is not None), None)
        if found is None and at is not None and at < len(self.inputs):
            found = None if isinstance(self.inputs[at], (list, tuple)) else self.inputs[at]
        return default if found is None else found

    def integers(self, *names: str, at: int | None = None) -> list[int]:
        """Return the integers that `given` returns, as a list; an empty list without any."""
        return [int(one) for one in np.atleast_1d(self.given(*names, at=at, default=()))]


def _axes(op: OpValues) -> list[int] | None:
    """Return the axes of a reduction; None for all axes, which an empty list means outside of TensorFlow."""
    axes = op.integers("dim", "axes", at=1)
    return axes if axes or "keep_dims" in op.attributes else None


def _softmax(op: OpValues) -> dict[str, Any]:
    """Return mask, causality and scale of an attention."""
    mask = next((one for one in op.inputs[3:] if isinstance(one, np.ndarray)), None)
    return {"mask": mask, "causal": op.attributes.get("is_causal"), "scale": op.attributes.get("scale")}


def _tables(op: OpValues) -> list[Indices]:
    """Return for each spatial axis the (outputs, window) coordinates of inputs."""
    layout = op.layout or ""
    axes = spatial_axes(layout)
    sizes, counts = ([values[0].shape[i] for i in axes] for values in (op.inputs, op.outputs))
    if op.type.startswith("adaptive"):
        found = list(map(_adaptive, sizes, counts))
    else:
        weight = op.weight_layout
        kernel = [op.inputs[1].shape[weight.index(layout[i])] for i in axes] if weight else []
        windows = windows_of(op.attributes, layout, kernel)
        found = [one.positions(*of) for one, *of in zip(windows, sizes, counts, strict=True)]
    return [np.where((one >= 0) & (one < size), one, OUTSIDE) for one, size in zip(found, sizes, strict=True)]


def _adaptive(size: int, count: int) -> Indices:
    """Return (outputs, window) positions for adaptive windows, which divide an axis and may overlap.

    Positions past the end of a window are `size`.
    """
    starts = np.arange(count) * size // count
    ends = -(-(np.arange(1, count + 1) * size) // count)
    found = starts[:, None] + np.arange((ends - starts).max())
    return np.where(found < ends[:, None], found, size)


def _of_norm(op: OpValues) -> Sequence[Any]:
    """Return the scale of each channel in a batch norm; in training the variance is the batch's."""
    data, gamma, _, _, variance = op.inputs[:5]
    usual = "NHWC" if "is_training" in op.attributes else "NC"
    channel = (op.layout or usual).index("C")
    if variance is None or op.given("training", "is_training", "training_mode"):
        variance = data.var(axis=tuple(axis for axis in range(data.ndim) if axis != channel))
    epsilon = op.given("eps", "epsilon", default=1e-5)
    scale = (1 if gamma is None else gamma) / np.sqrt(variance.astype(np.float64) + epsilon)
    return [scale.reshape([-1 if axis == channel else 1 for axis in range(data.ndim)])]


_ARGUMENTS: dict[str, Callable[[OpValues], dict[str, Any]]] = {
    **dict.fromkeys(WINDOWED, lambda op: {"tables": _tables(op)}),
    **dict.fromkeys(("mean", "sum", "amax"), lambda op: {"axes": _axes(op)}),
    "cat": lambda op: {"axis": int(op.given("dim", "axis", at=1, default=0))},
    "stack": lambda op: {"axis": int(op.given("dim", "axis", default=0))},
    "einsum": lambda op: {"equation": _text(op.given("equation", at=0))},
    "linear": lambda op: {"turned": (False, op.weight_layout != "IO")},
    "matmul": lambda op: {"turned": are_transposed(op.attributes)},
    "scaled_dot_product_attention": _softmax,
}
"""Functions that return the arguments of a rule, by the word of the op."""

SCALES: dict[str, Callable[[OpValues], Sequence[Any]]] = {
    "BiasAdd": lambda op: (1, 1), "bias_add": lambda op: (1, 1), "neg": lambda op: (-1,),
    "add": lambda op: (1, op.attributes.get("alpha", 1)),
    "sub": lambda op: (1, -op.attributes.get("alpha", 1)),
    "rsub": lambda op: (-op.attributes.get("alpha", 1), 1),
    "mul": lambda op: op.inputs[1::-1], "div": lambda op: op.inputs[1:2], "batch_norm": _of_norm,
}  # fmt: skip
"""Functions that return the factor of each input, by the word of the op; for `div` the divisor."""


def _moves(op: OpValues, own: Mapping[str, Move]) -> Mapping[str, Move]:
    """Return the moves that all frameworks share, with those of one framework."""
    axis = op.given("dim", "axis", default=0)

    def split(a: NDArray[Any]) -> list[NDArray[Any]]:
        parts = op.outputs[0] if isinstance(op.outputs[0], list) else op.outputs
        return np.split(a, np.cumsum([one.shape[axis] for one in parts])[:-1], axis=axis)

    def expand(a: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(a, op.outputs[0].shape)

    return {
        **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk"), split),
        **dict.fromkeys(("expand", "expand_as"), expand),
        "unbind": lambda a: [np.take(a, i, axis=axis) for i in range(a.shape[axis])], **own,
    }  # fmt: skip


def _of_torch(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of PyTorch, by the arguments of the function."""
    attributes, dim = op.attributes, op.attributes.get("dim", 0)

    def padded(a: NDArray[Any]) -> NDArray[Any]:
        widths = attributes["pad"]
        pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
        return _padded(a, [(0, 0)] * (a.ndim - len(pairs)) + pairs, attributes)

    def permuted(a: NDArray[Any]) -> NDArray[Any]:
        if "source" in attributes:
            return np.moveaxis(a, attributes["source"], attributes["destination"])
        return np.transpose(a, attributes.get("dims"))

    def transposed(a: NDArray[Any]) -> NDArray[Any]:
        first, second = (int(op.given(f"dim{i}", f"axis{i}", default=i - 2)) for i in range(2))  # mT has none
        return a.swapaxes(first, second) if a.ndim > 1 else a

    return _moves(op, {
        "permute": permuted, "transpose": transposed,
        "getitem": lambda a: a[_indexed(attributes["index"])],
        "select": lambda a: np.take(a, attributes["index"], axis=dim),
        "narrow": lambda a: np.take(a, attributes["start"] + np.arange(attributes["length"]), axis=dim),
        "flip": lambda a: np.flip(a, attributes.get("dims")), "pad": padded,
        "index_select": lambda a: np.take(a, op.inputs[2], axis=dim),
        "repeat": lambda a: np.tile(a, attributes["repeats"]),
        "roll": lambda a: np.roll(a, attributes["shifts"], attributes.get("dims") or None),
    })  # fmt: skip


def _of_tensorflow(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of TensorFlow, by inputs that are constants."""

    def cut(a: NDArray[Any]) -> Any:
        begin, end, *step = (op.integers(at=i) for i in range(1, len(op.inputs)))
        if step:
            return a[_strided(begin, end, step[0], op.attributes)]
        return a[tuple(slice(b, None if n < 0 else b + n) for b, n in zip(begin, end, strict=True))]

    return _moves(op, {
        "permute": lambda a: a.transpose(op.integers(at=1)), "getitem": cut,
        "split": lambda a: np.split(a, op.attributes["num_split"], axis=int(op.inputs[0])),
        **dict.fromkeys(("pad", "Pad", "PadV2"), lambda a: _padded(a, op.inputs[1].tolist(), {})),
    })  # fmt: skip


def _of_onnx(op: OpValues) -> Mapping[str, Move]:
    """Return the moves of ONNX, by inputs that are constants, in older models by attributes."""

    def cut(a: NDArray[Any]) -> NDArray[Any]:
        begin, end = op.integers("starts", at=1), op.integers("ends", at=2)
        axes = op.integers("axes", at=3) or range(len(begin))
        index = [slice(None)] * a.ndim
        for axis, first, last, step in zip(
            axes, begin, end, op.integers(at=4) or [1] * len(begin), strict=True
        ):
            index[axis] = _slice(first, last, step, a.shape[axis])
        return a[tuple(index)]

    def padded(a: NDArray[Any]) -> NDArray[Any]:
        widths = op.integers("pads", at=1)
        pairs, count = [(0, 0)] * a.ndim, len(widths) // 2
        for i, axis in enumerate(op.integers(at=3) or range(count)):
            pairs[axis] = (widths[i], widths[i + count])
        return _padded(a, pairs, op.attributes)

    return _moves(op, {
        "permute": lambda a: a.transpose(op.attributes.get("perm")), "getitem": cut, "pad": padded
    })  # fmt: skip


def _padded(a: NDArray[Any], pairs: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> NDArray[Any]:
    mode = _text(attributes.get("mode", "constant"))
    if mode != "constant" or min(map(min, pairs), default=0) < 0:
        raise NotImplementedError(f"a pad in mode {mode} by {pairs}")
    return np.pad(a, pairs, constant_values=-1)


def _indexed(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return tuple(map(_indexed, index))
    return array(index) if hasattr(index, "detach") else index


def _slice(first: int, last: int, step: int, size: int) -> slice:
    """Return a slice with bounds clipped as ONNX clips them, where -1 past the start stays the start."""
    first, last = (one + size if one < 0 else one for one in (first, last))
    return slice(max(first, 0), last if last >= 0 else None if step < 0 else 0, step)


def _strided(
    begin: Sequence[int], end: Sequence[int], step: Sequence[int], attributes: Mapping[str, Any]
) -> Any:
    """Return the index of NumPy for a StridedSlice."""

    def index(i: int) -> Any:
        masks = ("ellipsis", "new_axis", "shrink_axis", "begin", "end")
        has = {mask for mask in masks if int(attributes.get(f"{mask}_mask", 0)) >> i & 1}
        if "ellipsis" in has:
            return ...
        if "new_axis" in has:
            return None
        if "shrink_axis" in has:
            return begin[i]
        return slice(None if "begin" in has else begin[i], None if "end" in has else end[i], step[i])

    return tuple(map(index, range(len(begin))))


def _text(value: Any) -> str:
    """Return a text, decoded if it is bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _word_of_onnx(context: amanda.OpContext) -> str:
    """Return the key of a node's rule; its own type if the node computes more than the word says."""
    name, inputs = context.get_op_type(), context.get_inputs()
    otherwise = name in _OF_SEVERAL or name.startswith("QLinear") or name.endswith("Integer")
    if name == "Gemm":
        otherwise = bool(context.get_attrs().get("transA"))
    if name == "Attention":
        otherwise = len(context["shape"](inputs[0]) or ()) != 4 or len(inputs) > 4
    return name if otherwise else str(context["type"])


def _read_by(
    moves: Any, word: Callable[[amanda.OpContext], str] = itemgetter("type"),
    attributes: Callable[[amanda.OpContext], Mapping[str, Any]] = amanda.OpContext.get_attrs,
) -> Any:  # fmt: skip
    return partial(_write_moves, moves, word, attributes)


def _write_moves(moves: Any, word: Any, attributes: Any, context: amanda.OpContext) -> None:
    context["effective path"] = moves, word(context), attributes(context)


def _of_jax(op: OpValues) -> Mapping[str, Any]:
    return _moves(op, _jax.moves(op))


FRAMEWORKS = [
    ["pytorch", _read_by(_of_torch)], ["tensorflow", _read_by(_of_tensorflow)],
    ["onnxruntime", _read_by(_of_onnx, _word_of_onnx)],
    ["jax", _read_by(_of_jax, _jax.word, _jax.attributes)],
]  # fmt: skip
"""Mapping rules that write the moves of an op's framework, the key of the op's rule, and attributes."""
