"""Indices and slices of traced arrays, recorded as nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import TracedArray

_LAST = np.iinfo(np.int64).max


def record_getitem(array: TracedArray, key: Any) -> TracedArray:
    """Record `array[key]` for integers, slices, None, an ellipsis, and one array of integers.

    Raises NotTraceable for other keys.
    """
    keys = _expand_ellipsis(key if isinstance(key, tuple) else (key,), array.ndim)
    sliced: list[tuple[int, slice]] = []
    dropped_axes, gathered, axis = [], [], 0
    for entry in keys:
        if entry is None:
            continue
        if isinstance(entry, slice):
            sliced.append((axis, entry))
        elif isinstance(entry, (int, np.integer)):
            # An integer is a slice of extent 1, whose axis is dropped at the end; -1 has no end.
            sliced.append((axis, slice(int(entry), int(entry) + 1 or None)))
            dropped_axes.append(axis)
        else:
            gathered.append((axis, _index_array(array, entry)))
        axis += 1
    # All axes stay in place until here, so the order of keys does not matter.
    result = _record_slices(array, sliced)
    for axis, indices in gathered:
        result = array.recorder.add("Gather", result, indices, axis=axis)
    result = _record_squeeze(result, dropped_axes)
    return _record_new_axes(result, keys)


def _expand_ellipsis(keys: tuple[Any, ...], ndim: int) -> list[Any]:
    """Return keys with full slices instead of an ellipsis, and for axes without a key."""
    named = sum(entry is not None and entry is not Ellipsis for entry in keys)
    if named > ndim:
        raise NotTraceable(f"{named} indices for a value of {ndim} axes")
    full_slices = [slice(None)] * (ndim - named)
    ellipses = [i for i, entry in enumerate(keys) if entry is Ellipsis]
    if not ellipses:
        return [*keys, *full_slices]
    return [*keys[: ellipses[0]], *full_slices, *keys[ellipses[0] + 1 :]]


def _index_array(array: TracedArray, key: Any) -> TracedArray:
    indices = key if isinstance(key, TracedArray) else array.recorder.constant(np.asarray(key))
    if indices.dtype.kind not in "iu" or indices.ndim > 1:
        raise NotTraceable(f"an index of {indices.dtype} and {indices.ndim} axes")
    return indices.astype(np.int64)


def _record_slices(array: TracedArray, slices: list[tuple[int, slice]]) -> TracedArray:
    """Record slices along axes; full slices need no node."""
    partial = [(axis, entry) for axis, entry in slices if entry != slice(None)]
    if not partial:
        return array
    starts, ends, steps = [], [], []
    for _, entry in partial:
        step = 1 if entry.step is None else int(entry.step)
        starts.append((0 if step > 0 else _LAST) if entry.start is None else int(entry.start))
        ends.append((_LAST if step > 0 else -_LAST) if entry.stop is None else int(entry.stop))
        steps.append(step)
    constants = [
        array.recorder.constant(np.array(numbers, np.int64))
        for numbers in (starts, ends, [axis for axis, _ in partial], steps)
    ]
    return array.recorder.add("Slice", array, *constants)


def _record_squeeze(array: TracedArray, axes: list[int]) -> TracedArray:
    if not axes:
        return array
    return array.recorder.add("Squeeze", array, array.recorder.constant(np.array(axes, np.int64)))


def _record_new_axes(array: TracedArray, keys: list[Any]) -> TracedArray:
    """Record new axes at the positions of None among the keys that leave an axis."""
    remaining = [entry for entry in keys if not isinstance(entry, (int, np.integer))]
    new_axes = [i for i, entry in enumerate(remaining) if entry is None]
    if not new_axes:
        return array
    return array.recorder.add("Unsqueeze", array, array.recorder.constant(np.array(new_axes, np.int64)))
