"""Distances of two tensors, whose axes may be in another order: NCHW and NHWC, OIHW and HWIO."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amanda.tools.dump import Entry
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Pair = tuple[Entry, Entry]

TOLERANCES = {
    "float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "float16": 2e-2,
    "bfloat16": 8e-2, "float8_e4m3fn": 0.5, "float8_e4m3fnuz": 0.5, "float8_e5m2": 0.7,
    "float8_e5m2fnuz": 0.7,
}  # fmt: skip
"""Largest relative error at which tensors agree, by element type; 0 for integers and all other types."""

NOISE = 0.1
"""Smallest norm of a tensor, as a share of the largest result of the same op: the gradient of a bias may be
rounding noise only."""


@dataclass(frozen=True)
class Distance:
    """Distance of two tensors.

    relative: L2 norm of the difference over the larger norm of the two; inf if NaN, Inf or shapes differ.
    cosine: of the angle between them; None if only summaries are known.  largest: largest magnitude of a
    difference.  exact: True if all numbers were compared, False for a sample.
    """

    relative: float
    cosine: float | None
    largest: float
    exact: bool


def tolerance(one: str, other: str, rtol: float | None = None) -> float:
    """Return the relative error up to which tensors of two element types agree: the more precise type's."""
    if rtol is not None:
        return rtol
    known = [TOLERANCES[dtype] for dtype in (one, other) if dtype in TOLERANCES]
    return min(known) if len(known) == 2 else max(known, default=0.0)


def distance(
    pair: Pair, arrays: Sequence[NDArray[Any] | None], layouts: Sequence[str | None], floor: float = 0.0
) -> Distance:
    """Return how far a tensor of one run is from one of another.

    arrays: their numbers, None where they are not known.  layouts: axes of both by StandardMapping, or None.
    floor: a root mean square below which norms count as that.
    """
    numbers, others = arrays
    if numbers is None or others is None:
        return summary_distance(*pair, floor)
    found = [
        array_distance(numbers, candidate, floor)
        for candidate in arranged(others, layouts[1], numbers.shape, layouts[0])
    ]
    return min(found, key=lambda one: one.relative, default=Distance(math.inf, None, math.inf, True))


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def array_distance(one: NDArray[Any], other: NDArray[Any], floor: float = 0.0) -> Distance:
    """Return how far numbers are from others of the same shape."""
    return _of_arrays(_wide(one), _wide(other), floor)


def _of_arrays(one: NDArray[Any], other: NDArray[Any], floor: float) -> Distance:
    finite = np.isfinite(one) & np.isfinite(other)
    if not finite.all():
        odd = ~finite
        if not np.array_equal(one[odd], other[odd], equal_nan=True):
            return Distance(math.inf, None, math.inf, True)
        one, other = one[finite], other[finite]
    one, other = one.reshape(-1), other.reshape(-1)
    if not one.size:
        return Distance(0.0, 1.0, 0.0, True)
    difference = np.abs(one - other)
    scale = max(float(np.abs(one).max()), float(np.abs(other).max())) or 1.0  # squares stay in range
    one, other, gap = one / scale, other / scale, _norm(difference / scale)
    norms = _norm(one), _norm(other)
    reference = max(*norms, floor * math.sqrt(one.size) / scale)
    product = abs((one.conj() * other).sum()) if one.dtype.kind == "c" else (one * other).sum()
    cosine = min(1.0, float(product) / (norms[0] * norms[1])) if min(norms) > 0 else None
    return Distance(gap / reference if reference else 0.0, cosine, float(difference.max()), True)


def _norm(array: NDArray[Any]) -> float:
    """Return the L2 norm; BLAS, which numpy's asks, starts threads for it."""
    return math.sqrt(float(np.square(np.abs(array)).sum()))


def summary_distance(entry: Entry, other: Entry, floor: float = 0.0) -> Distance:
    """Return the largest relative difference that statistics and samples show."""
    one, two = entry.summary.statistics, other.summary.statistics
    counts = (one.elements, one.nan, one.inf, one.negative_inf)
    if counts != (two.elements, two.nan, two.inf, two.negative_inf):
        return Distance(math.inf, None, math.inf, False)
    if not one.count:
        return Distance(0.0, None, 0.0, False)
    root = math.sqrt(one.count)
    norm = max(one.l2, two.l2, floor * root)
    gaps = [abs(one.l2 - two.l2), root * abs(one.mean - two.mean), root * abs(one.std - two.std),
            abs(one.l1 - two.l1) / root]  # fmt: skip
    largest = max(abs(one.least - two.least), abs(one.most - two.most))
    relative = max(gaps) / norm if norm else 0.0
    sample, other_sample = entry.summary.sample, other.summary.sample
    if entry.shape == other.shape and sample and len(sample) == len(other_sample):
        sampled = _of_arrays(np.array(sample), np.array(other_sample), floor)
        return Distance(max(relative, sampled.relative), sampled.cosine, max(largest, sampled.largest), False)
    return Distance(max(relative, largest / (one.largest or 1.0) / root), None, largest, False)


def scale(entries: Iterable[Entry]) -> float:
    """Return the largest root mean square among what an op gave, times `NOISE`."""
    told = (entry.summary.statistics for entry in entries)
    return NOISE * max((one.l2 / math.sqrt(one.count) if one.count else 0.0 for one in told), default=0.0)


def matched(one: Sequence[Entry], other: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pair entries of the same role and position, in order."""
    waiting = list(other)
    for entry in one:
        found = next((e for e in waiting if (e.role, e.position) == (entry.role, entry.position)), None)
        if found is not None:
            waiting.remove(found)
            yield entry, found


def arranged(
    array: NDArray[Any], layout: str | None, shape: tuple[int, ...], wanted: str | None
) -> Iterator[NDArray[Any]]:
    """Yield an array as one of another shape and layout; where layouts are not known, in each likely way."""
    if layout and wanted and len(layout) == array.ndim and len(wanted) == len(shape):
        turned = _turned(array, layout, shape, wanted)
        if turned is not None and turned.size == math.prod(shape):
            yield turned.reshape(shape)
            return
    if array.shape == shape:
        yield array
    if array.ndim >= 3 and array.ndim == len(shape):
        for moved in (np.moveaxis(array, -1, 1), np.moveaxis(array, 1, -1)):
            if moved.shape == shape and (array.ndim > 3 or array.shape != shape):
                yield moved
    if array.shape != shape and array.size == math.prod(shape) and _is_folded(array.shape, shape):
        yield array.reshape(shape)


def _turned(array: NDArray[Any], layout: str, shape: tuple[int, ...], wanted: str) -> NDArray[Any] | None:
    """Return the array with axes in the wanted order.

    A depthwise kernel has either one axis O of outputs, numbered by input, or the axes I and M.
    """
    if sorted(layout) == sorted(wanted):
        return np.transpose(array, [layout.index(axis) for axis in wanted])
    if "M" in layout and "O" in wanted:
        spatial = [layout.index(axis) for axis in wanted if axis not in "OI"]
        return np.transpose(array, [layout.index("I"), layout.index("M"), *spatial])
    if "M" in wanted and layout.startswith("OI"):
        split = (shape[wanted.index("I")], shape[wanted.index("M")], *array.shape[2:])
        if array.size != math.prod(split):
            return None
        axes = ["IM".index(axis) if axis in "IM" else layout.index(axis) for axis in wanted]
        return np.transpose(array.reshape(split), axes)
    return None


def _is_folded(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if shapes differ in how leading axes are split, or by extents of 1."""
    if [n for n in one if n != 1] == [n for n in other if n != 1]:
        return True
    return bool(one) and bool(other) and one[-1] == other[-1]
