"""The driver interface: what a driver implements to make a framework instrumentable.

A driver attaches to its framework while at least one scope is open, and brings every op to the core, which
calls the tools. A framework that executes calls as they come has a subclass of `EagerDriver`; one that builds
graphs first, of `GraphDriver`; a file that holds a model, of `Artefact`, in the group `amanda.artefacts`.
"""

from __future__ import annotations

from amanda.action import Action
from amanda.eager.backward import BackwardPass, BackwardStep
from amanda.eager.call import Call, SignatureCall
from amanda.eager.driver import EagerDriver
from amanda.eager.trace import Trace
from amanda.export.artefacts import Artefact
from amanda.export.inlining import Inlining
from amanda.graph.driver import CannotInstrument, GraphDriver
from amanda.graph.execution import Execution, Insertion
from amanda.graph.reads import Reads
from amanda.graph.rewriter import NotTraceable, Rewriter, Value
from amanda.graph.rewriting import GraphAnalysis, Rewriting, Side
from amanda.interceptor.attributes import Patches, path_of_call, place_by_path, type_as_path
from amanda.interceptor.imports import lazy_getattr, missing_names, when_imported
from amanda.interceptor.opid import digest
from amanda.namespace import Namespace
from amanda.plan.facts import Operation, OpFacts
from amanda.plan.lifetime import ParameterSlot
from amanda.plan.observers import Executions, Observed
from amanda.plan.routine import annotate_failure, match_results, selected_values
from amanda.plan.tensors import (
    BoxedTensors,
    ImmutableTensorOps,
    TensorMap,
    TensorOps,
    complex_error,
    dtype_error,
    shape_error,
)
from amanda.plan.trees import TreeSlot, TreeSlots, named_leaves, path_among, with_slots, without_slots
from amanda.scope.driver import DRIVER_API, Driver, SelfTestProgram, check_private_names, code_within
from amanda.scope.replay import Recomputation, bind_to_current_place, recomputable
from amanda.scope.report import hide_ops, report_unseen
from amanda.scope.state import State

__all__ = [
    "DRIVER_API",
    "Action",
    "Artefact",
    "BackwardPass",
    "BackwardStep",
    "BoxedTensors",
    "Call",
    "CannotInstrument",
    "Driver",
    "EagerDriver",
    "Execution",
    "Executions",
    "GraphAnalysis",
    "GraphDriver",
    "ImmutableTensorOps",
    "Inlining",
    "Insertion",
    "Namespace",
    "NotTraceable",
    "Observed",
    "OpFacts",
    "Operation",
    "ParameterSlot",
    "Patches",
    "Reads",
    "Recomputation",
    "Rewriter",
    "Rewriting",
    "SelfTestProgram",
    "Side",
    "SignatureCall",
    "State",
    "TensorMap",
    "TensorOps",
    "Trace",
    "TreeSlot",
    "TreeSlots",
    "Value",
    "annotate_failure",
    "bind_to_current_place",
    "check_private_names",
    "code_within",
    "complex_error",
    "digest",
    "dtype_error",
    "hide_ops",
    "lazy_getattr",
    "match_results",
    "missing_names",
    "named_leaves",
    "path_among",
    "path_of_call",
    "place_by_path",
    "recomputable",
    "report_unseen",
    "selected_values",
    "shape_error",
    "type_as_path",
    "when_imported",
    "with_slots",
    "without_slots",
]
