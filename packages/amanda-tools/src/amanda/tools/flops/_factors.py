"""Which inputs of a product are its factors, each of whose gradients is a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FACTORS = {
    "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2),
    "bilinear": (0, 1, 2), "trilinear": (0, 1, 2),
}  # fmt: skip
"""Positions by the word of an op; of others the first two, before a bias and a mask."""


def gradients_of_factors(word: str, gradients: Sequence[Any]) -> int:
    """Return how many of the gradients that a backward op gives are products.

    gradients: those of an op's inputs in their order; the only one that there is is that of any input.
    """
    if len(gradients) == 1:
        return int(gradients[0] is not None)
    positions = FACTORS.get(word, (0, 1))
    return sum(i < len(gradients) and gradients[i] is not None for i in positions)
