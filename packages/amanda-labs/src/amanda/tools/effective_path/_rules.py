"""Rules by op type: each returns, for elements of an op's output, the terms whose sums they are."""

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
    """Return a mask: True for the fewest positive contributions that sum to theta times a neuron's value.

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
    is_positive = contributions > 0
    if mode == "absolute":
        return is_positive & (contributions >= theta)
    # NaN: there is no value to reach but the sum itself.
    value = np.where(np.isnan(value), np.where(is_positive, contributions, 0).sum(1), value)
    target = theta * value
    # A partition saves nothing on a few terms.
    if contributions.shape[1] <= 4 * _PRESORTED:
        return _leading_sorted(contributions, target)
    return _leading_partitioned(contributions, target)


_PRESORTED = 32
"""Number of the largest terms of a neuron that are sorted before all of them are."""


def _leading_partitioned(contributions: Numbers, target: Numbers) -> NDArray[np.bool_]:
    """Return what `_leading_sorted` returns, but sort the few largest terms of each neuron first.

    All terms are sorted only for neurons whose sum these do not reach: most sums are reached by a few terms.
    """
    largest_terms = np.argpartition(-contributions, _PRESORTED, axis=1)[:, : _PRESORTED + 1]
    largest_terms.sort(axis=1)  # of equal contributions the first comes first
    largest_contributions = np.take_along_axis(contributions, largest_terms, 1)
    is_leading = np.zeros(contributions.shape, bool)
    np.put_along_axis(is_leading, largest_terms, _leading_sorted(largest_contributions, target), 1)
    # Undecided if even the smallest of the largest was needed: more of them may be.
    # Also equal to the smallest: of equal contributions the first ones count, and a partition keeps any.
    smallest_needed = np.where(is_leading, contributions, np.inf).min(1)
    is_undecided = smallest_needed <= largest_contributions.min(1)
    is_leading[is_undecided] = _leading_sorted(contributions[is_undecided], target[is_undecided])
    return is_leading


def _leading_sorted(contributions: Numbers, target: Numbers) -> NDArray[np.bool_]:
    """Return (neurons, terms), True for the largest positive contributions until their sum is the target."""
    # Stable, so that of equal contributions the first come first in every run.
    descending_terms = np.argsort(-contributions, axis=1, kind="stable")
    sorted_contributions = np.maximum(np.take_along_axis(contributions, descending_terms, 1), 0)
    # Shifted by one, not the sum less the term: of infinities that difference would be NaN.
    sum_before = np.pad(np.cumsum(sorted_contributions, axis=1)[:, :-1], ((0, 0), (1, 0)))
    is_needed = (sum_before < target[:, None]) & (sorted_contributions > 0)
    is_leading = np.zeros(contributions.shape, bool)
    np.put_along_axis(is_leading, descending_terms, is_needed, 1)
    return is_leading


class Mesh:
    """Coordinates of elements of an output and of their terms, by names of axes.

    elements: flat indices of the elements.  axes: extents of the axes of the output by name.
    term_axes: extents of the axes that are summed over.
    coordinates: by name of axis; they broadcast to (elements, *term_axes).
    """

    def __init__(
        self, elements: Indices, axes: Mapping[Any, int], term_axes: Mapping[Any, int] | None = None
    ) -> None:
        term_extents = dict(term_axes or {})
        self._broadcast_shape = (len(elements), *term_extents.values())
        element_coordinates = np.unravel_index(elements, tuple(axes.values())) if axes else ()
        self.coordinates = {
            name: coordinates.reshape(-1, *[1] * len(term_extents))
            for name, coordinates in zip(axes, element_coordinates, strict=True)
        }
        # Open grids: coordinates broadcast, and no array of all terms is made for each axis.
        term_coordinates = np.ix_(*map(np.arange, term_extents.values()))
        self.coordinates.update(zip(term_extents, term_coordinates, strict=True))

    def flat_indices(self, names: Sequence[Any], extents: Sequence[int]) -> Indices:
        """Return (elements, terms) flat indices into a tensor, by the names and extents of its axes.

        An axis of extent 1 is broadcast.  An index is negative where a coordinate is OUTSIDE.
        """
        index = np.zeros(1, np.int64)
        for i, (name, extent) in enumerate(zip(names, extents, strict=True)):
            # Broadcast: coordinate 0, or still OUTSIDE.
            coordinate = self.coordinates[name] if extent > 1 else np.minimum(self.coordinates[name], 0)
            stride = prod(extents[i + 1 :])
            index = index + coordinate * stride
        return np.broadcast_to(index, self._broadcast_shape).reshape(self._broadcast_shape[0], -1)


def operand_indices(elements: Indices, shape: Sequence[int], operand_shape: Sequence[int]) -> Indices:
    """Return flat indices into an operand that is broadcast to a shape, for flat indices into the shape."""
    if shape == operand_shape:
        return elements
    # Axes are named by their distance from the right, where broadcasting aligns them.
    mesh = Mesh(elements, dict(zip(range(-len(shape), 0), shape, strict=True)))
    # There is one term for each element.
    return mesh.flat_indices(range(-len(operand_shape), 0), operand_shape)[:, 0]


class _ProductTerms(NamedTuple):
    """(elements, terms) flat indices into two factors, and products; term_count: of the whole output."""

    first_indices: Indices
    second_indices: Indices
    products: Numbers
    term_count: int


def _product_terms(
    elements: Indices, shape: Sequence[int], factors: Sequence[NDArray[Any]], labels: Sequence[Sequence[Any]]
) -> _ProductTerms:
    """Return the terms of elements of a product of two tensors, summed over the labels that the output lacks.

    elements: flat indices into the output, which has this shape.
    labels: names of the axes of both factors and of the output; extents of 1 are broadcast.
    """
    *factor_labels, output_labels = labels
    extents: dict[Any, int] = {}
    for tensor, names in zip(factors, factor_labels, strict=True):
        for name, extent in zip(names, tensor.shape, strict=True):
            # A factor of extent 1 is broadcast along the axis.
            extents[name] = max(extents.get(name, 1), extent)
    summed_axes = {name: extent for name, extent in extents.items() if name not in output_labels}
    mesh = Mesh(elements, dict(zip(output_labels, shape, strict=True)), summed_axes)
    first_indices, second_indices = (
        mesh.flat_indices(names, tensor.shape) for tensor, names in zip(factors, factor_labels, strict=True)
    )
    first, second = factors
    # In float64: products of float32 are exact there.
    products = first.reshape(-1)[first_indices].astype(np.float64) * second.reshape(-1)[second_indices]
    return _ProductTerms(first_indices, second_indices, products, prod(shape) * prod(summed_axes.values()))


def _matmul_terms(
    elements: Indices, shape: Sequence[int], factors: Sequence[NDArray[Any]], transposed: Sequence[bool]
) -> _ProductTerms:
    """Return the terms of elements of (..., n, k) times (..., k, m).  A factor may be a vector (k,).

    transposed: for each factor, True if its last two axes are exchanged.
    Axes of a batch that the output lacks are summed over too.
    """
    labels: list[Sequence[Any]] = []
    for tensor, matrix_labels, is_transposed in zip(factors, ("nk", "km"), transposed, strict=True):
        if tensor.ndim == 1:
            labels.append("k")
            continue
        # Axes of a batch are numbered from the right, so that broadcast ones meet.
        batch_labels = range(2 - tensor.ndim, 0)
        labels.append([*batch_labels, *(reversed(matrix_labels) if is_transposed else matrix_labels)])
    # A vector gives the output no axis.
    output_labels = [label for tensor, label in zip(factors, "nm", strict=True) if tensor.ndim > 1]
    output_batch_labels = range(len(output_labels) - len(shape), 0)
    return _product_terms(elements, shape, factors, [*labels, [*output_batch_labels, *output_labels]])


def matmul(step: Step, elements: Indices, output: int) -> Terms:
    """Return the products that a matrix product sums; the weight of a linear layer is the second factor."""
    first, second = ((position, 0) for position in MATRIX_PRODUCTS[step.type].factors)
    factors = [step.tensor(first), step.tensor(second)]
    transposed = step.arguments.get("transposed", (False, False))
    terms = _matmul_terms(elements, step.outputs[output].shape, factors, transposed)
    sources = {first: terms.first_indices, second: terms.second_indices}
    return Terms(sources, terms.products, terms.term_count, weighted=True)


def einsum(step: Step, elements: Indices, output: int) -> Terms:
    """Return the products that an equation sums.

    Raises NotImplementedError for an equation with an ellipsis, or with other than two factors.
    """
    equation = step.arguments["equation"].replace(" ", "")
    factor_text, arrow, output_labels = equation.partition("->")
    factor_labels = factor_text.split(",")
    # The factors are inputs of their own, or a list at one position.
    input_indices = [
        (position, i) for position, value in enumerate(step.inputs)
        for i, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, np.ndarray)
    ]  # fmt: skip
    if len(factor_labels) != 2 or len(input_indices) != 2 or "." in equation or not arrow:
        raise NotImplementedError(f"einsum {equation!r}")
    factors = [step.tensor(index) for index in input_indices]
    shape, labels = step.outputs[output].shape, [*factor_labels, output_labels]
    terms = _product_terms(elements, shape, factors, labels)
    sources = dict(zip(input_indices, (terms.first_indices, terms.second_indices), strict=True))
    return Terms(sources, terms.products, terms.term_count, weighted=True)


def attention(step: Step, elements: Indices, output: int) -> Terms:
    """Return the terms of softmax(q k^T) v: values, weighted by the softmax; query and key are on no path.

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
    attention_weights = np.exp(scores - scores.max(-1, keepdims=True))
    attention_weights /= attention_weights.sum(-1, keepdims=True)
    factors = (attention_weights, value)
    terms = _matmul_terms(elements, step.outputs[output].shape, factors, transposed=(False, False))
    # Only values, input 2, are on the path: the softmax of query and key is taken as constant weights.
    return Terms({(2, 0): terms.second_indices}, terms.products, terms.term_count, weighted=True)


def _window_mesh(step: Step, elements: Indices, output: int, channels: Mapping[str, int]) -> tuple[Mesh, int]:
    """Return the coordinates of the inputs in the window of each element, and the term count of all outputs.

    The mesh has the axes of the layout, where "H" and "W" are coordinates of the input, and the axes of
    terms: `channels`, with their extents, then "h" and "w", the place in the window.  A coordinate is -1 in
    the padding.
    """
    shape, layout, tables = step.outputs[output].shape, step.layout or "", step.arguments["tables"]
    axis_letters = [layout[axis] for axis in spatial_axes(layout)]
    window_axes = {letter.lower(): table.shape[1] for letter, table in zip(axis_letters, tables, strict=True)}
    mesh = Mesh(elements, dict(zip(layout, shape, strict=True)), {**channels, **window_axes})
    for letter, table in zip(axis_letters, tables, strict=True):
        # The coordinate of an output becomes that of the input which each place of its window reads.
        mesh.coordinates[letter] = table[mesh.coordinates[letter], mesh.coordinates[letter.lower()]]
    outputs_per_place = prod(extent for axis, extent in zip(layout, shape, strict=True) if axis in "NC")
    # Of the places of all windows, those inside of the tensor: in the padding there are no terms.
    places_read = prod(int((table >= 0).sum()) for table in tables)
    return mesh, outputs_per_place * prod(channels.values()) * places_read


def convolution(step: Step, elements: Indices, output: int) -> Terms:
    """Return the products of weight and input, over channels of an output's group and its window."""
    assert step.weight is not None
    layout, weight_layout = step.layout or "", step.weight_layout or ""
    data, weight = step.tensor((0, 0)), step.tensor((step.weight, 0))
    # "O": output channels, "I": input channels of a group.  Depthwise: each channel "I" has "M" outputs.
    weight_extents = dict(zip(weight_layout, weight.shape, strict=True))
    is_depthwise = "M" in weight_extents
    group_channels = 1 if is_depthwise else weight_extents["I"]
    mesh, term_count = _window_mesh(step, elements, output, {"I": group_channels})
    coordinates = mesh.coordinates
    # At first "C" is the channel of the output; below it becomes the channel of the input that is read.
    if is_depthwise:
        # Output channel c * M + m of a depthwise convolution reads input channel c.
        coordinates["C"], coordinates["M"] = np.divmod(coordinates["C"], weight_extents["M"])
        coordinates["I"] = coordinates["C"]
    else:
        coordinates["O"] = coordinates["C"]
        group_count = data.shape[layout.index("C")] // group_channels
        group_of_output = coordinates["O"] // (weight_extents["O"] // group_count)
        coordinates["C"] = group_of_output * group_channels + coordinates["I"]
    # Everything outside is -1, however far: negative flat indices would wrap around.
    data_indices = np.maximum(mesh.flat_indices(layout, data.shape), -1)
    # A weight's place in the window is "h" and "w": "H" and "W" are coordinates of the input.
    weight_axes = [axis.lower() if axis in layout else axis for axis in weight_layout]
    weight_indices = mesh.flat_indices(weight_axes, weight.shape)
    is_outside = data_indices < 0
    products = data.reshape(-1)[data_indices].astype(np.float64) * weight.reshape(-1)[weight_indices]
    sources = {(0, 0): data_indices, (step.weight, 0): np.where(is_outside, -1, weight_indices)}
    return Terms(sources, np.where(is_outside, 0, products), term_count, weighted=True)


def _reduced_elements(step: Step, elements: Indices, output: int) -> tuple[Indices, int]:
    """Return (elements, terms) flat indices that an op reads, -1 for padding, and the count of all terms."""
    data = step.tensor(step.data)
    if "tables" in step.arguments:  # a pooling
        mesh, term_count = _window_mesh(step, elements, output, channels={})
        return np.maximum(mesh.flat_indices(step.layout or "", data.shape), -1), term_count
    axes = step.arguments.get("axes")  # None for all
    reduced_axes = {axis % data.ndim for axis in (range(data.ndim) if axes is None else axes)}
    remaining_extents = {axis: size for axis, size in enumerate(data.shape) if axis not in reduced_axes}
    reduced_extents = {axis: data.shape[axis] for axis in sorted(reduced_axes)}
    mesh = Mesh(elements, remaining_extents, reduced_extents)
    return mesh.flat_indices(range(data.ndim), data.shape), data.size


def average(step: Step, elements: Indices, output: int) -> Terms:
    """Return the elements in the window of an output, or along the axes of a reduction, with their values."""
    read_indices, term_count = _reduced_elements(step, elements, output)
    values = step.tensor(step.data).reshape(-1)[read_indices].astype(np.float64)
    return Terms({step.data: read_indices}, np.where(read_indices < 0, 0, values), term_count)


def maximum(step: Step, elements: Indices, output: int) -> Terms:
    """Return the elements in the window or along axes; the first of the largest contributes 1, others 0."""
    read_indices, term_count = _reduced_elements(step, elements, output)
    values = np.where(read_indices < 0, -np.inf, step.tensor(step.data).reshape(-1)[read_indices])
    contributions = np.zeros(read_indices.shape)
    # argmax gives the first of equal ones, to which frameworks send the gradient of a maximum.
    np.put_along_axis(contributions, values.argmax(1)[:, None], values=1, axis=1)
    return Terms({step.data: read_indices}, contributions, term_count)


def summation(step: Step, elements: Indices, output: int) -> Terms:
    """Return the summands of a + b that vary, a term for each; with one of them, `elementwise`."""
    if len(step.varying) < 2:
        return elementwise(step, elements, output)
    scales = step.arguments["scales"]
    shape, summand_count = step.outputs[output].shape, len(step.varying)
    sources, contributions = {}, np.zeros((len(elements), summand_count))
    for i, input_index in enumerate(step.varying):
        summand = step.tensor(input_index)
        # A summand may be broadcast.
        indices = operand_indices(elements, shape, summand.shape)
        # Term i reads summand i alone.
        sources[input_index] = np.where(np.arange(summand_count) == i, indices[:, None], -1)
        scale = scales[min(i, len(scales) - 1)]
        contributions[:, i] = summand.reshape(-1)[indices].astype(np.float64) * scale
    return Terms(sources, contributions, prod(shape) * summand_count)


def elementwise(step: Step, elements: Indices, output: int) -> Terms:
    """Return one term without value for each element: of each input that varies, the element at its place."""
    shape, sources = step.outputs[output].shape, {}
    for input_index in step.varying:
        sources[input_index] = operand_indices(elements, shape, step.tensor(input_index).shape)[:, None]
    return Terms(sources)


def reshape(step: Step, elements: Indices, output: int) -> Terms:
    """Return the same elements in the same order, for an op that changes the shape.

    Raises NotImplementedError for an op that drops or repeats elements.
    """
    if step.tensor(step.data).size != step.outputs[output].size:
        raise NotImplementedError("it gives another number of elements than it reads")
    return Terms({step.data: elements[:, None]})


def rearrangement(step: Step, elements: Indices, output: int) -> Terms:
    """Return the origin of each element that an op moves, by its `move` of flat indices; -1 for padding.

    A move may raise NotImplementedError.
    """
    data = step.tensor(step.data)
    moved_indices = step.arguments["move"](np.arange(data.size).reshape(data.shape))
    # A list has an array for each output of the op.
    origins: NDArray[Any] = moved_indices[output] if isinstance(moved_indices, list) else moved_indices
    return Terms({step.data: origins.reshape(-1)[elements][:, None]})


def concatenation(step: Step, elements: Indices, output: int) -> Terms:
    """Return the origin of each element in one of the tensors that the op joins; -1 in the others."""
    join = np.stack if step.type == "stack" else np.concatenate
    list_position = next(i for i, value in enumerate(step.inputs) if isinstance(value, (list, tuple)))
    tensors = step.inputs[list_position]
    sizes = [tensor.size for tensor in tensors]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    # Number the elements of all tensors one after another, join the numbers as the op does, look them up.
    numbers = [start + np.arange(x.size).reshape(x.shape) for x, start in zip(tensors, starts, strict=True)]
    joined_numbers = join(numbers, axis=step.arguments.get("axis", 0)).reshape(-1)
    read_numbers = joined_numbers[elements][:, None]
    return Terms({
        (list_position, i): np.where((read_numbers >= start) & (read_numbers < end), read_numbers - start, -1)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    })  # fmt: skip


READING_FIRST_INPUT = frozenset(
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
    **dict.fromkeys([*_ELEMENTWISE, *READING_FIRST_INPUT], elementwise),
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
