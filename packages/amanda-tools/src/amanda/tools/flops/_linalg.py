"""Costs of decompositions, solvers, Fourier transforms and interpolation: FLOPs as textbooks count them.

Source: Golub and Van Loan, "Matrix Computations"; what iterates counts as it does on the average.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod

from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import no_cost, visits

_Count = Callable[[int, int, int], float]


def of_matrix(count: _Count, position: int = 0) -> Formula:
    """Operations for each matrix (..., m, n) of an input; the third number is min(m, n)."""

    def formula(op: Shapes) -> Cost:
        *batch, m, n = op.inputs[position]
        return Cost(0, round(prod(batch) * count(m, n, min(m, n))))

    return formula


def of_system(count: Callable[[int, int], float], matrix: int = 0) -> Formula:
    """Operations for each matrix (..., n, n) with so many right-hand sides."""

    def formula(op: Shapes) -> Cost:
        n = op.inputs[matrix][-1]
        sides = prod(op.out) // n if n else 0  # of all systems
        systems = max(prod(op.inputs[matrix][:-2]), 1)
        return Cost(0, round(systems * (count(n, 0)) + sides * (count(n, 1) - count(n, 0))))

    return formula


def _lu(m: int, n: int, k: int) -> float:
    return 2 * (m * n * k - (m + n) * k**2 / 2 + k**3 / 3)


def _qr(m: int, n: int, k: int) -> float:
    return 2 * _lu(m, n, k)


def _svd(m: int, n: int, k: int) -> float:
    return 6 * max(m, n) * k**2 + 20 * k**3


def reflected(op: Shapes) -> Cost:
    """Reflections (..., k) applied to each element of a matrix."""
    return Cost(0, 4 * prod(op.inputs[2]) * op.inputs[1][-1])


def fourier(steps: float, last: int = 0) -> Formula:
    """So many operations for each element and each halving of the transformed axes, by default `dim`."""

    def formula(op: Shapes) -> Cost:
        shape = max(op.inputs[0], op.out, key=prod)
        axes = range(-last, 0) if last else op.attributes.get("dim") or range(len(shape))
        extent = prod(shape[axis] for axis in axes)
        return Cost(0, round(steps * prod(shape) * log2(max(extent, 1))))

    return formula


def interpolation(taps: int, position: int | None = None) -> Formula:
    """So many neighbours, each weighted and added, for each element of the result or of an input."""
    return lambda op: Cost(0, 2 * taps * prod(op.out if position is None else op.inputs[position]))


def _sampled(dimensions: int) -> Formula:
    def formula(op: Shapes) -> Cost:
        mode = op.attributes.get("interpolation_mode", 0)
        taps = 1 if mode == 1 else (4 if mode == 2 else 2) ** dimensions
        return Cost(0, 2 * taps * max(map(prod, (op.inputs[0], op.out))))

    return formula


_TAPS = {"linear1d": 2, "bilinear2d": 4, "trilinear3d": 8, "bicubic2d": 16, "lanczos2d": 36}
_NEAREST = [f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)]
_UPSAMPLING = {
    f"{prefix}{kind}{suffix}": taps
    for kind, taps in _TAPS.items()
    for prefix, suffix in (("upsample_", ""), ("_upsample_", "_aa"))
}


def _solve(n: int, sides: int) -> float:
    return 2 / 3 * n**3 + _substitute(n, sides)


def _substitute(n: int, sides: int) -> float:
    return 2 * n**2 * sides


_LU = "linalg_lu linalg_lu_factor linalg_lu_factor_ex lu_with_info _lu_with_info _linalg_det _linalg_slogdet"

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_LU.split(), of_matrix(_lu)),
    **dict.fromkeys(("linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex"),
                    of_matrix(lambda m, n, k: n**3 / 3)),
    **dict.fromkeys(("linalg_inv_ex", "inverse"), of_matrix(lambda m, n, k: 2 * n**3)),
    **dict.fromkeys(("geqrf", "linalg_householder_product"), of_matrix(_qr)),
    "linalg_qr": of_matrix(lambda m, n, k: 2 * _qr(m, n, k)), "ormqr": reflected,
    **dict.fromkeys(("_linalg_svd", "linalg_svd"), of_matrix(_svd)),
    "linalg_pinv": of_matrix(lambda m, n, k: _svd(m, n, k) + 2 * m * n * k),
    **dict.fromkeys(("_linalg_eigh", "linalg_eigh"), of_matrix(lambda m, n, k: 9 * n**3)),
    "linalg_eig": of_matrix(lambda m, n, k: 25 * n**3),
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), of_matrix(lambda m, n, k: 10 * n**3)),
    "linalg_lstsq": of_matrix(_qr), "linalg_matrix_exp": of_matrix(lambda m, n, k: 12 * n**3),
    **dict.fromkeys(("_linalg_solve_ex", "linalg_solve_ex"), of_system(_solve)),
    "linalg_lu_solve": of_system(_substitute), "lu_solve": of_system(_substitute, 1),
    "linalg_ldl_solve": of_system(_substitute),
    **dict.fromkeys(("cholesky_solve", "_cholesky_solve_helper"), of_system(_substitute, 1)),
    "linalg_solve_triangular": of_system(lambda n, r: n**2 * r),
    "triangular_solve": of_system(lambda n, r: n**2 * r, 1),
    "cholesky_inverse": of_matrix(lambda m, n, k: 2 / 3 * n**3), "linalg_cross": visits(3),
    "_fft_c2c": fourier(5), "_fft_r2c": fourier(2.5), "_fft_c2r": fourier(2.5),
    **dict.fromkeys(_NEAREST, no_cost),
    **{f"{name}_backward": visits(1) for name in _NEAREST},
    **{name: interpolation(taps) for name, taps in _UPSAMPLING.items()},
    **{f"{name}_backward": interpolation(taps, 0) for name, taps in _UPSAMPLING.items()},
    "grid_sampler_2d": _sampled(2), "grid_sampler_3d": _sampled(3),
    "grid_sampler_2d_backward": _sampled(2), "grid_sampler_3d_backward": _sampled(3),
}  # fmt: skip
"""Formulas by ATen's names."""
