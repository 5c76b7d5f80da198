"""Apply a tool to some ops: by type, module or phase, at some steps.

with amanda.apply(select(FlopsTool(), module="layer4.*", type=["conv2d", "linear"])):
    model(x)
"""

from amanda.tools.select._select import (
    Globs,
    ModulePaths,
    Paths,
    Patterns,
    Phase,
    Selection,
    SelectionError,
    as_remarks,
    leave_construction,
    listed,
    select,
    unmatched,
)

__all__ = [
    "Globs",
    "ModulePaths",
    "Paths",
    "Patterns",
    "Phase",
    "Selection",
    "SelectionError",
    "as_remarks",
    "leave_construction",
    "listed",
    "select",
    "unmatched",
]
