"""Effective paths of one small network, extracted element by element in plain Python.

The network: a convolution of 3 x 3 with padding and a batch norm, ReLU, max pooling of 2 x 2, a convolution
of 3 x 3 with padding and a batch norm that is added to its own input, ReLU, the average over height and
width, and a linear layer. Weights are (out, in, height, width) and (classes, in); all is in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Index = tuple[int, ...]
Term = tuple[Any, Index | None, float]
"""A neuron that is read, the weight that it is multiplied with, and what that adds."""


class Weights(NamedTuple):
    """scales: of the batch norms, by which they multiply each channel; shifts: what they add."""

    first: Any
    second: Any
    last: Any
    scales: Any
    shifts: Any


class ReferencePath(NamedTuple):
    """Sets of indices: of neurons that layers read, and of weights; and the number of synapses."""

    neurons: dict[str, set[Any]]
    weights: dict[str, set[Index]]
    synapses: dict[str, int]


def convolved(image: Any, weight: Any, at: Index) -> list[Term]:
    """The terms of one output of a convolution."""
    out, row, column = at
    terms: list[Term] = []
    for c, i, j in every(weight.shape[1:]):
        y, x = row + i - 1, column + j - 1
        if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
            terms.append(((c, y, x), (out, c, i, j), image[c, y, x] * weight[out, c, i, j]))
    return terms


def every(shape: Index) -> Iterator[Index]:
    yield from np.ndindex(*shape)


def forward(image: Any, w: Weights) -> dict[str, Any]:
    """Every value of the network."""
    made: dict[str, Any] = {"image": image}

    def layer(name: str, read: Any, weight: Any, nth: int) -> None:
        sums = np.zeros((len(weight), *read.shape[1:]))
        for at in every(sums.shape):
            sums[at] = sum(value for _, _, value in convolved(read, weight, at))
        made[name] = sums * w.scales[nth][:, None, None] + w.shifts[nth][:, None, None]

    layer("first", image, w.first, 0)
    active = np.maximum(made["first"], 0)
    channels, height, width = active.shape
    made["active"] = active
    made["pooled"] = active.reshape(channels, height // 2, 2, width // 2, 2).max((2, 4))
    layer("second", made["pooled"], w.second, 1)
    made["sum"] = np.maximum(made["second"] + made["pooled"], 0)
    made["mean"] = made["sum"].mean((1, 2))
    made["scores"] = w.last @ made["mean"]
    return made


def fewest(terms: list[Term], value: float, theta: float) -> list[Term]:
    """The fewest terms of a value's sign that reach theta times the value."""
    sign = 1 if value > 0 else -1
    ranked = sorted(terms, key=lambda term: -term[2] * sign)
    chosen, total = [], 0.0
    for term in ranked:
        if total >= theta * abs(value) or term[2] * sign <= 0:
            break
        chosen.append(term)
        total += term[2] * sign
    return chosen


def reference_path(image: Any, w: Weights, theta: float) -> tuple[ReferencePath, dict[str, Any]]:
    """The effective path of the class with the largest score, which has to be positive, and all values."""
    made = forward(image, w)
    path = ReferencePath({}, {}, {})

    def back(name: str, reached: set[Any], terms: Any, value: Any) -> set[Any]:
        neurons, weights, count = set(), set(), 0
        for at in reached:
            for neuron, weight, _ in fewest(terms(at), value(at), theta):
                neurons.add(neuron)
                weights.add(weight)
                count += 1
        path.neurons[name], path.synapses[name] = neurons, count
        path.weights[name] = {one for one in weights if one is not None}
        return neurons

    def scaled(read: Any, weight: Any, nth: int) -> Any:
        return lambda at: [
            (neuron, index, value * w.scales[nth][at[0]])
            for neuron, index, value in convolved(read, weight, at)
        ]

    def window(at: Index) -> list[Term]:
        c, row, column = at
        under = [(c, 2 * row + i, 2 * column + j) for i in range(2) for j in range(2)]
        largest = max(under, key=lambda one: (made["active"][one], -under.index(one)))
        return [(largest, None, 1.0)]

    def scores(at: int) -> list[Term]:
        return [((i,), (at, i), w.last[at, i] * made["mean"][i]) for i in range(w.last.shape[1])]

    def mean(at: Index) -> list[Term]:
        return [((at[0], *place), None, made["sum"][(at[0], *place)]) for place in places]

    def summands(at: Index) -> list[Term]:
        return [(("second", at), None, made["second"][at]), (("pooled", at), None, made["pooled"][at])]

    places = list(every(made["sum"].shape[1:]))
    means = back("linear", {int(made["scores"].argmax())}, scores, lambda at: made["scores"][at])
    sums = back("mean", means, mean, lambda at: made["mean"][at] * len(places))
    both = back("add", sums, summands, lambda at: made["second"][at] + made["pooled"][at])
    convolved_sums = {at for name, at in both if name == "second"}
    second = scaled(made["pooled"], w.second, 1)
    pooled = back("second", convolved_sums, second, lambda at: made["second"][at])
    pooled |= {at for name, at in both if name == "pooled"}
    active = back("max", pooled, window, lambda at: 1.0)
    back("first", active, scaled(image, w.first, 0), lambda at: made["first"][at])
    return path, made
