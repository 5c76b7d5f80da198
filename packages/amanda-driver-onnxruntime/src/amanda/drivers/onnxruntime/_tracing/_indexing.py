"""Indices and slices as nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda.backend import NotTraceable

from ._array import TracedArray

_LAST = np.iinfo(np.int64).max


def indexed(array: TracedArray, key: Any) -> TracedArray:
    """Return what `array[key]` gives, for integers, slices, None, an ellipsis, and one array of integers.

    Raises NotTraceable for other keys.
    """
    keys = _spelt_out(key if isinstance(key, tuple) else (key,), array.ndim)
    sliced: list[tuple[int, slice]] = []
    dropped, gathered, axis = [], [], 0
    for one in keys:
        if one is None:
            continue
        if isinstance(one, slice):
            sliced.append((axis, one))
        elif isinstance(one, (int, np.integer)):
            sliced.append((axis, slice(int(one), int(one) + 1 or None)))
            dropped.append(axis)
        else:
            gathered.append((axis, _integers(array, one)))
        axis += 1
    made = _sliced(array, sliced)
    for axis, indices in gathered:
        made = array.recorder.add("Gather", made, indices, axis=axis)
    made = _without(made, dropped)
    return _with_new(made, keys)


def _spelt_out(keys: tuple[Any, ...], ndim: int) -> list[Any]:
    """Keys with slices for an ellipsis and for axes that are not named."""
    named = sum(one is not None and one is not Ellipsis for one in keys)
    if named > ndim:
        raise NotTraceable(f"{named} indices for a value of {ndim} axes")
    whole = [slice(None)] * (ndim - named)
    places = [i for i, one in enumerate(keys) if one is Ellipsis]
    if not places:
        return [*keys, *whole]
    return [*keys[: places[0]], *whole, *keys[places[0] + 1 :]]


def _integers(array: TracedArray, key: Any) -> TracedArray:
    indices = key if isinstance(key, TracedArray) else array.recorder.constant(np.asarray(key))
    if indices.dtype.kind not in "iu" or indices.ndim > 1:
        raise NotTraceable(f"an index of {indices.dtype} and {indices.ndim} axes")
    return indices.astype(np.int64)


def _sliced(array: TracedArray, slices: list[tuple[int, slice]]) -> TracedArray:
    kept = [(axis, one) for axis, one in slices if one != slice(None)]
    if not kept:
        return array
    starts, ends, steps = [], [], []
    for _, one in kept:
        step = 1 if one.step is None else int(one.step)
        starts.append((0 if step > 0 else _LAST) if one.start is None else int(one.start))
        ends.append((_LAST if step > 0 else -_LAST) if one.stop is None else int(one.stop))
        steps.append(step)
    constants = [
        array.recorder.constant(np.array(numbers, np.int64))
        for numbers in (starts, ends, [axis for axis, _ in kept], steps)
    ]
    return array.recorder.add("Slice", array, *constants)


def _without(array: TracedArray, axes: list[int]) -> TracedArray:
    if not axes:
        return array
    return array.recorder.add("Squeeze", array, array.recorder.constant(np.array(axes, np.int64)))


def _with_new(array: TracedArray, keys: list[Any]) -> TracedArray:
    left = [one for one in keys if not isinstance(one, (int, np.integer))]
    places = [i for i, one in enumerate(left) if one is None]
    if not places:
        return array
    return array.recorder.add("Unsqueeze", array, array.recorder.constant(np.array(places, np.int64)))
