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
Where = tuple[int, int]
"""A tensor among the inputs: the position, and the index in a list there, else 0."""

OUTSIDE = -(1 << 40)
"""Coordinate of an element outside of a tensor: flat indices that are computed with it are negative."""


@dataclass(frozen=True)
class Step:
    """One execution of an op.

    op: of the graph.  inputs, outputs: arrays, lists of arrays, and values that are no tensors.
    weight, layout, weight_layout: as StandardMapping writes them.  arguments: of the op, under names that are
    the same for every framework.  varying: the tensors among the inputs that depend on the model's inputs;
    others are weights and constants.
    """

    op: Op
    type: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    weight: int | None = None
    layout: str | None = None
    weight_layout: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    varying: Sequence[Where] = ()

    @property
    def data(self) -> Where:
        """Return the index of the first tensor that varies."""
        return self.varying[0] if self.varying else (0, 0)

    def tensor(self, where: Where) -> NDArray[Any]:
        """Return the array at an index among the inputs."""
        value = self.inputs[where[0]]
        array: NDArray[Any] = value[where[1]] if isinstance(value, (list, tuple)) else value
        return array


class Terms(NamedTuple):
    """The terms that some outputs of an op are sums of.

    sources: by tensor among the inputs, (outputs, terms) flat indices of the element in each term; -1 for
    none.  contributions: (outputs, terms) values of the terms; None if all terms are on the path.
    synapses: their number for all outputs of the op; 0 for an op without.  weighted: whether the sum has
    weights, so that following ops with constants count as a part of it.
    """

    sources: Mapping[Where, Indices]
    contributions: Numbers | None = None
    synapses: int = 0
    weighted: bool = False


Rule = Callable[..., Terms]
"""Function of a `Step`, flat indices into one of its outputs, and the output's position; returns `Terms`."""


@checked
def leading(
    contributions: Numbers, value: Numbers, theta: PositiveFloat, mode: Mode = "cumulative"
) -> NDArray[np.bool_]:
    """Return True for the fewest positive contributions that reach theta times a neuron's value in sum.

    contributions: (neurons, terms).  value: (neurons,); NaN stands for the sum of the positive contributions,
    and a neuron whose value is not positive has none.  All positive ones are chosen if they do not reach the
    value; the first of equal ones is chosen first.  mode "absolute": all contributions of theta or more.
    Source: Qiu et al. 2019, sec. 3.1; Gan et al. 2020 (Ptolemy), sec. 3.
    """
    positive = contributions > 0
    if mode == "absolute":
        return positive & (contributions >= theta)
    value = np.where(np.isnan(value), np.where(positive, contributions, 0).sum(1), value)
    enough = theta * value
    if contributions.shape[1] <= 4 * _LARGEST:
        return _ranked(contributions, enough)
    # Most sums are reached by a few of many terms, which need not all be sorted.
    order = np.argpartition(-contributions, _LARGEST, axis=1)[:, : _LARGEST + 1]
    order.sort(axis=1)
    few = _ranked(np.take_along_axis(contributions, order, 1), enough)
    chosen = np.zeros_like(positive)
    np.put_along_axis(chosen, order, few, 1)
    least = np.take_along_axis(contributions, order, 1).min(1)
    left = np.where(chosen, contributions, np.inf).min(1) <= least
    chosen[left] = _ranked(contributions[left], enough[left])
    return chosen


_LARGEST = 32


def _ranked(contributions: Numbers, enough: Numbers) -> NDArray[np.bool_]:
    """Return True for the largest positive contributions, until their sum is enough."""
    order = np.argsort(-contributions, axis=1, kind="stable")
    ranked = np.maximum(np.take_along_axis(contributions, order, 1), 0)
    # Infinities have no difference: the sum before each is the sum after its neighbour.
    before = np.pad(np.cumsum(ranked, axis=1)[:, :-1], ((0, 0), (1, 0)))
    chosen = np.zeros(contributions.shape, bool)
    np.put_along_axis(chosen, order, (before < enough[:, None]) & (ranked > 0), 1)
    return chosen


class Mesh:
    """Coordinates of outputs, and of the terms that each of them has, by names of axes.

    rows: flat indices of the outputs.  axes: extents of the axes of the output.  terms: extents of the axes
    that are summed over.  at: coordinates by name, which broadcast to (outputs, *terms).
    """

    def __init__(
        self, rows: Indices, axes: Mapping[Any, int], terms: Mapping[Any, int] | None = None
    ) -> None:
        inner = terms or {}
        self._shape = (len(rows), *inner.values())
        outputs = np.unravel_index(rows, tuple(axes.values())) if axes else ()
        self.at = {name: one.reshape(-1, *[1] * len(inner)) for name, one in zip(axes, outputs, strict=True)}
        self.at.update(zip(inner, np.ix_(*map(np.arange, inner.values())), strict=True))

    def indices(self, names: Sequence[Any], extents: Sequence[int]) -> Indices:
        """Return (outputs, terms) flat indices into a tensor; an axis of extent 1 is broadcast."""
        index = np.zeros(1, np.int64)
        for i, (name, extent) in enumerate(zip(names, extents, strict=True)):
            at = self.at[name] if extent > 1 else np.minimum(self.at[name], 0)
            index = index + at * prod(extents[i + 1 :])
        return np.broadcast_to(index, self._shape).reshape(self._shape[0], -1)


def aligned(rows: Indices, shape: Sequence[int], operand: Sequence[int]) -> Indices:
    """Return flat indices into an operand, for rows, flat indices into the shape that it was broadcast to."""
    if shape == operand:
        return rows
    mesh = Mesh(rows, dict(zip(range(-len(shape), 0), shape, strict=True)))
    return mesh.indices(range(-len(operand), 0), operand)[:, 0]
