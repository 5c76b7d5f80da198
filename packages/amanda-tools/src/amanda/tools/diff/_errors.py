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
    """Return rtol, if given, else the tolerance of the more precise floating type; 0.0 for other types."""
    if rtol is not None:
        return rtol
    tolerances = [TOLERANCES[dtype] for dtype in (dtype_a, dtype_b) if dtype in TOLERANCES]
    return min(tolerances) if len(tolerances) == 2 else max(tolerances, default=0.0)


def distance(
    pair: Pair, arrays: Sequence[NDArray[Any] | None], layouts: Sequence[str | None], floor: float = 0.0
) -> Distance:
    """Return how far a tensor of one run is from one of another; by summaries where numbers are not known.

    arrays: their numbers, None where they are not known.  layouts: axes of both by StandardMapping, or None.
    floor: a root mean square below which norms count as that.  Infinite for shapes that do not fit.
    """
    numbers, other_numbers = arrays
    if numbers is None or other_numbers is None:
        return summary_distance(*pair, floor)
    candidates = arrangements(other_numbers, layouts[1], numbers.shape, layouts[0])
    distances = [array_distance(numbers, candidate, floor) for candidate in candidates]
    # Several arrangements fit where extents are equal; the closest is taken for the one that is meant.
    return min(distances, key=lambda d: d.relative, default=Distance(math.inf, math.inf))


def array_distance(a: NDArray[Any], b: NDArray[Any], floor: float = 0.0) -> Distance:
    """Return the distance of two arrays of one shape, in float64; inf if their NaN or Inf differ."""
    # floor: as of `distance`.
    a, b = (array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (a, b))
    # NaN and Inf agree where both have them at the same places; the distance is of the other numbers.
    are_finite = np.isfinite(a) & np.isfinite(b)
    if not are_finite.all():
        are_nonfinite = ~are_finite
        if not np.array_equal(a[are_nonfinite], b[are_nonfinite], equal_nan=True):
            return Distance(math.inf, math.inf)
        a, b = a[are_finite], b[are_finite]
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
    """Return a lower bound of a distance, the largest that summaries show; inf for other counts."""
    a, b = entry.summary.statistics, other_entry.summary.statistics
    kind_counts = (a.elements, a.nan, a.inf, a.negative_inf)
    if kind_counts != (b.elements, b.nan, b.inf, b.negative_inf):
        return Distance(math.inf, math.inf, exact=False)
    if not a.count:
        return Distance(0.0, 0.0, exact=False)
    root_of_count = math.sqrt(a.count)
    norm = max(a.l2, b.l2, floor * root_of_count)
    # For n numbers each of these gaps is at most the norm of the difference: by the triangle inequality for
    # L2, by Cauchy and Schwarz for the mean and for L1, and as subtracting the mean shortens a vector for
    # std.
    norm_gaps = [abs(a.l2 - b.l2), root_of_count * abs(a.mean - b.mean), root_of_count * abs(a.std - b.std),
                 abs(a.l1 - b.l1) / root_of_count]  # fmt: skip
    largest_gap = max(abs(a.least - b.least), abs(a.most - b.most))
    relative = max(norm_gaps) / norm if norm else 0.0
    sample, other_sample = entry.summary.sample, other_entry.summary.sample
    if entry.shape == other_entry.shape and sample and len(sample) == len(other_sample):
        sample_distance = array_distance(np.array(sample), np.array(other_sample), floor)
        largest_errors = max(relative, sample_distance.relative), max(largest_gap, sample_distance.largest)
        return Distance(*largest_errors, sample_distance.cosine, exact=False)
    # The extremes are a bound too: a norm is at most the root of n times the largest magnitude.
    return Distance(max(relative, largest_gap / (a.largest or 1.0) / root_of_count), largest_gap, exact=False)


def noise_floor(entries: Iterable[Entry]) -> float:
    """Return the largest root mean square among what an op gave, times `NOISE`."""
    statistics = (entry.summary.statistics for entry in entries)
    return NOISE * max((s.l2 / math.sqrt(s.count) if s.count else 0.0 for s in statistics), default=0.0)


def pair_entries(entries: Sequence[Entry], other_entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pair entries of the same role and position, in order; leave out those without a partner."""
    unpaired = list(other_entries)
    for entry in entries:
        partner = next((e for e in unpaired if (e.role, e.position) == (entry.role, entry.position)), None)
        if partner is not None:
            unpaired.remove(partner)
            yield entry, partner


def arrangements(
    array: NDArray[Any], layout: str | None, shape: tuple[int, ...], target_layout: str | None
) -> Iterator[NDArray[Any]]:
    """Yield an array as one of another shape and layout; where layouts are unknown, in each likely way."""
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
        extents, target_extents = ([n for n in axes if n != 1] for axes in (array.shape, shape))
        if extents == target_extents or array.shape[-1:] == shape[-1:]:
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
    unequal_axes = {
        axis for part in parts for axis in range(len(whole.shape)) if part.shape[axis] != whole.shape[axis]
    }  # fmt: skip
    if len(unequal_axes) != 1:
        return None
    axis = unequal_axes.pop()
    length, extent = whole.shape[axis], sum(part.shape[axis] for part in parts)
    has_numbers = all(entry.file is not None for entry in (whole, *parts))
    if extent > length or (extent < length and not has_numbers):
        return None
    # Samples of parts are of other positions than those of the whole: the summary has none.
    statistics = reduce(Statistics.merged, (part.summary.statistics for part in parts))
    summary = replace(parts[0].summary, statistics=statistics, sample=())
    shape = (*whole.shape[:axis], extent, *whole.shape[axis + 1 :])
    # The joined tensor is in no file: its numbers are concatenated when they are read.
    read_parts = partial(_concatenate_parts, other_run, parts, axis) if has_numbers else None
    joined_entry = other_run.add_derived(parts[0]._replace(shape=shape, summary=summary), read_parts)
    if extent == length:
        return whole, joined_entry
    # The part that a run computes may be the beginning or the end of the whole: the nearer end counts.
    ends = [
        run.add_derived(whole._replace(shape=shape), partial(_take_range, run, whole, axis, start, extent))
        for start in (length - extent, 0)
    ]
    numbers = _concatenate_parts(other_run, parts, axis)
    return min(ends, key=lambda entry: array_distance(_array(run, entry), numbers).relative), joined_entry


def piece_ranges(wholes: Sequence[Entry], parts: Sequence[Entry]) -> list[range] | None:
    """Return for each whole tensor the range of the parts that make it up, in order; None if they do not.

    A single whole tensor has all the parts.  Parts of the shape of the whole, such as gradients of
    micro-batches, are as many for each.
    """
    if len(wholes) == 1:
        return [range(len(parts))]
    if wholes[0].shape == parts[0].shape:
        # Gradients of micro-batches have the shape of the whole, so extents cannot say where a whole ends.
        share, remainder = divmod(len(parts), len(wholes))
        return None if remainder or share < 2 else [range(i, i + share) for i in range(0, len(parts), share)]
    part_ranges, start = [], 0
    for whole in wholes:
        end, missing_elements = start, math.prod(whole.shape)
        while end < len(parts) and missing_elements > 0:
            missing_elements -= math.prod(parts[end].shape)
            end += 1
        if missing_elements or end == start:  # a part belongs to two wholes, or there are no more
            return None
        part_ranges.append(range(start, end))
        start = end
    return part_ranges if start == len(parts) else None


def _closest_part(run: Run, whole: Entry, other_run: Run, parts: Sequence[Entry]) -> Entry:
    """Return the first or last part, or the sum or mean of all, whichever is closest to the whole."""
    # Without the numbers of all, and for equal ones, the first that has the shape of the whole.
    candidates = [part for part in (parts[0], parts[-1]) if part.shape == whole.shape]
    if any(entry.file is None for entry in (whole, *parts)):
        return candidates[0]
    numbers = _array(run, whole)
    if np.array_equal(numbers, _array(other_run, candidates[0]), equal_nan=True):
        return candidates[0]
    # Losses of micro-batches are averaged, gradients are added up: either may make the whole.
    if all(part.shape == whole.shape for part in parts) and numbers.dtype.kind in "fc":
        for divisor in (1, len(parts)):  # the sum, the mean
            read_numbers = partial(_scaled_sum, other_run, parts, divisor)
            candidates.append(other_run.add_derived(parts[0]._replace(), read_numbers))
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
        """Return lines on the op: its place in both runs, its error, element types, inputs and weight."""
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
        """Return a text that names the tolerance of the less precise type; "" unless that would help."""
        # A control or a tolerance of the user's own is no tolerance by type.
        if not self.diverges or self.expected is not None or self.by_type != tolerance(*self.dtypes):
            return ""
        less_precise_dtype = max(self.dtypes, key=lambda dtype: TOLERANCES.get(dtype, 0.0))
        rtol = f"{TOLERANCES.get(less_precise_dtype, 0.0):g}"
        return f"; pass rtol={rtol} (--rtol {rtol}) for the tolerance of {less_precise_dtype}"


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

        read_error: how far what its op reads is off between the runs that are compared; inf if unknown.
        """
        error = self.errors.get((entry.op, entry.execution))
        if error is None or not self.is_wider:
            return error
        # Inputs that are equal in both runs explain no difference, however far they are from the control.
        return explained_error(error, entry.dtype, read_error)


def explained_error(error: float, dtype: str, read_error: float) -> float:
    """Return how much of an error from the control rounding and the error of inputs explain.

    At least the rounding of the element type, which integers do not have.
    """
    if dtype in TOLERANCES:
        # Tensors agree up to MARGIN times what is expected, so tolerances are divided by it.
        explicable = max(_COARSE, TOLERANCES[dtype], MARGIN * read_error) / MARGIN
    else:
        explicable = math.inf if read_error else 0.0  # an index that two near values decide may be any
    # By luck the distance from a wider control may be 0, but rounding is always expected.
    return max(min(error, explicable), _rounding_error(dtype))


def _rounding_error(dtype: str) -> float:
    """Return the root mean square of the relative error of rounding to an element type; 0 for integers."""
    if not dtype.startswith(("float", "bfloat")):
        return 0.0
    from ml_dtypes import finfo

    # Rounding errs by up to half a unit in the last place, evenly: the root mean square is 1/sqrt(12) of the
    # unit, a little below a quarter of it for a mantissa between 1 and 2.
    mantissa_bits: int = finfo(Tensors.numpy_type(dtype)).nmant  # type: ignore[no-untyped-call]
    return float(2.0**-mantissa_bits / 4)
