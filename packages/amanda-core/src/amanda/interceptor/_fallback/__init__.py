"""The interceptor in pure Python: the same face, by replacing attributes.

Its limits: a callable that was imported by name before a scope opened is not intercepted, and
a call costs microseconds where the native interceptor takes nanoseconds.
"""

from amanda.interceptor._fallback._extents import Extent
from amanda.interceptor._fallback._graphs import Graphs, Mark
from amanda.interceptor._fallback._native_alone import Hook, Memo, Moments, Program, Reader
from amanda.interceptor._fallback._places import (
    OCCURRENCE_CAP,
    Snapshot,
    add_identity_type,
    configure,
    forget_code,
    forked,
    ordinal,
    reset_root,
    set_leaf_type,
    snapshot,
    subjects,
)
from amanda.interceptor._fallback._sites import (
    Detour,
    Enclosure,
    Site,
    Suspension,
    active,
    failure,
    forget_failures,
    keep_failure,
    running,
    statistics,
    watch_outside,
)
from amanda.interceptor._fallback._tables import ACTIVATION, Activation, Lock, PlanTable, Tally

__all__ = [
    "ACTIVATION",
    "OCCURRENCE_CAP",
    "Activation",
    "Detour",
    "Enclosure",
    "Extent",
    "Graphs",
    "Hook",
    "Lock",
    "Mark",
    "Memo",
    "Moments",
    "PlanTable",
    "Program",
    "Reader",
    "Site",
    "Snapshot",
    "Suspension",
    "Tally",
    "active",
    "add_identity_type",
    "configure",
    "failure",
    "forget_code",
    "forget_failures",
    "forked",
    "keep_failure",
    "ordinal",
    "reset_root",
    "running",
    "set_leaf_type",
    "snapshot",
    "statistics",
    "subjects",
    "watch_outside",
]
