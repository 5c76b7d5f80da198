"""Sums over the inputs that a weight multiplies, for importances that are computed of them."""

from __future__ import annotations

from amanda.tools.libraries import do
from amanda.tools.mapping import CONVOLUTIONS, MATRIX_PRODUCTS
from amanda.tools.prune._arrays import Array


def unread(type: str, layout: str | None) -> str | None:
    """Return why the inputs of an op's weight are not read; None where they are."""
    if layout is None:
        return "which of its axes are outputs and inputs is not known"
    if type not in MATRIX_PRODUCTS and type not in CONVOLUTIONS:
        return f"the inputs that {type} multiplies by it are not followed"
    return None


def squares(rows: Array) -> Array:
    """Return the sum of squares of each input over all positions: (groups, inputs * window)."""
    return (rows**2).sum(1)


def products(rows: Array) -> Array:
    """Return the sum of products of each pair of inputs: (groups, inputs * window, inputs * window)."""
    return do("matmul", do("moveaxis", rows, 1, 2), rows)
