"""Importance of the elements of a weight: by its values, its gradients and its inputs."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import astype, do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, MATRIX_PRODUCTS
from amanda.tools.prune._masks import Array

if TYPE_CHECKING:
    from amanda.tools.prune._weight import PrunedWeight


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


def scores(weight: PrunedWeight, importance: str, seed: int, update: int) -> Array:
    """Return the importance of each element of a weight, in the order of `PrunedWeight.ordered`.

    "magnitude": |w| (Han et al. 2015).  "gradient": |w * g|, the change of the loss to first order (Molchanov
    et al. 2019, eq. 8).  "movement": the sum of -w * g over all steps (Sanh et al. 2020, sec. 3).  "wanda":
    |w| * ||x||_2 (Sun et al. 2023, eq. 1).  "random": seeded by the
    weight's number and the step alone, so that every framework draws the same.
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
    uniform = random.random(tuple(weight.magnitudes.shape), np.float32)
    return weight.like(uniform, weight.magnitudes)


def _norms(weight: PrunedWeight) -> Array:
    """Return the norm of the inputs that each element (outputs, inputs, window) multiplies."""
    squares = weight.inputs  # (groups, inputs * window)
    groups, outputs = shape(squares)[0], weight.canonical_shape[0]
    norms = do("reshape", squares**0.5, (groups, 1, -1))
    per_output = do("broadcast_to", norms, (groups, outputs // groups, shape(norms)[-1]))
    return do("reshape", per_output, weight.canonical_shape)


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
    new_weight, hessian = astype(weight, "float64") * 1, astype(products, "float64")
    columns = shape(new_weight)[1]
    unread = do("diagonal", hessian) == 0
    new_weight = do("where", unread, do("zeros_like", new_weight), new_weight)
    # A dead input would make the matrix singular: its weights become 0, and its diagonal 1.
    eye = tensors.cast(np.eye(columns), hessian)
    hessian = hessian + eye * unread
    hessian = hessian + eye * (0.01 * do("diagonal", hessian).mean())
    # Row j of the factor belongs to the inverse without the columns before j, whose values are final.
    factor = do("moveaxis", do("linalg.cholesky", do("linalg.inv", hessian)), 0, 1)
    diagonal = do("diagonal", factor)
    keep_mask = abs(new_weight) >= 0
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if n_m is None:
            losses = do("reshape", (new_weight[:, start:end] / diagonal[start:end]) ** 2, (-1,))
            block_mask = tensors.keep_mask_of_highest(losses, round(sparsity * len(losses)))
            keep_mask[:, start:end] = do("reshape", block_mask, (-1, end - start))
        errors = do("zeros_like", new_weight[:, start:end])
        for j in range(start, end):
            if n_m is not None and j % n_m[1] == 0:
                n, m = n_m
                losses = (new_weight[:, j : j + m] / diagonal[j : j + m]) ** 2
                keep_mask[:, j : j + m] = tensors.ranks(losses) >= m - n
            errors[:, j - start] = new_weight[:, j] * ~keep_mask[:, j] / diagonal[j]
            new_weight[:, j] *= keep_mask[:, j]
            new_weight[:, j + 1 : end] -= errors[:, j - start, None] * factor[j, None, j + 1 : end]
        new_weight[:, end:] -= do("matmul", errors, factor[start:end, end:])
    return keep_mask, new_weight


def sparsegpt(
    weight: Array, products: Array, sparsity: float, n_m: tuple[int, int] | None
) -> tuple[Array, Array]:
    """Return the keep mask of a weight (outputs, inputs, window), and its changed values.

    products: sums of products of inputs, (groups, inputs * window, inputs * window).
    """
    outputs, *extents = shape(weight)
    groups, columns = shape(products)[0], prod(extents)
    order = np.arange(columns)
    if n_m is not None:  # n:m counts consecutive input channels at one position of the window
        order = order.reshape(extents[0], -1).T.reshape(-1)
    rows = do("reshape", weight, (groups, outputs // groups, columns))[:, :, order]
    ordered_products = products[:, order][:, :, order]
    pruned = [
        sparsegpt_matrix(group_rows, products, sparsity, n_m)
        for group_rows, products in zip(rows, ordered_products, strict=True)
    ]
    keep_mask, new_weight = (
        do("reshape", do("stack", parts)[:, :, order.argsort()], (outputs, *extents))
        for parts in zip(*pruned, strict=True)
    )
    return keep_mask, new_weight
