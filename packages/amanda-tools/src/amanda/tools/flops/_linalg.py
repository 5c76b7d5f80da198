"""Costs of decompositions, solvers, Fourier transforms and interpolation: FLOPs as textbooks count them.

Source: Golub and Van Loan, "Matrix Computations"; what iterates counts as it does on the average.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod

from amanda.tools.flops._cost import Cost, Formula, Shapes, table
from amanda.tools.flops._formulas import no_cost, visits


def of_matrix(count: Callable[[int, int, int], float]) -> Formula:
    """Count operations for each matrix (..., m, n) of the first input; the third number is min(m, n)."""

    def formula(op: Shapes) -> Cost:
        *batch, m, n = op.inputs[0]
        return Cost(0, round(prod(batch) * count(m, n, min(m, n))))

    return formula


def of_square(factor: float) -> Formula:
    """Count so many times n^3 operations for each matrix (..., n, n)."""
    return of_matrix(lambda m, n, k: factor * n**3)


def of_system(each: float, matrix: int = 0, once: float = 0) -> Formula:
    """Count for each matrix (..., n, n) `once` n^3 operations, and `each` n^2 for each right-hand side."""

    def formula(op: Shapes) -> Cost:
        n = op.inputs[matrix][-1]
        sides = prod(op.out) // n if n else 0  # of all systems
        systems = max(prod(op.inputs[matrix][:-2]), 1)
        return Cost(0, round(systems * (once * n**3) + sides * (each * n**2)))

    return formula


def _lu(m: int, n: int, k: int) -> float:
    return 2 * (m * n * k - (m + n) * k**2 / 2 + k**3 / 3)


def _svd(m: int, n: int, k: int) -> float:
    return 6 * max(m, n) * k**2 + 20 * k**3


def reflected(op: Shapes) -> Cost:
    """Count reflections (..., k) applied to each element of a matrix."""
    return Cost(0, 4 * prod(op.inputs[2]) * op.inputs[1][-1])


def fourier(steps: float, last: int = 0) -> Formula:
    """Count operations for each element and each halving of the transformed axes, by default `dim`."""

    def formula(op: Shapes) -> Cost:
        shape = max(op.inputs[0], op.out, key=prod)
        axes = range(-last, 0) if last else op.attributes.get("dim") or range(len(shape))
        extent = prod(shape[axis] for axis in axes)
        return Cost(0, round(steps * prod(shape) * log2(max(extent, 1))))

    return formula


def interpolation(taps: int, position: int | None = None) -> Formula:
    """Count so many neighbours, each weighted and added, for each element of the result or of an input."""
    return lambda op: Cost(0, 2 * taps * prod(op.out if position is None else op.inputs[position]))


def sampled(dimensions: int) -> Formula:
    """Count the neighbours, as the mode of interpolation has them, of each point of a grid."""

    def formula(op: Shapes) -> Cost:
        mode = op.attributes.get("interpolation_mode", 0)
        taps = 1 if mode == 1 else (4 if mode == 2 else 2) ** dimensions
        return Cost(0, 2 * taps * max(map(prod, (op.inputs[0], op.out))))

    return formula


_TAPS = {
    "upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8, "upsample_bicubic2d": 16,
    "_upsample_linear1d_aa": 2, "_upsample_bilinear2d_aa": 4, "_upsample_trilinear3d_aa": 8,
    "_upsample_bicubic2d_aa": 16, "upsample_lanczos2d": 36, "_upsample_lanczos2d_aa": 36,
}  # fmt: skip
_NEAREST = [f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)]

FORMULAS: dict[str, Formula] = table(
    (of_matrix(_lu), "linalg_lu linalg_lu_factor linalg_lu_factor_ex lu_with_info _lu_with_info"),
    (of_matrix(_lu), "_linalg_det _linalg_slogdet"),
    (of_square(1 / 3), "linalg_cholesky_ex cholesky linalg_ldl_factor_ex"),
    (of_square(2 / 3), "cholesky_inverse"),
    (of_square(2), "linalg_inv_ex inverse"),
    (of_square(9), "_linalg_eigh linalg_eigh"),
    (of_square(10), "linalg_eigvals _linalg_eigvals"),
    (of_square(12), "linalg_matrix_exp"),
    (of_square(25), "linalg_eig"),
    (of_matrix(lambda m, n, k: 2 * _lu(m, n, k)), "geqrf linalg_householder_product linalg_lstsq"),
    (of_matrix(lambda m, n, k: 4 * _lu(m, n, k)), "linalg_qr"),
    (of_matrix(_svd), "_linalg_svd linalg_svd"),
    (of_matrix(lambda m, n, k: _svd(m, n, k) + 2 * m * n * k), "linalg_pinv"),
    (of_system(2, once=2 / 3), "_linalg_solve_ex linalg_solve_ex"),
    (of_system(2), "linalg_lu_solve linalg_ldl_solve"),
    (of_system(2, matrix=1), "lu_solve cholesky_solve _cholesky_solve_helper"),
    (of_system(1), "linalg_solve_triangular"),
    (of_system(1, matrix=1), "triangular_solve"),
    (reflected, "ormqr"), (visits(3), "linalg_cross"),
    (fourier(5), "_fft_c2c"), (fourier(2.5), "_fft_r2c _fft_c2r"),
    (no_cost, " ".join(_NEAREST)), (visits(1), " ".join(f"{name}_backward" for name in _NEAREST)),
    *((interpolation(taps), name) for name, taps in _TAPS.items()),
    *((interpolation(taps, 0), f"{name}_backward") for name, taps in _TAPS.items()),
    (sampled(2), "grid_sampler_2d grid_sampler_2d_backward"),
    (sampled(3), "grid_sampler_3d grid_sampler_3d_backward"),
)  # fmt: skip
"""Formulas by ATen's names."""
