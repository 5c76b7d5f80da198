"""The backend interface: what a driver implements to make a framework instrumentable.

A driver attaches to its framework while at least one scope is open. Between `attach` and
`detach` it brings every op to the core: it builds an `OpContext` for an op met for the first
time, triggers the analysis routines on it, and runs the `Action`s that they recorded.
For files of models a distribution registers an `Artefact`, in the group `amanda.artefacts`.
Drivers of eager frameworks subclass `EagerDriver`, which leaves only tensor primitives to write.
"""

from __future__ import annotations

from amanda.action import Action
from amanda.eager.backward import BackwardStep, backward_id, settled_step, settles
from amanda.eager.call import Call, Saved
from amanda.eager.driver import EagerDriver
from amanda.eager.trace import Trace
from amanda.eager.views import Tie, Views
from amanda.export.artefacts import Artefact
from amanda.export.inlining import Inlining
from amanda.graph.analysis import GraphAnalysis
from amanda.graph.driver import Copy, GraphDriver, Uninstrumented
from amanda.graph.execution import Execution
from amanda.graph.guards import History
from amanda.graph.insertion import Insertion, Rounds, Table
from amanda.graph.reads import Reads
from amanda.graph.rewriter import NotTraceable, Rewriter, Value
from amanda.graph.rewriting import Rewriting
from amanda.graph.side import Side
from amanda.interceptor.attributes import Attributes, replace_references
from amanda.interceptor.imports import when_imported
from amanda.interceptor.interrupts import undo, uninterrupted
from amanda.interceptor.opid import BOUNDARY, FRAMEWORK, SKIPPED, digest
from amanda.namespace import Namespace
from amanda.plan.facts import OpFacts
from amanda.plan.lifetime import add_slots
from amanda.plan.notes import explained
from amanda.plan.plan import Actions, Plan
from amanda.plan.routine import run_replacement, run_routine
from amanda.plan.source import codes
from amanda.plan.tensors import TensorOps, spread
from amanda.scope.driver import DRIVER_API, Driver
from amanda.scope.report import RAN_OP_BY_OP
from amanda.scope.state import State, current_state, in_force

__all__ = [
    "BOUNDARY",
    "DRIVER_API",
    "FRAMEWORK",
    "RAN_OP_BY_OP",
    "SKIPPED",
    "Action",
    "Actions",
    "Artefact",
    "Attributes",
    "BackwardStep",
    "Call",
    "Copy",
    "Driver",
    "EagerDriver",
    "Execution",
    "GraphAnalysis",
    "GraphDriver",
    "History",
    "Inlining",
    "Insertion",
    "Namespace",
    "NotTraceable",
    "OpFacts",
    "Plan",
    "Reads",
    "Rewriter",
    "Rewriting",
    "Rounds",
    "Saved",
    "Side",
    "State",
    "Table",
    "TensorOps",
    "Tie",
    "Trace",
    "Uninstrumented",
    "Value",
    "Views",
    "add_slots",
    "backward_id",
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
