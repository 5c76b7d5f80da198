"""Norms of a step, and the alarms that they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from amanda.tools.sentinel._alarms import Alarm, Kind, Spikes
from amanda.tools.sentinel._result import Watched


class Norm(NamedTuple):
    """The norm of one tensor in a watched step.

    what: "output 0", "gradient 1", or of what the op is given: "parameter 0.weight".  value: on the device.
    """

    op: Watched
    what: str
    is_given: bool
    value: Any


def judged(
    step: int, norms: Sequence[Norm], values: Sequence[float], threshold: float, window: int
) -> tuple[list[Alarm], int]:
    """Return alarms for the first NaN and the first spike of a step, and how many norms came after them."""
    found: dict[str, Alarm] = {}
    followed = 0
    for norm, value in zip(norms, values, strict=True):
        op = norm.op
        kind: Kind
        distance = op.norms.setdefault(norm.what, Spikes(window)).distance(value)
        op.last = value if not norm.is_given else op.last
        if value != value:
            kind, detail = "nan", f"{norm.what} is the first to hold NaN"
        elif distance > threshold:
            kind = "spike"
            usual = op.norms[norm.what].median
            detail = f"the norm of {norm.what} is {value:.4g}, {distance:.0f} deviations above {usual:.4g}"
        else:
            continue
        if norm.is_given:
            detail += ", which the op was given"
        if kind in found or "nan" in found:
            followed += 1
        else:
            found[kind] = Alarm(kind, step, op.phase, op.type, op.module, op.source, detail)
    return list(found.values()), followed
