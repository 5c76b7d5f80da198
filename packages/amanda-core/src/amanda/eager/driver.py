"""A driver of a framework that executes ops as they are called."""

from __future__ import annotations

from amanda.eager.execution import EagerExecution
from amanda.scope.driver import Driver
from amanda.scope.report import Report


class EagerDriver(EagerExecution, Driver):
    """A driver that instruments calls as they happen; a subclass adds primitives of its tensors."""

    def closing(self, report: Report) -> None:
        """Make views again of the values that routines gave in their place."""
        for name, source in () if self.views is None else self.views.release():
            report.add(
                f"what is written after the scope into a result of {name}, or into what that was a view of",
                "a routine gave the result another value, so the two no longer share memory", source,
            )  # fmt: skip
