"""Tensors that one run has whole and the other in pieces: a sequence token by token, a batch in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from amanda.tools.diff._compare import Pair, array_distance
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry
from amanda.tools.libraries import numpy as np
from amanda.tools.stats import Statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray


def joined(run: Run, whole: Entry, other: Run, parts: Sequence[Entry]) -> Pair | None:
    """Return a tensor, and what executions of the other run give together; None where they do not fit.

    They fit if one axis alone has other extents, whose sum is that of the whole, or less: then they are the
    beginning or the end of it, as the logits of the last tokens are.  Parts of the shape of the whole are
    compared as the first or the last of them, their sum or their mean, whichever is closest: a cache that
    grows, gradients and losses of micro-batches.
    """
    if parts[0].shape == whole.shape or parts[-1].shape == whole.shape:
        return whole, _alike(run, whole, other, parts)
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
    has_numbers = all(one.file is not None for one in (whole, *parts))
    if extent > length or (extent < length and not has_numbers):
        return None
    statistics = reduce(Statistics.merged, (part.summary.statistics for part in parts))
    summary = replace(parts[0].summary, statistics=statistics, sample=())
    shape = (*whole.shape[:axis], extent, *whole.shape[axis + 1 :])
    rows = partial(_rows, other, parts, axis) if has_numbers else None
    assembled = other.derived(replace(parts[0], shape=shape, summary=summary), rows)
    if extent == length:
        return whole, assembled
    ends = [
        run.derived(replace(whole, shape=shape), partial(_cut, run, whole, axis, start, extent))
        for start in (length - extent, 0)
    ]
    numbers = _rows(other, parts, axis)
    return min(ends, key=lambda one: array_distance(_array(run, one), numbers).relative), assembled


def shares(wholes: Sequence[Entry], parts: Sequence[Entry]) -> list[range] | None:
    """Return the parts, in order, of which each whole tensor consists; None where they do not add up.

    A single whole tensor has all the parts.  Parts of the shape of the whole, such as gradients of
    micro-batches, are as many for each.
    """
    if len(wholes) == 1:
        return [range(len(parts))]
    if wholes[0].shape == parts[0].shape:
        count, rest = divmod(len(parts), len(wholes))
        return None if rest or count < 2 else [range(i, i + count) for i in range(0, len(parts), count)]
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


def _alike(run: Run, whole: Entry, other: Run, parts: Sequence[Entry]) -> Entry:
    """Return the first or last part, or the sum or mean of all, whichever is closest to the whole."""
    candidates = [part for part in (parts[0], parts[-1]) if part.shape == whole.shape]
    has_numbers = all(one.file is not None for one in (whole, *parts))
    if not has_numbers or np.array_equal(_array(run, whole), _array(other, candidates[0]), equal_nan=True):
        return candidates[0]
    if all(part.shape == whole.shape for part in parts) and _array(run, whole).dtype.kind in "fc":
        candidates += [
            other.derived(replace(parts[0]), partial(_reduced, other, parts, by)) for by in (1, len(parts))
        ]
    return min(candidates, key=lambda one: array_distance(_array(run, whole), _array(other, one)).relative)


def _reduced(run: Run, parts: Sequence[Entry], divisor: int) -> NDArray[Any]:
    total: NDArray[Any] = sum(_array(run, part) for part in parts) / divisor  # type: ignore[assignment]
    return total


def _array(run: Run, entry: Entry) -> NDArray[Any]:
    array = run.array(entry)
    assert array is not None
    return array


def _rows(run: Run, parts: Sequence[Entry], axis: int) -> NDArray[Any]:
    return np.concatenate([_array(run, part) for part in parts], axis)


def _cut(run: Run, whole: Entry, axis: int, start: int, extent: int) -> NDArray[Any]:
    return np.take(_array(run, whole), range(start, start + extent), axis)
