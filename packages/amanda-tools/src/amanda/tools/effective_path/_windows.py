"""Convolutions and pooling: which inputs are under the window of an output."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from amanda.tools.effective_path._terms import Indices, Step, Terms, strides_of
from amanda.tools.kit import Window

Tables = Sequence[Indices]
"""For each spatial axis (outputs, window) coordinates of the inputs; -1 outside of them."""


def sliding(size: int, count: int, window: Window) -> Indices:
    """The table of an axis of `size`, over which a window slides to `count` places."""
    ahead, _ = window.pads(size)
    starts = np.arange(count)[:, None] * window.stride - ahead
    found = starts + np.arange(window.kernel)[None] * window.dilation
    return np.where((found >= 0) & (found < size), found, -1).astype(np.int64)


def adaptive(size: int, count: int) -> Indices:
    """The table of an axis of `size` that is divided into `count` windows, which may overlap."""
    starts = np.arange(count) * size // count
    ends = -(-(np.arange(1, count + 1) * size) // count)
    found = starts[:, None] + np.arange((ends - starts).max())[None]
    return np.where(found < ends[:, None], found, -1).astype(np.int64)


def convolution(step: Step, rows: Indices, output: int) -> Terms:
    """Every output sums weight times input over its group's channels and its window."""
    assert step.weight is not None
    data, weight = step.tensor((0, 0)), step.tensor((step.weight, 0))
    read, inside, valid = _windows(step, rows, output)
    channels, used = _weights(step, rows, output)
    count, per_group = channels.shape
    stride = strides_of(data.shape)[(step.layout or "").index("C")]
    read = ((channels * stride)[:, :, None] + read[:, None]).reshape(count, -1)
    inside = np.repeat(inside[:, None], per_group, axis=1).reshape(count, -1)
    values = data.reshape(-1)[np.where(inside, read, 0)].astype(np.float64) * weight.reshape(-1)[used]
    sources = {(0, 0): np.where(inside, read, -1), (step.weight, 0): np.where(inside, used, -1)}
    synapses = valid * _count_at_a_place(step, output) * per_group
    return Terms(sources, np.where(inside, values, 0), synapses, weighted=True)


def _weights(step: Step, rows: Indices, output: int) -> tuple[Indices, Indices]:
    """The input channels of each output, and (outputs, channels times window) its weights."""
    assert step.weight is not None
    axes, layout = step.layout or "", step.weight_layout or ""
    weight = step.tensor((step.weight, 0))
    extents = dict(zip(layout, weight.shape, strict=True))
    strides = dict(zip(layout, strides_of(weight.shape), strict=True))
    out = np.unravel_index(rows, step.outputs[output].shape)[axes.index("C")]
    taps = np.zeros(1, np.int64)
    for axis in filter(_is_spatial, axes):
        taps = (taps[:, None] + np.arange(extents[axis]) * strides[axis]).reshape(-1)
    if "M" in layout:  # a depthwise one, (..., I, M): each channel has M outputs of its own
        return (out // extents["M"])[:, None], out[:, None] * strides["M"] + taps
    inner = np.arange(extents["I"])
    groups = step.tensor((0, 0)).shape[axes.index("C")] // extents["I"]
    first = out // (extents["O"] // groups) * extents["I"]
    used = ((inner * strides["I"])[:, None] + taps).reshape(1, -1)
    return first[:, None] + inner, (out * strides["O"])[:, None] + used


def max_pooling(step: Step, rows: Indices, output: int) -> Terms:
    """The largest under the window, and of equal ones the first, is all that matters."""
    read, values, synapses = _pooled(step, rows, output, -np.inf)
    largest = np.zeros_like(values)
    np.put_along_axis(largest, values.argmax(1)[:, None], 1, 1)
    return Terms({step.data: read}, largest, synapses)


def average_pooling(step: Step, rows: Indices, output: int) -> Terms:
    """Every output sums what is under its window."""
    read, values, synapses = _pooled(step, rows, output, 0)
    return Terms({step.data: read}, values, synapses)


def _count_at_a_place(step: Step, output: int) -> int:
    """Outputs at one place of the window: samples times channels."""
    shape = step.outputs[output].shape
    return prod(shape[i] for i, axis in enumerate(step.layout or "") if not _is_spatial(axis))


def _pooled(step: Step, rows: Indices, output: int, outside: float) -> tuple[Indices, Indices, int]:
    """Return flat indices and values under each window, and their number in all windows."""
    data, out = step.tensor(step.data), step.outputs[output]
    read, inside, valid = _windows(step, rows, output)
    place = np.unravel_index(rows, out.shape)
    channel = (step.layout or "").index("C")
    read = read + place[channel][:, None] * strides_of(data.shape)[channel]
    values = data.reshape(-1)[np.where(inside, read, 0)].astype(np.float64)
    synapses = valid * _count_at_a_place(step, output)
    return np.where(inside, read, -1), np.where(inside, values, outside), synapses


def _windows(step: Step, rows: Indices, output: int) -> tuple[Indices, Indices, int]:
    """(outputs, window): indices for channel 0, which are inside; and how many are, at all places."""
    data, tables = step.tensor(step.data), iter(step.arguments["tables"])
    place = np.unravel_index(rows, step.outputs[output].shape)
    read, inside, valid = np.zeros((len(rows), 1), np.int64), np.ones((len(rows), 1), bool), 1
    for axis, stride, at in zip(step.layout or "", strides_of(data.shape), place, strict=True):
        if axis == "N":
            read = read + at[:, None] * stride
        elif _is_spatial(axis):
            table = next(tables)
            under = table[at]
            read = (read[:, :, None] + under[:, None] * stride).reshape(len(rows), -1)
            inside = (inside[:, :, None] & (under >= 0)[:, None]).reshape(len(rows), -1)
            valid *= int((table >= 0).sum())
    return read, inside, valid


def _is_spatial(axis: str) -> bool:
    return axis not in "NC"
