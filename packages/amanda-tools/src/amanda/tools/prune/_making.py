"""Masks of weights, by what a step has gathered of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amanda.tools.prune._framework import Array
from amanda.tools.prune._options import Options
from amanda.tools.prune._patterns import Vectors
from amanda.tools.prune._permutation import input_permutation
from amanda.tools.prune._regrowth import regrown_kept
from amanda.tools.prune._weight import Weight


def make_masks(weights: Sequence[Weight], update: int, options: Options) -> None:
    """Give weights that share a budget, whose magnitudes are gathered, the masks of a step."""
    for one in weights:
        if one.permutation is not None and not one.is_masked:
            _find_permutation(one, options.pattern)
    magnitudes = [one.magnitudes for one in weights]
    sparsity = options.schedule.at(update)
    if options.exchanges and all(one.is_masked for one in weights):
        growth = [_growth(one, update, options) for one in weights]
        fraction = options.schedule.regrown(update, options.fraction)
        kept = regrown_kept(magnitudes, growth, sparsity, fraction)
    else:
        kept = options.pattern.kept(magnitudes, sparsity)
    for one, own in zip(weights, kept, strict=True):
        stays_dropped = options.regrow is None and one.is_masked
        one.keep(own & one.kept_like(own) if stays_dropped else own, update)


def _growth(weight: Weight, update: int, options: Options) -> Array:
    """How much each element of a weight deserves to come back."""
    magnitudes: Any = weight.magnitudes
    if options.regrow == "gradient":
        gradient: Any = weight.gradient
        return abs(gradient)
    # By the weight's place and the step alone, so that it is the same in every framework and after a restart.
    random = np.random.Generator(np.random.Philox([options.seed, weight.number, update]))
    return weight.framework.like(random.random(tuple(magnitudes.shape), np.float32), magnitudes)


def _find_permutation(weight: Weight, pattern: Any) -> None:
    magnitudes: Any = weight.magnitudes
    permutation: Any = weight.permutation
    assert isinstance(pattern, Vectors)
    inputs_last = np.moveaxis(weight.framework.numbers(magnitudes), 1, -1)
    found = input_permutation(inputs_last, pattern.n, pattern.m)
    permutation[...] = weight.framework.like(found, permutation)
    weight.magnitudes = magnitudes[:, permutation]
