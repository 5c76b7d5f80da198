"""Terms of the outputs of ops, and rules that return them, by the words of StandardMapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from amanda.options import PositiveFloat, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, MATRIX_PRODUCTS, spatial_axes
from amanda.tools.trace import Op

if TYPE_CHECKING:
    from numpy.typing import NDArray

Indices: TypeAlias = "NDArray[Any]"
Numbers: TypeAlias = "NDArray[Any]"
Mode = Literal["cumulative", "absolute"]
InputIndex = tuple[int, int]
"""A tensor among the inputs: the position, and the index in a list there, else 0."""

OUTSIDE = -(1 << 40)
"""Coordinate of an element outside of a tensor: flat indices that are computed with it are negative."""


@dataclass(frozen=True)
class Step:
    """An execution of an op, as rules read it.

    op: of the graph.  inputs, outputs: arrays, lists of arrays, and values that are not tensors.
    weight, layout, weight_layout: as StandardMapping writes them.  arguments: of the op, under names that are
    the same for every framework.  varying: the tensors among the inputs that depend on the model's inputs;
    the rest are weights and constants.
    """

    op: Op
    type: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    weight: int | None = None
    layout: str | None = None
    weight_layout: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    varying: Sequence[InputIndex] = ()

    @property
    def data(self) -> InputIndex:
        """Return the index of the first tensor that varies."""
        return self.varying[0] if self.varying else (0, 0)

    def tensor(self, where: InputIndex) -> NDArray[Any]:
        """Return the array at an index among the inputs."""
        value = self.inputs[where[0]]
        array: NDArray[Any] = value[where[1]] if isinstance(value, (list, tuple)) else value
        return array


class Terms(NamedTuple):
    """The terms whose sums are elements of an op's output.

    sources: for each tensor among the inputs, (outputs, terms) flat indices of the element in each term; -1
    for a term without an element.  contributions: (outputs, terms) values of the terms; None if all terms are
    on the path.  synapses: number of the terms of all elements; 0 for an op without synapses.
    weighted: True for a sum with weights, of which following ops with constants count as a part.
    """

    sources: Mapping[InputIndex, Indices]
    contributions: Numbers | None = None
    synapses: int = 0
    weighted: bool = False


Rule = Callable[..., Terms]
"""Function of a `Step`, flat indices into one of its outputs, and the output's position; returns `Terms`."""


@checked
def leading(
    contributions: Numbers, value: Numbers, theta: PositiveFloat, mode: Mode = "cumulative"
) -> NDArray[np.bool_]:
    """Return True for the fewest positive contributions whose sum is at least theta times a neuron's value.

    Source: Qiu et al. 2019, sec. 3.1; Gan et al. 2020 (Ptolemy), sec. 3.

    Args:
        contributions: (neurons, terms).
        value: (neurons,); NaN stands for the sum of the positive contributions, and a neuron whose value is
            not positive has none.  If the positive contributions do not reach the value, all of them are
            returned; of equal contributions the first comes first.
        theta: Share of the value that the contributions explain.
        mode: "cumulative", as above; "absolute", all contributions of theta or more.
    """
    # What lowers a neuron does not explain its value.
    positive = contributions > 0
    if mode == "absolute":
        return positive & (contributions >= theta)
    # Ops such as a maximum have no sum to reach.
    value = np.where(np.isnan(value), np.where(positive, contributions, 0).sum(1), value)
    target = theta * value
    # A partition saves nothing on a few terms.
    if contributions.shape[1] <= 4 * _PRESORTED:
        return _leading_sorted(contributions, target)
    return _leading_partitioned(contributions, target)


_PRESORTED = 32


def _leading_partitioned(contributions: Numbers, target: Numbers) -> NDArray[np.bool_]:
    """Return the same as `_leading_sorted`, which it calls on the largest terms of each neuron first.

    Most sums are reached by a few of many terms, which need not all be sorted.
    """
    largest = np.argpartition(-contributions, _PRESORTED, axis=1)[:, : _PRESORTED + 1]
    largest.sort(axis=1)  # of equal contributions the first comes first
    largest_contributions = np.take_along_axis(contributions, largest, 1)
    is_leading = np.zeros(contributions.shape, bool)
    np.put_along_axis(is_leading, largest, _leading_sorted(largest_contributions, target), 1)
    # Undecided if even the smallest of the largest was needed: more of them may be.
    # Also equal to the smallest: of equal contributions the first ones count, and a partition keeps any.
    smallest_needed = np.where(is_leading, contributions, np.inf).min(1)
    is_undecided = smallest_needed <= largest_contributions.min(1)
    is_leading[is_undecided] = _leading_sorted(contributions[is_undecided], target[is_undecided])
    return is_leading


def _leading_sorted(contributions: Numbers, target: Numbers) -> NDArray[np.bool_]:
    """Return True for the largest positive contributions, until their sum reaches a target."""
    # Stable, so that of equal contributions the first come first in every run.
    order = np.argsort(-contributions, axis=1, kind="stable")
    ranked = np.maximum(np.take_along_axis(contributions, order, 1), 0)
    # Infinities have no difference: the sum before each is the sum after its neighbour.
    before = np.pad(np.cumsum(ranked, axis=1)[:, :-1], ((0, 0), (1, 0)))
    is_leading = np.zeros(contributions.shape, bool)
    np.put_along_axis(is_leading, order, (before < target[:, None]) & (ranked > 0), 1)
    return is_leading


class Mesh:
    """Coordinates of elements of an output and of their terms, by names of axes.

    rows: flat indices of the elements.  axes: extents of the axes of the output.  terms: extents of the axes
    that are summed over.  coordinates: by name of axis; they broadcast to (outputs, *terms).
    """

    def __init__(
        self, rows: Indices, axes: Mapping[Any, int], terms: Mapping[Any, int] | None = None
    ) -> None:
        inner = terms or {}
        self._shape = (len(rows), *inner.values())
        outputs = np.unravel_index(rows, tuple(axes.values())) if axes else ()
        self.coordinates = {
            name: coordinates.reshape(-1, *[1] * len(inner))
            for name, coordinates in zip(axes, outputs, strict=True)
        }
        # Open grids: coordinates broadcast, and no array of all terms is made for each axis.
        self.coordinates.update(zip(inner, np.ix_(*map(np.arange, inner.values())), strict=True))

    def indices(self, names: Sequence[Any], extents: Sequence[int]) -> Indices:
        """Return (outputs, terms) flat indices into a tensor; an axis of extent 1 is broadcast."""
        index = np.zeros(1, np.int64)
        for i, (name, extent) in enumerate(zip(names, extents, strict=True)):
            # An axis of extent 1 is broadcast; the coordinate stays negative outside of the tensor.
            coordinate = self.coordinates[name] if extent > 1 else np.minimum(self.coordinates[name], 0)
            index = index + coordinate * prod(extents[i + 1 :])
        return np.broadcast_to(index, self._shape).reshape(self._shape[0], -1)


def operand_indices(rows: Indices, shape: Sequence[int], operand: Sequence[int]) -> Indices:
    """Return flat indices into an operand that is broadcast, for flat indices into the shape of the result.

    rows: the indices into the result, which are returned as they are if the shapes are equal.
    """
    if shape == operand:
        return rows
    mesh = Mesh(rows, dict(zip(range(-len(shape), 0), shape, strict=True)))
    return mesh.indices(range(-len(operand), 0), operand)[:, 0]


def _product_terms(
    rows: Indices, shape: Sequence[int], factors: Sequence[NDArray[Any]], labels: Sequence[Sequence[Any]]
) -> tuple[list[Indices], Numbers, int]:
    """Return the terms of a product of two tensors, summed over the labels that the output lacks.

    shape: of the output.  labels: of the axes of both factors and of the output; extents of 1 are broadcast.
    Returns the indices of both factors, the products, and the number of terms of all elements.
    """
    *factor_labels, output_labels = labels
    extents: dict[Any, int] = {}
    for tensor, names in zip(factors, factor_labels, strict=True):
        for name, extent in zip(names, tensor.shape, strict=True):
            # A factor of extent 1 is broadcast along the axis.
            extents[name] = max(extents.get(name, 1), extent)
    summed = {name: extent for name, extent in extents.items() if name not in output_labels}
    mesh = Mesh(rows, dict(zip(output_labels, shape, strict=True)), summed)
    indices = [
        mesh.indices(names, tensor.shape) for tensor, names in zip(factors, factor_labels, strict=True)
    ]
    first, second = (tensor.reshape(-1)[index] for tensor, index in zip(factors, indices, strict=True))
    # In float64: products of float32 are exact there.
    return indices, first.astype(np.float64) * second, prod(shape) * prod(summed.values())


def _matmul_terms(
    rows: Indices, shape: Sequence[int], factors: Sequence[NDArray[Any]], transposed: Sequence[bool]
) -> tuple[list[Indices], Numbers, int]:
    """Return the terms of (..., n, k) times (..., k, m), transposed or vectors; see `_product_terms`.

    Axes of a batch that the output lacks are summed over too.
    """
    labels: list[Sequence[Any]] = []
    for tensor, axes, is_transposed in zip(factors, ("nk", "km"), transposed, strict=True):
        if tensor.ndim == 1:
            labels.append("k")
            continue
        # Axes of a batch are numbered from the right, so that broadcast ones meet.
        labels.append([*range(2 - tensor.ndim, 0), *(reversed(axes) if is_transposed else axes)])
    matrix_axes = [axis for tensor, axis in zip(factors, "nm", strict=True) if tensor.ndim > 1]
    batch = range(len(matrix_axes) - len(shape), 0)
    return _product_terms(rows, shape, factors, [*labels, [*batch, *matrix_axes]])


def matmul(step: Step, rows: Indices, output: int) -> Terms:
    """Return the products that a matrix product sums; the weight of a linear layer is the second factor."""
    inputs: list[InputIndex] = [(position, 0) for position in MATRIX_PRODUCTS[step.type].factors]
    transposed = step.arguments.get("transposed", (False, False))
    read, values, count = _matmul_terms(
        rows, step.outputs[output].shape, [step.tensor(index) for index in inputs], transposed
    )
    return Terms(dict(zip(inputs, read, strict=True)), values, count, weighted=True)


def einsum(step: Step, rows: Indices, output: int) -> Terms:
    """Return the products that an equation sums.

    Raises NotImplementedError for an equation with an ellipsis, or with other than two factors.
    """
    equation = step.arguments["equation"].replace(" ", "")
    terms, arrow, out = equation.partition("->")
    names = terms.split(",")
    inputs = [
        (i, j) for i, value in enumerate(step.inputs)
        for j, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, np.ndarray)
    ]  # fmt: skip
    if len(names) != 2 or len(inputs) != 2 or "." in equation or not arrow:
        raise NotImplementedError(f"einsum {equation!r}")
    factors = [step.tensor(index) for index in inputs]
    read, values, count = _product_terms(rows, step.outputs[output].shape, factors, [*names, out])
    return Terms(dict(zip(inputs, read, strict=True)), values, count, weighted=True)


def attention(step: Step, rows: Indices, output: int) -> Terms:
    """Return the terms of softmax(q k^T) v: values, weighted by the softmax.

    Raises NotImplementedError where several heads of the query share one of the values.
    """
    query, key, value = (np.asarray(tensor, np.float64) for tensor in step.inputs[:3])
    if query.shape[:-2] != value.shape[:-2]:
        raise NotImplementedError("whose heads are shared")
    scale, mask, causal = (step.arguments.get(name) for name in ("scale", "mask", "causal"))
    scores = query @ key.swapaxes(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if causal:
        mask = np.tril(np.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    # The largest is subtracted, or else exp would overflow.
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    # Only values are on the path: the softmax of query and key is taken as constant weights.
    read, values, count = _matmul_terms(rows, step.outputs[output].shape, (shares, value), (False, False))
    return Terms({(2, 0): read[1]}, values, count, weighted=True)


def _window_mesh(step: Step, rows: Indices, output: int, channels: Mapping[str, int]) -> tuple[Mesh, int]:
    """Return the coordinates of the inputs in each output's window, and the number of terms of all outputs.

    channels: extents of the axes of terms before the axes of the window, "h" and "w".
    """
    shape, layout, tables = step.outputs[output].shape, step.layout or "", step.arguments["tables"]
    spatial = [layout[axis] for axis in spatial_axes(layout)]
    window = {axis.lower(): table.shape[1] for axis, table in zip(spatial, tables, strict=True)}
    mesh = Mesh(rows, dict(zip(layout, shape, strict=True)), {**channels, **window})
    for axis, table in zip(spatial, tables, strict=True):
        # The coordinate of an output becomes that of the input which each place of its window reads.
        mesh.coordinates[axis] = table[mesh.coordinates[axis], mesh.coordinates[axis.lower()]]
    outputs_at_place = prod(extent for axis, extent in zip(layout, shape, strict=True) if axis in "NC")
    # Along each axis the places that windows read in the tensor, of all outputs together.
    places_read = prod(int((table >= 0).sum()) for table in tables)
    return mesh, outputs_at_place * prod(channels.values()) * places_read


def convolution(step: Step, rows: Indices, output: int) -> Terms:
    """Return the products of weight and input, over the channels of an output's group and its window."""
    assert step.weight is not None
    layout, weight_layout = step.layout or "", step.weight_layout or ""
    data, weight = step.tensor((0, 0)), step.tensor((step.weight, 0))
    extents = dict(zip(weight_layout, weight.shape, strict=True))
    is_depthwise = "M" in extents  # (..., I, M): each channel has M outputs of its own
    mesh, count = _window_mesh(step, rows, output, {"I": 1 if is_depthwise else extents["I"]})
    coordinates = mesh.coordinates
    if is_depthwise:
        # Output channel c * M + m of a depthwise convolution reads input channel c.
        coordinates["C"], coordinates["M"] = np.divmod(coordinates["C"], extents["M"])
        coordinates["I"] = coordinates["C"]
    else:
        # The channels of the output become those of the input that its group reads.
        coordinates["O"] = coordinates["C"]
        groups = data.shape[layout.index("C")] // extents["I"]
        group_of_output = coordinates["O"] // (extents["O"] // groups)
        coordinates["C"] = group_of_output * extents["I"] + coordinates["I"]
    # Everything outside is -1, however far: negative flat indices would wrap around.
    data_indices = np.maximum(mesh.indices(layout, data.shape), -1)
    # Places in the window are "h" and "w" in the mesh, where "H" and "W" are coordinates of the input.
    weight_axes = [axis.lower() if axis in layout else axis for axis in weight_layout]
    weight_indices = mesh.indices(weight_axes, weight.shape)
    is_outside = data_indices < 0
    values = data.reshape(-1)[data_indices].astype(np.float64) * weight.reshape(-1)[weight_indices]
    sources = {(0, 0): data_indices, (step.weight, 0): np.where(is_outside, -1, weight_indices)}
    return Terms(sources, np.where(is_outside, 0, values), count, weighted=True)


def _reduced_elements(step: Step, rows: Indices, output: int) -> tuple[Indices, int]:
    """Return (outputs, terms) flat indices that a pooling or reduction reads, and the number of all terms."""
    data = step.tensor(step.data)
    if "tables" in step.arguments:
        mesh, count = _window_mesh(step, rows, output, {})
        return np.maximum(mesh.indices(step.layout or "", data.shape), -1), count
    axes, extents = step.arguments.get("axes"), dict(enumerate(data.shape))
    reduced = {axis % data.ndim for axis in (extents if axes is None else axes)}
    remaining = {axis: extent for axis, extent in extents.items() if axis not in reduced}
    mesh = Mesh(rows, remaining, {axis: extents[axis] for axis in sorted(reduced)})
    return mesh.indices(range(data.ndim), data.shape), data.size


def average(step: Step, rows: Indices, output: int) -> Terms:
    """Return the elements in the window of an output, or along the axes of a reduction, with their values."""
    read, count = _reduced_elements(step, rows, output)
    values = step.tensor(step.data).reshape(-1)[read].astype(np.float64)
    return Terms({step.data: read}, np.where(read < 0, 0, values), count)


def maximum(step: Step, rows: Indices, output: int) -> Terms:
    """Return the largest element in the window or along axes, the first of equal ones."""
    read, count = _reduced_elements(step, rows, output)
    values = np.where(read < 0, -np.inf, step.tensor(step.data).reshape(-1)[read])
    largest = np.zeros(read.shape)
    # argmax gives the first of equal ones, to which frameworks send the gradient of a maximum.
    np.put_along_axis(largest, values.argmax(1)[:, None], 1, 1)
    return Terms({step.data: read}, largest, count)


def summation(step: Step, rows: Indices, output: int) -> Terms:
    """Return the summands of a + b that vary; constants are not on a path."""
    if len(step.varying) < 2:
        return elementwise(step, rows, output)
    scales = step.arguments["scales"]
    shape, count = step.outputs[output].shape, len(step.varying)
    sources, contributions = {}, np.zeros((len(rows), count))
    for i, where in enumerate(step.varying):
        array = step.tensor(where)
        # A summand may be broadcast.
        index = operand_indices(rows, shape, array.shape)
        sources[where] = np.where(np.arange(count) == i, index[:, None], -1)
        contributions[:, i] = array.reshape(-1)[index].astype(np.float64) * scales[min(i, len(scales) - 1)]
    return Terms(sources, contributions, prod(shape) * count)


def elementwise(step: Step, rows: Indices, output: int) -> Terms:
    """Return for each output one element of each input that varies; inputs may be broadcast."""
    shape = step.outputs[output].shape
    return Terms(
        {where: operand_indices(rows, shape, step.tensor(where).shape)[:, None] for where in step.varying}
    )


def reshape(step: Step, rows: Indices, output: int) -> Terms:
    """Return the same elements in the same order, for an op that changes the shape.

    Raises NotImplementedError for an op that drops or repeats elements.
    """
    if step.tensor(step.data).size != step.outputs[output].size:
        raise NotImplementedError("it gives another number of elements than it reads")
    return Terms({step.data: rows[:, None]})


def rearrangement(step: Step, rows: Indices, output: int) -> Terms:
    """Return the origins of elements that an op moves: its `move` is applied to an array of flat indices."""
    data = step.tensor(step.data)
    moved_indices = step.arguments["move"](np.arange(data.size).reshape(data.shape))
    origins: NDArray[Any] = moved_indices[output] if isinstance(moved_indices, list) else moved_indices
    return Terms({step.data: origins.reshape(-1)[rows][:, None]})


def concatenation(step: Step, rows: Indices, output: int) -> Terms:
    """Return the elements of several tensors that the op concatenates or stacks."""
    join = np.stack if step.type == "stack" else np.concatenate
    position = next(i for i, value in enumerate(step.inputs) if isinstance(value, (list, tuple)))
    tensors = step.inputs[position]
    # Numbers all elements of all tensors, joins the numbers as the op does, and looks them up.
    ends = np.cumsum([tensor.size for tensor in tensors])
    starts = ends - [tensor.size for tensor in tensors]
    spans = list(zip(starts, ends, strict=True))
    numbers = [
        np.arange(start, end).reshape(tensor.shape)
        for tensor, (start, end) in zip(tensors, spans, strict=True)
    ]
    joined_numbers = join(numbers, axis=step.arguments.get("axis", 0)).reshape(-1)
    numbers_read = joined_numbers[rows][:, None]
    return Terms({
        (position, j): np.where((numbers_read >= start) & (numbers_read < end), numbers_read - start, -1)
        for j, (start, end) in enumerate(spans)
    })  # fmt: skip


FIRST = frozenset(
    {"batch_norm", "instance_norm", "group_norm", "layer_norm", "softmax", "log_softmax", "prelu"}
)
"""Words of ops that compute element by element of their first input, with weights and statistics."""

_ELEMENTWISE = """
    BiasAdd abs alias alpha_dropout bias_add celu clamp clone contiguous detach div dropout dropout2d elu
    erf exp feature_dropout gelu hardsigmoid hardswish hardtanh identity Identity leaky_relu log logsigmoid
    masked_fill mish mul neg pow reciprocal relu relu6 rrelu rsqrt selu sigmoid silu softplus softsign sqrt
    square tanh to type type_as where LeakyRelu StopGradient
""".split()
_PASSING: dict[str, Rule] = {
    **dict.fromkeys([*_ELEMENTWISE, *FIRST], elementwise),
    **dict.fromkeys("reshape squeeze unsqueeze view unflatten ravel".split(), reshape),
    **dict.fromkeys("""
        permute transpose getitem pad Pad PadV2 split split_with_sizes tensor_split chunk unbind expand
        expand_as repeat narrow select index_select flip roll
    """.split(), rearrangement),
    **dict.fromkeys(("cat", "stack"), concatenation),
}  # fmt: skip

_POOLINGS = {
    f"{size}{kind}_pool{n}d": rule for kind, rule in (("max", maximum), ("avg", average))
    for size in ("", "adaptive_") for n in (1, 2, 3)
}  # fmt: skip

RULES: dict[str, Rule] = {
    **_PASSING, **_POOLINGS, **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(MATRIX_PRODUCTS, matmul), "einsum": einsum,
    "scaled_dot_product_attention": attention, **dict.fromkeys(("add", "sub", "rsub"), summation),
    "mean": average, "sum": average, "amax": maximum,
}  # fmt: skip
"""Rule by the op's word, or the framework's own name where there is no word."""

PASSING = frozenset(_PASSING)
"""Words of ops whose rule reads shapes alone, unless they scale by a constant."""

WINDOWED = (*CONVOLUTIONS, *_POOLINGS)
"""Words of ops that read `tables` of windows."""
