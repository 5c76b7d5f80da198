"""Exceptions of routines, at every point of an op."""

from __future__ import annotations

import itertools
from time import monotonic
from typing import Any

from frameworks import Double, Framework, Outcome, Step, X, differs
from raising import InstalledPatches

import amanda
from amanda.tools.mapping import StandardMapping


class Planned(Exception):
    """An exception that no framework knows."""


class Failing(amanda.Tool):
    """Raises at ReLU: in the analysis, or in a routine at a point."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["type"] == "relu" and "backward" not in self._point:
            self._act(context)

    def _analyse_backward(self, context: amanda.OpContext) -> None:
        if context["type"] == "relu" and "backward" in self._point:
            self._act(context)

    def _act(self, context: amanda.OpContext) -> None:
        if "analysis" in self._point:
            raise Planned
        getattr(context, self._point)(fail)


def fail(*_: Any) -> None:
    """Raise Planned."""
    raise Planned


FORWARD = ("analysis", "insert_before_op", "insert_after_op", "replace_op")
BACKWARD = (
    "backward analysis",
    "insert_before_backward_op",
    "insert_after_backward_op",
    "replace_backward_op",
)


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Raise at each point in turn; compare what is there afterwards, and outputs with and without a tool."""
    patches, tool = InstalledPatches(lambda: step(X[0])), Double()
    points = [*FORWARD, *(BACKWARD if framework.gradients else ())]
    count, wrong, left, others, end = 0, 0, set(), set(), monotonic() + seconds
    for point in itertools.cycle(points):
        if count >= len(points) and monotonic() > end:
            break
        count += 1
        try:
            with framework.scope(Failing(point)):
                step(X[0])
            others.add(f"{point}: no exception")
        except Planned:
            pass
        except Exception as error:
            others.add(f"{point}: {type(error).__name__}")
        left.update(patches.left())
        wrong += differs(step(X[0]), X[0])
        with framework.scope(tool):
            wrong += differs(step(X[1]), X[1], 2)
    note = "; ".join([f"{len(points)} points", *sorted(others)])
    return Outcome(count, "exceptions", wrong + len(others), sorted(left), note)
