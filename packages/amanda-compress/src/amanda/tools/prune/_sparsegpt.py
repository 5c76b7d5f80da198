"""SparseGPT: weights that make up for what is dropped of them, layer by layer."""

from __future__ import annotations

from math import prod

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import astype, do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._arrays import Array


def sparsegpt(
    weight: Array, products: Array, sparsity: float, vectors: tuple[int, int] | None = None, block: int = 128
) -> tuple[Array, Array]:
    """Drop elements of a matrix, and change the others so that what it makes of the inputs changes least.

    weight: (outputs, inputs).  products: of each pair of inputs, summed over examples: (inputs, inputs).
    vectors: n and m to keep n of each m consecutive inputs; None to drop the share `sparsity` of each
    `block` of columns.  A hundredth of the mean of the diagonal is added to the diagonal.
    Returns what is kept, and the weight with 0 elsewhere, in float64.
    Source: Frantar & Alistarh 2023, "SparseGPT", algorithm 1.
    """
    tensors = tensors_of(weight)
    new, hessian = astype(weight, "float64") * 1, astype(products, "float64")
    columns = shape(new)[1]
    unread = do("diagonal", hessian) == 0
    new = do("where", unread, do("zeros_like", new), new)
    eye = tensors.cast(np.eye(columns), hessian)
    hessian = hessian + eye * unread
    hessian = hessian + eye * (0.01 * do("diagonal", hessian).mean())
    # Row j of the factor is of the inverse that is left when the columns before j are settled.
    factor = do("moveaxis", do("linalg.cholesky", do("linalg.inv", hessian)), 0, 1)
    diagonal = do("diagonal", factor)
    kept = abs(new) >= 0
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if vectors is None:
            losses = do("reshape", (new[:, start:end] / diagonal[start:end]) ** 2, (-1,))
            own = tensors.keep_mask_of_highest(losses, round(sparsity * len(losses)))
            kept[:, start:end] = do("reshape", own, (-1, end - start))
        errors = do("zeros_like", new[:, start:end])
        for j in range(start, end):
            if vectors is not None and j % vectors[1] == 0:
                n, m = vectors
                losses = (new[:, j : j + m] / diagonal[j : j + m]) ** 2
                kept[:, j : j + m] = tensors.ranks(losses) >= m - n
            errors[:, j - start] = new[:, j] * ~kept[:, j] / diagonal[j]
            new[:, j] *= kept[:, j]
            new[:, j + 1 : end] -= errors[:, j - start, None] * factor[j, None, j + 1 : end]
        new[:, end:] -= do("matmul", errors, factor[start:end, end:])
    return kept, new


def compensated(
    weight: Array, products: Array, sparsity: float, vectors: tuple[int, int] | None
) -> tuple[Array, Array]:
    """Return what is kept of a weight (outputs, inputs, window), and its new values.

    products: (groups, inputs * window, inputs * window), of a convolution's groups.
    """
    outputs, *extents = shape(weight)
    groups, columns = shape(products)[0], prod(extents)
    order = np.arange(columns)
    if vectors is not None:  # inputs that are consecutive at one place of the window
        order = order.reshape(extents[0], -1).T.reshape(-1)
    rows = do("reshape", weight, (groups, outputs // groups, columns))[:, :, order]
    own = products[:, order][:, :, order]
    made = [sparsegpt(one, products, sparsity, vectors) for one, products in zip(rows, own, strict=True)]
    kept, new = (
        do("reshape", do("stack", parts)[:, :, order.argsort()], (outputs, *extents))
        for parts in zip(*made, strict=True)
    )
    return kept, new
