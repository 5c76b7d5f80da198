"""Settling of a mixture: the heaviest candidates whose costs are within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from amanda.tools.search._errors import SearchError

Measure = Callable[[Mapping[str, str]], float]


def settled(
    shares: Mapping[str, Mapping[str, float]],
    architecture: Mapping[str, str],
    limits: Mapping[Any, float],
    measures: Mapping[str, Measure],
) -> dict[str, str]:
    """Return an architecture of the heaviest candidates, with cheaper ones until it is within the limits.

    shares: probabilities of candidates.  limits: by the names of measures; no change breaks an earlier one.
    Each change loses least of the product of probabilities for each unit that it saves.  Raises SearchError
    where no change is left.
    """
    found = {**architecture, **{name: max(one, key=one.__getitem__) for name, one in shares.items()}}
    kept: list[tuple[Measure, float]] = []
    for cost, most in limits.items():
        measure = measures[cost]
        while (present := measure(found)) > most:
            steps = []
            for name, one in shares.items():
                for label, share in one.items():
                    changed = found | {name: label}
                    saved = present - measure(changed)
                    if saved > 0 and all(other(changed) <= bound for other, bound in kept):
                        steps.append((log(one[found[name]] / share) / saved, name, label))
            if not steps:
                raise SearchError(f"SearchTool.settle: {cost} are {present:g} at least, above {most:g}")
            found |= [min(steps)[1:]]
        kept.append((measure, most))
    return found
