"""Compares the ops of a smaller model with those that the labels lead to expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.tools._libraries import numpy as np
from amanda.tools.prune.channels._tracing import Step, Tracing


def first_difference(expected: Tracing, alive: Any, steps: Sequence[Step]) -> Step | None:
    """Return the first op whose results have other extents than the labels say, or that has not run."""
    for i, step in enumerate(expected.steps):
        if i >= len(steps):
            return step
        other = steps[i]
        shapes = [expected.extents(part, alive) for part in step.made]
        if (step.type, step.module) != (other.type, other.module) or shapes != [s for _, s in other.made]:
            return step
        if step.moved is not None and not _move_alike(step, other, expected, alive):
            return step
    return None


def _move_alike(step: Step, other: Step, expected: Tracing, alive: Any) -> bool:
    """Return True if an op moves the channels that are kept as it moved them among all, of the same step."""
    roots = expected.notes.labels.roots
    for family in step.read[0][0]:
        if not alive[family].all() and step.moved is not None and other.moved is not None:
            pairs = zip(step.moved(family), other.moved(_shortened(family, alive)), strict=True)
            if not all(np.array_equal(roots(_shortened(one, alive)), roots(two)) for one, two in pairs):
                return False
    return True


def _shortened(family: Any, alive: Any) -> Any:
    """Return the labels that are kept, in an array without the places of the others."""
    kept = alive[family]
    others = [tuple(i for i in range(kept.ndim) if i != axis) for axis in range(kept.ndim)]
    return family[np.ix_(*(np.any(kept, axis=one) for one in others))] if kept.ndim else family
