"""Instrumentation points, the six actions, and the marks that a routine may carry."""

from amanda.plan.action import (
    Action,
    ActionType,
    InstrumentationPoint,
    Routine,
    all_samples,
    differentiable,
    has_parameter,
    has_run,
    innermost,
    marks,
    observer,
    opening,
    routine_name,
    traceable,
    with_marks,
)
from amanda.plan.observers import Executions, Observed, ShapeTally, Tally, gathered

__all__ = [
    "Action",
    "ActionType",
    "Executions",
    "InstrumentationPoint",
    "Observed",
    "Routine",
    "ShapeTally",
    "Tally",
    "all_samples",
    "differentiable",
    "gathered",
    "has_parameter",
    "has_run",
    "innermost",
    "marks",
    "observer",
    "opening",
    "routine_name",
    "traceable",
    "with_marks",
]
