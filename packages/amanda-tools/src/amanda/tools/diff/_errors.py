"""Relative errors between two runs, of tensors in any layout and of ops, and errors that are expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry
from amanda.tools.kit import Tensors, place_text
from amanda.tools.libraries import numpy as np
from amanda.tools.stats import Statistics

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
    largest: float
    cosine: float | None = None
    exact: bool = True


def tolerance(dtype_a: str, dtype_b: str, rtol: float | None = None) -> float:
    """Return the relative error up to which tensors of two element types agree: the more precise type's."""
    if rtol is not None:
        return rtol
    tolerances = [TOLERANCES[dtype] for dtype in (dtype_a, dtype_b) if dtype in TOLERANCES]
    return min(tolerances) if len(tolerances) == 2 else max(tolerances, default=0.0)


def distance(
    pair: Pair, arrays: Sequence[NDArray[Any] | None], layouts: Sequence[str | None], floor: float = 0.0
) -> Distance:
    """Return how far a tensor of one run is from one of another.

    arrays: their numbers, None where they are not known.  layouts: axes of both by StandardMapping, or None.
    floor: a root mean square below which norms count as that.
    """
    numbers, other_numbers = arrays
    if numbers is None or other_numbers is None:
        return summary_distance(*pair, floor)
    distances = [
        array_distance(numbers, candidate, floor)
        for candidate in arrangements(other_numbers, layouts[1], numbers.shape, layouts[0])
    ]
    # Several arrangements fit where extents are equal; the closest is taken for the one that is meant.
    return min(distances, key=lambda d: d.relative, default=Distance(math.inf, math.inf))


def array_distance(a: NDArray[Any], b: NDArray[Any], floor: float = 0.0) -> Distance:
    """Return the distance of two arrays of the same shape, computed in float64 or complex128."""
    a, b = (array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (a, b))
    # NaN and Inf agree where both have them at the same places; the distance is of the other numbers.
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        nonfinite = ~finite
        if not np.array_equal(a[nonfinite], b[nonfinite], equal_nan=True):
            return Distance(math.inf, math.inf)
        a, b = a[finite], b[finite]
    a, b = a.reshape(-1), b.reshape(-1)
    if not a.size:
        return Distance(0.0, 0.0, cosine=1.0)
    difference = np.abs(a - b)
    scale = max(float(np.abs(a).max()), float(np.abs(b).max())) or 1.0  # squares stay in range
    a, b, difference_norm = a / scale, b / scale, _norm(difference / scale)
    norms = _norm(a), _norm(b)
    # The floor is a root mean square; times the root of the size it is a norm.
    reference = max(*norms, floor * math.sqrt(a.size) / scale)
    product = abs((a.conj() * b).sum()) if a.dtype.kind == "c" else (a * b).sum()
    # Rounding may put the cosine of equal tensors a bit over 1.
    cosine = min(1.0, float(product) / (norms[0] * norms[1])) if min(norms) > 0 else None
    return Distance(difference_norm / reference if reference else 0.0, float(difference.max()), cosine)


def _norm(array: NDArray[Any]) -> float:
    # Not np.linalg.norm: it calls BLAS, which starts threads for a sum.
    return math.sqrt(float(np.square(np.abs(array)).sum()))


def summary_distance(entry: Entry, other_entry: Entry, floor: float = 0.0) -> Distance:
    """Return the largest relative difference that statistics and samples show."""
    a, b = entry.summary.statistics, other_entry.summary.statistics
    counts = (a.elements, a.nan, a.inf, a.negative_inf)
    if counts != (b.elements, b.nan, b.inf, b.negative_inf):
        return Distance(math.inf, math.inf, exact=False)
    if not a.count:
        return Distance(0.0, 0.0, exact=False)
    root = math.sqrt(a.count)
    norm = max(a.l2, b.l2, floor * root)
    # For n numbers each of these gaps is at most the norm of the difference: by the triangle inequality for
    # L2, by Cauchy and Schwarz for the mean and for L1, and as subtracting the mean shortens a vector for
    # std.
    gaps = [abs(a.l2 - b.l2), root * abs(a.mean - b.mean), root * abs(a.std - b.std),
            abs(a.l1 - b.l1) / root]  # fmt: skip
    largest = max(abs(a.least - b.least), abs(a.most - b.most))
    relative = max(gaps) / norm if norm else 0.0
    sample, other_sample = entry.summary.sample, other_entry.summary.sample
    if entry.shape == other_entry.shape and sample and len(sample) == len(other_sample):
        sampled = array_distance(np.array(sample), np.array(other_sample), floor)
        errors = max(relative, sampled.relative), max(largest, sampled.largest)
        return Distance(*errors, sampled.cosine, exact=False)
    # The extremes are a bound too: a norm is at most the root of n times the largest magnitude.
    return Distance(max(relative, largest / (a.largest or 1.0) / root), largest, exact=False)


def noise_floor(entries: Iterable[Entry]) -> float:
    """Return the largest root mean square among what an op gave, times `NOISE`."""
    statistics = (entry.summary.statistics for entry in entries)
    return NOISE * max((s.l2 / math.sqrt(s.count) if s.count else 0.0 for s in statistics), default=0.0)


def pair_entries(entries: Sequence[Entry], other_entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pair entries of the same role and position, in order."""
    waiting = list(other_entries)
    for entry in entries:
        partner = next((e for e in waiting if (e.role, e.position) == (entry.role, entry.position)), None)
        if partner is not None:
            waiting.remove(partner)
            yield entry, partner


def arrangements(
    array: NDArray[Any], layout: str | None, shape: tuple[int, ...], target_layout: str | None
) -> Iterator[NDArray[Any]]:
    """Yield an array as one of another shape and layout; where layouts are not known, in each likely way."""
    if layout and target_layout and len(layout) == array.ndim and len(target_layout) == len(shape):
        transposed = _transpose_to(array, layout, shape, target_layout)
        if transposed is not None and transposed.size == math.prod(shape):
            yield transposed.reshape(shape)
            return
    has_shape = array.shape == shape
    if has_shape:
        yield array
    # Channels last against channels first.  In three axes of fitting shape the tensor is more likely
    # (batch, tokens, width), where nothing has moved.
    if array.ndim == len(shape) >= (4 if has_shape else 3):
        moved_arrays = np.moveaxis(array, -1, 1), np.moveaxis(array, 1, -1)
        yield from (moved for moved in moved_arrays if moved.shape == shape)
    if not has_shape and array.size == math.prod(shape):
        # Leading axes that are split otherwise, or other extents of 1.
        array_extents, extents = ([n for n in axes if n != 1] for axes in (array.shape, shape))
        if array_extents == extents or array.shape[-1:] == shape[-1:]:
            yield array.reshape(shape)


def _transpose_to(
    array: NDArray[Any], layout: str, shape: tuple[int, ...], target_layout: str
) -> NDArray[Any] | None:
    """Return the array with axes in the order of the target layout; None where letters do not correspond.

    A depthwise kernel has either one axis O of outputs, numbered by input, or the axes I and M.
    """
    if sorted(layout) == sorted(target_layout):
        return np.transpose(array, [layout.index(axis) for axis in target_layout])
    if "M" in layout and "O" in target_layout:
        spatial = [layout.index(axis) for axis in target_layout if axis not in "OI"]
        return np.transpose(array, [layout.index("I"), layout.index("M"), *spatial])
    if "M" in target_layout and layout.startswith("OI"):
        split = (shape[target_layout.index("I")], shape[target_layout.index("M")], *array.shape[2:])
        if array.size != math.prod(split):
            return None
        axes = ["IM".index(axis) if axis in "IM" else layout.index(axis) for axis in target_layout]
        return np.transpose(array.reshape(split), axes)
    return None


def join_pieces(run: Run, whole: Entry, other_run: Run, parts: Sequence[Entry]) -> Pair | None:
    """Return a tensor, and what executions of the other run give together; None where they do not fit.

    They fit if one axis alone has other extents, whose sum is that of the whole, or less: then they are the
    beginning or the end of it, as the logits of the last tokens are.  Parts of the shape of the whole are
    compared as the first or the last of them, their sum or their mean, whichever is closest: a cache that
    grows, gradients and losses of micro-batches.
    """
    if parts[0].shape == whole.shape or parts[-1].shape == whole.shape:
        return whole, _closest_part(run, whole, other_run, parts)
    if any(len(part.shape) != len(whole.shape) for part in parts):
        return None
    axes = {
        i for part in parts for i, extents in enumerate(zip(part.shape, whole.shape, strict=True))
        if extents[0] != extents[1]
    }  # fmt: skip
    if len(axes) != 1:
        return None
    axis = axes.pop()
    length, extent = whole.shape[axis], sum(part.shape[axis] for part in parts)
    has_numbers = all(entry.file is not None for entry in (whole, *parts))
    if extent > length or (extent < length and not has_numbers):
        return None
    # Samples are at fixed positions of each part, which are other positions of the whole: they are left out.
    statistics = reduce(Statistics.merged, (part.summary.statistics for part in parts))
    summary = replace(parts[0].summary, statistics=statistics, sample=())
    shape = (*whole.shape[:axis], extent, *whole.shape[axis + 1 :])
    read_parts = partial(_concatenate_parts, other_run, parts, axis) if has_numbers else None
    assembled = other_run.add_derived(parts[0]._replace(shape=shape, summary=summary), read_parts)
    if extent == length:
        return whole, assembled
    # The part that a run computes may be the beginning or the end of the whole: the nearer end counts.
    candidates = [
        run.add_derived(whole._replace(shape=shape), partial(_take_range, run, whole, axis, start, extent))
        for start in (length - extent, 0)
    ]
    numbers = _concatenate_parts(other_run, parts, axis)
    return min(candidates, key=lambda entry: array_distance(_array(run, entry), numbers).relative), assembled


def piece_ranges(wholes: Sequence[Entry], parts: Sequence[Entry]) -> list[range] | None:
    """Return the parts, in order, of which each whole tensor consists; None where they do not add up.

    A single whole tensor has all the parts.  Parts of the shape of the whole, such as gradients of
    micro-batches, are as many for each.
    """
    if len(wholes) == 1:
        return [range(len(parts))]
    if wholes[0].shape == parts[0].shape:
        # Gradients of micro-batches have the shape of the whole, so extents cannot say where a whole ends.
        count, remainder = divmod(len(parts), len(wholes))
        return None if remainder or count < 2 else [range(i, i + count) for i in range(0, len(parts), count)]
    spans, start = [], 0
    for whole in wholes:
        end, missing = start, math.prod(whole.shape)
        while end < len(parts) and missing > 0:
            missing -= math.prod(parts[end].shape)
            end += 1
        if missing or end == start:
            return None
        spans.append(range(start, end))
        start = end
    return spans if start == len(parts) else None


def _closest_part(run: Run, whole: Entry, other_run: Run, parts: Sequence[Entry]) -> Entry:
    """Return the first or last part, or the sum or mean of all, whichever is closest to the whole."""
    candidates = [part for part in (parts[0], parts[-1]) if part.shape == whole.shape]
    if any(entry.file is None for entry in (whole, *parts)):
        return candidates[0]
    numbers = _array(run, whole)
    if np.array_equal(numbers, _array(other_run, candidates[0]), equal_nan=True):
        return candidates[0]
    # Losses of micro-batches are averaged, gradients are added up: either may make the whole.
    if all(part.shape == whole.shape for part in parts) and numbers.dtype.kind in "fc":
        candidates += [
            other_run.add_derived(parts[0]._replace(), partial(_scaled_sum, other_run, parts, divisor))
            for divisor in (1, len(parts))
        ]
    return min(candidates, key=lambda part: array_distance(numbers, _array(other_run, part)).relative)


def _scaled_sum(run: Run, parts: Sequence[Entry], divisor: int) -> NDArray[Any]:
    total: NDArray[Any] = sum(_array(run, part) for part in parts) / divisor  # type: ignore[assignment]
    return total


def _array(run: Run, entry: Entry) -> NDArray[Any]:
    """Return the numbers of a tensor whose file is known to exist."""
    array = run.array(entry)
    assert array is not None
    return array


def _concatenate_parts(run: Run, parts: Sequence[Entry], axis: int) -> NDArray[Any]:
    return np.concatenate([_array(run, part) for part in parts], axis)


def _take_range(run: Run, whole: Entry, axis: int, start: int, extent: int) -> NDArray[Any]:
    return np.take(_array(run, whole), range(start, start + extent), axis)


@dataclass(frozen=True)
class Comparison:
    """One execution of an op that both runs have, or the output of a module.

    phase to source: of run a.  other_type to other_source: of run b.  relative: L2 norm of the difference
    over the larger norm of the two; inf if NaN, Inf or shapes differ.  cosine: of the angle between the
    tensors; None if only summaries are known.  largest: largest magnitude of a difference.  exact: True if
    all numbers were compared, False for a sample.  tolerance: largest `relative` at which the tensors agree.
    by_type: tolerance of the element types alone; earlier ops may raise it.  dtypes: element types of both.
    inputs: True if the inputs agree; None if that is unknown or nothing differs.  weight: relative error of
    the weight; None likewise.  expected: relative error that the control lets expect; None without a control,
    and with a tolerance for all.  read: inputs and weights of the op in run a, in words.  failure: error of
    run b at this op.
    is_retyped: True if the runs differ in the element type of this op, and not in that of most products.
    only: "a" or "b" for an op that is the cause and has no counterpart; the first fields are of that run, and
    `relative` is of what the next op reads.  reason: why such an op is the cause, in words.
    """

    phase: str
    type: str
    module: str
    source: str
    other_type: str
    other_module: str
    other_source: str
    execution: int
    relative: float
    cosine: float | None
    largest: float
    exact: bool
    tolerance: float
    by_type: float
    dtypes: tuple[str, str]
    inputs: bool | None = None
    weight: float | None = None
    expected: float | None = None
    read: str = ""
    failure: str = ""
    is_retyped: bool = False
    only: str = ""
    reason: str = ""

    @property
    def diverges(self) -> bool:
        """True if the relative error is larger than the tolerance, or the op has two element types."""
        return self.relative > self.tolerance or self.is_retyped

    @property
    def verdict(self) -> str:
        """ "same" to the last bit, "close" within the tolerance, or "different"."""
        return "different" if self.diverges else "close" if self.relative else "same"

    @property
    def place(self) -> str:
        """Type, module, phase and source line in run a; also those of run b if type or module differ."""
        if self.only or (self.type, self.module) == (self.other_type, self.other_module):
            return place_text(self.type, self.module, self.phase, self.source)
        place = place_text(self.type, self.module, source=self.source)
        other_place = place_text(self.other_type, self.other_module, source=self.other_source)
        return f"{place} ({self.phase}), which is {other_place} in b"

    def __str__(self) -> str:
        lines = [place_text(self.type, self.module, self.phase, self.source)]
        if self.only:
            lines.append(f"  {self.reason}")
        elif (self.type, self.module) != (self.other_type, self.other_module):
            lines.append(f"  against {place_text(self.other_type, self.other_module)}")
        if self.other_source and self.other_source != self.source:
            lines.append(f"  at {self.other_source} in b")
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.6g}"
        lines.append(
            f"  relative error {self.relative:.3g} (tolerance {self.tolerance:g}){cosine}, "
            f"largest difference {self.largest:.3g}, execution {self.execution}"
        )
        if self.dtypes[0] != self.dtypes[1]:
            lines.append(f"  {self.dtypes[0]} in a, {self.dtypes[1]} in b{self._advice()}")
        if self.inputs is not None:
            lines.append(f"  its inputs {'agree' if self.inputs else 'differ'}")
        if self.weight is not None:
            lines.append(f"  relative error of its weight {self.weight:.3g}")
        return "\n".join(lines)

    def _advice(self) -> str:
        """Return the tolerance that would pass two element types; "" where nothing diverges by theirs."""
        # A control or a tolerance of the user's own is no tolerance by type.
        if not self.diverges or self.expected is not None or self.by_type != tolerance(*self.dtypes):
            return ""
        loosest = max(self.dtypes, key=lambda dtype: TOLERANCES.get(dtype, 0.0))
        rtol = f"{TOLERANCES.get(loosest, 0.0):g}"
        return f"; pass rtol={rtol} (--rtol {rtol}) for the tolerance of {loosest}"


MARGIN = 10.0
"""How many times the expected error agrees: another order of summation may round a few times as much."""
LARGEST = 1.0
"""Largest error that is expected: with it nothing of a tensor is right."""
_COARSE = TOLERANCES["bfloat16"]
"""Error up to which the rounding of several ops is taken for an explanation, also in more precise types."""


@dataclass(frozen=True)
class Expected:
    """Relative errors that a control shows of the ops of run a.

    errors: by an op's index and its execution; at most `LARGEST`.  is_wider: True for a control in a more
    precise type, whose distance from run a is more than the noise of a run.
    """

    errors: Mapping[tuple[int, int], float]
    is_wider: bool

    def error(self, entry: Entry, read_error: float = math.inf) -> float | None:
        """Return the error that is expected of a tensor of run a; None for an op that the control lacks.

        read_error: how far what its op reads is off between the runs that are compared; inf where that is
        unknown.
        """
        error = self.errors.get((entry.op, entry.execution))
        if error is None or not self.is_wider:
            return error
        # Inputs that are equal in both runs explain no difference, however far they are from the control.
        return explained_error(error, entry.dtype, read_error)


def explained_error(error: float, dtype: str, read_error: float) -> float:
    """Return how much of an error the element type and the error of inputs explain; at least rounding.

    Integers have no rounding.  An index that two near values decide may be any other.
    """
    if dtype in TOLERANCES:
        explained = max(_COARSE, TOLERANCES[dtype], MARGIN * read_error) / MARGIN
    else:
        explained = math.inf if read_error else 0.0
    # By luck the distance from a wider control may be 0, but rounding is always expected.
    return max(min(error, explained), _rounding(dtype))


def _rounding(dtype: str) -> float:
    """Return the root mean square of the relative error of rounding to an element type; 0 for integers."""
    if not dtype.startswith(("float", "bfloat")):
        return 0.0
    from ml_dtypes import finfo

    # Rounding errs by up to half a unit in the last place, evenly: the root mean square is 1/sqrt(12) of the
    # unit, a little below a quarter of it for a mantissa between 1 and 2.
    bits: int = finfo(Tensors.numpy_type(dtype)).nmant  # type: ignore[no-untyped-call]
    return float(2.0**-bits / 4)
