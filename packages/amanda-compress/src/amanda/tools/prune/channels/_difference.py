"""Compares the ops of a smaller model with those that the labels lead to expect."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._labels import Part
from amanda.tools.prune.channels._tracing import Step, Tracing


def first_difference(expected: Tracing, alive: Any, steps: Sequence[Step]) -> Step | None:
    """Return the first op whose results have other extents than the labels say, or that has not run."""
    for i, step in enumerate(expected.steps):
        if i >= len(steps):
            return step
        other = steps[i]
        if (step.type, step.module) != (other.type, other.module) or len(step.made) != len(other.made):
            return step
        for part, (_, shape) in zip(step.made, other.made, strict=True):
            if prod(shape) + prod(part[1]) and expected.extents(part, alive) != shape:  # or has no elements
                return step
        if step.moved is not None and not _move_alike(step, other, expected, alive):
            return step
    return None


def _move_alike(step: Step, other: Step, expected: Tracing, alive: Any) -> bool:
    """Return True if an op moves the channels that are kept as it moved them among all, of the same step."""
    roots = expected.notes.labels.roots
    for family in step.read[0][0]:
        if not alive[family].all() and step.moved is not None and other.moved is not None:
            read = _shortened(family, ((family,), family.shape), expected, alive)
            triples = zip(step.moved(family), step.made, other.moved(read), strict=True)
            for one, part, two in triples:
                short = roots(_shortened(one, part, expected, alive))
                if short.size and not np.array_equal(short, roots(two)):
                    return False
    return True


def _shortened(array: Any, part: Part, expected: Tracing, alive: Any) -> Any:
    """Return an array without the places at which a tensor of its shape has channels that are not kept."""
    kept = [expected.places(part[0], axis, alive) for axis in range(array.ndim)]
    whole = (np.arange(extent) for extent in array.shape)
    return array[
        np.ix_(*(own if one is None else np.flatnonzero(one) for own, one in zip(whole, kept, strict=True)))
    ]
