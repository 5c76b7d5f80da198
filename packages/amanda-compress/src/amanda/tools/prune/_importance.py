"""Importance by gradients and inputs: the data that it needs, and SparseGPT."""

from __future__ import annotations

from math import prod
from typing import Literal

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import astype, do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, MATRIX_PRODUCTS
from amanda.tools.prune._masks import Array

Importance = Literal["magnitude", "gradient", "movement", "wanda", "sparsegpt", "random"]

OF_GRADIENTS = frozenset({"gradient", "movement"})
OF_INPUTS = frozenset({"wanda", "sparsegpt"})

DATA_AND_REMEDY = {
    "gradient": "gradients: run a backward pass `with tool.calibrating(), amanda.apply(tool)`",
    "movement": "gradients: run backward passes `with tool.calibrating(), amanda.apply(tool)`",
    "wanda": "the inputs of ops: call tool.prepare(model, example)",
    "sparsegpt": "the inputs of ops: call tool.prepare(model, example)",
}
"""For each importance that the weight alone does not give: the missing data, and the call that gathers it."""


def why_inputs_unread(type: str, layout: str | None) -> str | None:
    """Return why the inputs that an op multiplies by its weight cannot be read; None where they can."""
    if layout is None:
        return "which of its axes are outputs and inputs is not known"
    if type not in MATRIX_PRODUCTS and type not in CONVOLUTIONS:
        return f"the inputs that {type} multiplies by it are not followed"
    return None


def sum_of_squares(rows: Array) -> Array:
    """Return the sum of squares of each input over all positions: (groups, inputs * window)."""
    return (rows**2).sum(1)


def sum_of_products(rows: Array) -> Array:
    """Return the sum of products of each pair of inputs: (groups, inputs * window, inputs * window)."""
    # One product over all positions; calibrations of many batches add these up instead of keeping inputs.
    return do("matmul", do("moveaxis", rows, 1, 2), rows)


def sparsegpt_matrix(
    weight: Array, products: Array, sparsity: float, n_m: tuple[int, int] | None = None, block: int = 128
) -> tuple[Array, Array]:
    """Drop elements of a matrix, and change the other elements so that its products change least.

    weight: (outputs, inputs).  products: (inputs, inputs), sums over examples of products of two inputs.
    n_m: n and m to keep n of each m consecutive inputs; None to drop the share `sparsity` of each
    `block` of columns.  A hundredth of the mean of the diagonal is added to the diagonal.
    Returns the keep mask, and the changed weight with 0 where it is dropped, in float64.
    Source: Frantar & Alistarh 2023, "SparseGPT", algorithm 1.
    """
    tensors = tensors_of(weight)
    n, m = n_m or (0, 0)
    # Float64 throughout: the inverse of a nearly singular Hessian in float32 loses the differences that
    # choose elements.
    new_weight = astype(weight, "float64") * 1  # a copy, which is written below
    hessian = astype(products, "float64")
    columns = shape(new_weight)[1]
    is_dead = do("diagonal", hessian) == 0  # inputs that were always 0
    new_weight = do("where", is_dead, do("zeros_like", new_weight), new_weight)
    # Row j of the factor belongs to the inverse without the columns before j, whose values are final.
    factor = _inverse_factor(hessian, is_dead)
    diagonal = do("diagonal", factor)
    keep_mask = abs(new_weight) >= 0  # all true, in the library of the weight
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if n_m is None:
            # Over all rows of a block at once: which rows lose more elements is left to their losses.
            losses = do("reshape", (new_weight[:, start:end] / diagonal[start:end]) ** 2, (-1,))
            block_mask = tensors.keep_mask_of_highest(losses, round(sparsity * len(losses)))
            keep_mask[:, start:end] = do("reshape", block_mask, (-1, end - start))
        # Errors of a block are passed on to later columns by one product, as in the authors' code: column by
        # column the update would be bound by memory.
        errors = do("zeros_like", new_weight[:, start:end])
        for j in range(start, end):
            # n:m chooses m columns when the first of them is reached, so that corrections of earlier columns
            # count.
            if n_m is not None and j % m == 0:
                losses = (new_weight[:, j : j + m] / diagonal[j : j + m]) ** 2
                keep_mask[:, j : j + m] = tensors.ranks(losses) >= m - n
            errors[:, j - start] = new_weight[:, j] * ~keep_mask[:, j] / diagonal[j]
            new_weight[:, j] *= keep_mask[:, j]
            new_weight[:, j + 1 : end] -= errors[:, j - start, None] * factor[j, None, j + 1 : end]
        new_weight[:, end:] -= do("matmul", errors, factor[start:end, end:])
    return keep_mask, new_weight


def _inverse_factor(hessian: Array, is_dead: Array) -> Array:
    """Return the upper Cholesky factor of the inverse of a damped Hessian.  is_dead: inputs always 0."""
    eye = tensors_of(hessian).cast(np.eye(shape(hessian)[1]), hessian)
    # A dead input would make the matrix singular: its diagonal becomes 1.
    hessian = hessian + eye * is_dead
    hessian = hessian + eye * (0.01 * do("diagonal", hessian).mean())
    return do("moveaxis", do("linalg.cholesky", do("linalg.inv", hessian)), 0, 1)


def sparsegpt(
    weight: Array, products: Array, sparsity: float, n_m: tuple[int, int] | None
) -> tuple[Array, Array]:
    """Return the keep mask of a weight (outputs, inputs, window), and its changed values.

    products: sums of products of inputs, (groups, inputs * window, inputs * window).
    """
    outputs, *extents = shape(weight)
    # A convolution in groups has a matrix, and products of inputs, for each group.
    groups, columns = shape(products)[0], prod(extents)
    order = np.arange(columns)
    if n_m is not None:
        # Window before inputs: n:m counts consecutive input channels at one position of the window.
        order = order.reshape(extents[0], -1).T.reshape(-1)
    rows = do("reshape", weight, (groups, outputs // groups, columns))[:, :, order]
    ordered_products = products[:, order][:, :, order]
    masks, values = [], []
    for group_rows, group_products in zip(rows, ordered_products, strict=True):
        group_mask, group_values = sparsegpt_matrix(group_rows, group_products, sparsity, n_m)
        masks.append(group_mask)
        values.append(group_values)
    original_order = order.argsort()
    keep_mask, new_weight = (
        do("reshape", do("stack", matrices)[:, :, original_order], (outputs, *extents))
        for matrices in (masks, values)
    )
    return keep_mask, new_weight
