"""The backend interface: what a driver implements to make a framework instrumentable.

A driver attaches to its framework while at least one scope is open. Between `attach` and
`detach` it brings every op to the core: it builds an `OpContext` for an op met for the first
time, triggers the analysis routines on it, and runs the `Action`s that they recorded.
For files of models a distribution registers an `Artefact`, in the group `amanda.artefacts`.
Drivers of eager frameworks subclass `EagerDriver`, which leaves only tensor primitives to write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from amanda._artefacts import Artefact
from amanda._attributes import Attributes, replace_references
from amanda._backward import BackwardStep, backward_id, settled_step, settles
from amanda._calls import Call
from amanda._eager import EagerExecution
from amanda._facts import OpFacts
from amanda._graph import Execution, GraphAnalysis, Inserted, Rounds, Table
from amanda._guarded import GuardedCopies, History
from amanda._imports import when_imported
from amanda._inlining import Inlining
from amanda._interrupts import undo, uninterrupted
from amanda._layer import Layer
from amanda._mortality import add_slots, bind_to_subjects
from amanda._notes import explained
from amanda._opid import BOUNDARY, FRAMEWORK, SKIPPED, digest
from amanda._plan import BackwardPlan, Combined
from amanda._reads import Reads
from amanda._report import RAN_OP_BY_OP, Report
from amanda._routine import run_replacement, run_routine
from amanda._source import codes
from amanda._state import State, current_state, in_force
from amanda._tensors import Saved, TensorOps, spread
from amanda._trace import Trace
from amanda._views import Tie, Views
from amanda.action import Action
from amanda.namespace import Namespace

__all__ = [
    "BOUNDARY",
    "DRIVER_API",
    "FRAMEWORK",
    "RAN_OP_BY_OP",
    "SKIPPED",
    "Action",
    "Artefact",
    "Attributes",
    "BackwardPlan",
    "BackwardStep",
    "Call",
    "Combined",
    "Driver",
    "EagerDriver",
    "Execution",
    "GraphAnalysis",
    "GuardedCopies",
    "History",
    "Inlining",
    "Inserted",
    "Layer",
    "Namespace",
    "OpFacts",
    "Reads",
    "Rounds",
    "Saved",
    "State",
    "Table",
    "TensorOps",
    "Tie",
    "Trace",
    "Views",
    "add_slots",
    "backward_id",
    "bind_to_subjects",
    "codes",
    "current_state",
    "digest",
    "explained",
    "in_force",
    "replace_references",
    "run_replacement",
    "run_routine",
    "settled_step",
    "settles",
    "spread",
    "undo",
    "uninterrupted",
    "when_imported",
]

DRIVER_API = 1
"""Number of this interface; it grows when a driver written for the last one would break."""


class Driver(ABC):
    """One framework, in one or more modes.

    api: the `DRIVER_API` that the driver was written for.
    framework: import name of the framework.
    modes: what the driver serves, e.g. ("eager",).
    """

    api: ClassVar[int]
    framework: ClassVar[str]
    modes: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def namespace(self) -> Namespace:
        """Tags of the ops that this driver brings, e.g. `pytorch/2.13.0/eager`."""

    @abstractmethod
    def attach(self) -> None:
        """Start to intercept; called when the first scope of the process opens."""

    def closing(self, report: Report) -> None:  # noqa: B027 - few drivers have something to finish
        """Finish what tools have begun, as the last scope closes; called before `detach`."""

    @abstractmethod
    def detach(self) -> None:
        """Leave the framework as it was found; called after the last scope has closed."""


class EagerDriver(EagerExecution, Driver):
    """A driver that instruments calls as they happen; a subclass adds primitives of its tensors."""

    def closing(self, report: Report) -> None:
        """Make views again of the values that routines gave in their place."""
        for name, source in () if self.views is None else self.views.release():
            report.add(
                f"what is written after the scope into a result of {name}, or into what that was a view of",
                "a routine gave the result another value, so the two no longer share memory", source,
            )  # fmt: skip
