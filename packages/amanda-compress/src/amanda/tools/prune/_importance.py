"""Importance: how much each element of a weight is worth; the lowest are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._arrays import Array

if TYPE_CHECKING:
    from amanda.tools.prune._weight import PrunedWeight

Importance = Literal["magnitude", "gradient", "movement", "wanda", "sparsegpt", "random"]

OF_GRADIENTS = frozenset({"gradient", "movement"})
OF_INPUTS = frozenset({"wanda", "sparsegpt"})

_NEEDS = {
    "gradient": "gradients: run a backward pass `with tool.calibrating(), amanda.apply(tool)`",
    "movement": "gradients: run backward passes `with tool.calibrating(), amanda.apply(tool)`",
    "wanda": "the inputs of ops: call tool.prepare(model, example)",
    "sparsegpt": "the inputs of ops: call tool.prepare(model, example)",
}


def needs(importance: str) -> str:
    """Return what an importance is computed of besides the weight, and how to have that at first."""
    return _NEEDS[importance]


def scores(weight: PrunedWeight, importance: str, seed: int, update: int) -> Array:
    """Return what each element of a weight is worth, in the order of `PrunedWeight.ordered`.

    "magnitude": |w| (Han et al. 2015).  "gradient": |w * g|, the change of the loss to first order (Molchanov
    et al. 2019, eq. 8).  "movement": the sum of -w * g over all steps (Sanh et al. 2020, sec. 3).  "wanda":
    |w| * ||x||_2 (Sun et al. 2023, eq. 1).  "random": by the weight's place and the step alone, the same in
    every framework.
    """
    magnitudes = weight.magnitudes
    if importance == "gradient":
        return abs(weight.product)
    if importance == "movement":
        return weight.like(-weight.ordered(weight["movement"]), magnitudes)
    if importance == "wanda":
        return magnitudes * weight.permuted(_norms(weight))
    if importance == "random":
        return random_scores(weight, [seed, weight.number, update, 1])
    return magnitudes


def random_scores(weight: PrunedWeight, key: list[int]) -> Array:
    """Return random numbers between 0 and 1 in the shape of a weight's magnitudes."""
    random = np.random.Generator(np.random.Philox(key))
    found = random.random(tuple(weight.magnitudes.shape), np.float32)
    return weight.like(found, weight.magnitudes)


def _norms(weight: PrunedWeight) -> Array:
    """Return for each element (outputs, inputs, window) the norm of the inputs that it multiplies."""
    squares = weight.inputs  # (groups, inputs * window)
    groups, outputs = shape(squares)[0], weight.canonical_shape[0]
    norms = do("reshape", squares**0.5, (groups, 1, -1))
    each = do("broadcast_to", norms, (groups, outputs // groups, shape(norms)[-1]))
    return do("reshape", each, weight.canonical_shape)
