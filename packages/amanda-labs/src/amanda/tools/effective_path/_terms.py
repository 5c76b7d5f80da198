"""Terms: the summands of an output, and those that explain its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from amanda.options import PositiveFloat, checked
from amanda.tools.libraries import numpy as np
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

    op: of the graph.  inputs, outputs: arrays, lists of arrays, and values that are no tensors.
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

    contributions: (neurons, terms).  value: (neurons,); NaN stands for the sum of the positive contributions,
    and a neuron whose value is not positive has none.  If the positive contributions do not reach the value,
    all of them are returned; of equal contributions the first comes first.  mode "absolute": all
    contributions of theta or more.
    Source: Qiu et al. 2019, sec. 3.1; Gan et al. 2020 (Ptolemy), sec. 3.
    """
    positive = contributions > 0
    if mode == "absolute":
        return positive & (contributions >= theta)
    value = np.where(np.isnan(value), np.where(positive, contributions, 0).sum(1), value)
    target = theta * value
    if contributions.shape[1] <= 4 * _PRESORTED:
        return _leading_sorted(contributions, target)
    # Most sums are reached by a few of many terms, which need not all be sorted.
    order = np.argpartition(-contributions, _PRESORTED, axis=1)[:, : _PRESORTED + 1]
    order.sort(axis=1)
    is_leading_here = _leading_sorted(np.take_along_axis(contributions, order, 1), target)
    is_leading = np.zeros_like(positive)
    np.put_along_axis(is_leading, order, is_leading_here, 1)
    smallest = np.take_along_axis(contributions, order, 1).min(1)
    is_undecided = np.where(is_leading, contributions, np.inf).min(1) <= smallest
    is_leading[is_undecided] = _leading_sorted(contributions[is_undecided], target[is_undecided])
    return is_leading


_PRESORTED = 32


def _leading_sorted(contributions: Numbers, target: Numbers) -> NDArray[np.bool_]:
    """Return True for the largest positive contributions, until their sum reaches a target."""
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
        self.coordinates.update(zip(inner, np.ix_(*map(np.arange, inner.values())), strict=True))

    def indices(self, names: Sequence[Any], extents: Sequence[int]) -> Indices:
        """Return (outputs, terms) flat indices into a tensor; an axis of extent 1 is broadcast."""
        index = np.zeros(1, np.int64)
        for i, (name, extent) in enumerate(zip(names, extents, strict=True)):
            at = self.coordinates[name] if extent > 1 else np.minimum(self.coordinates[name], 0)
            index = index + at * prod(extents[i + 1 :])
        return np.broadcast_to(index, self._shape).reshape(self._shape[0], -1)


def aligned(rows: Indices, shape: Sequence[int], operand: Sequence[int]) -> Indices:
    """Return flat indices into an operand for rows, flat indices into the shape of its broadcast."""
    if shape == operand:
        return rows
    mesh = Mesh(rows, dict(zip(range(-len(shape), 0), shape, strict=True)))
    return mesh.indices(range(-len(operand), 0), operand)[:, 0]
