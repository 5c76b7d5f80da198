"""A driver of a framework that executes ops as they are called."""

from __future__ import annotations

from typing import Any

from amanda import interceptor
from amanda.eager.execution import EagerExecution
from amanda.interceptor.opid import digest
from amanda.plan.lifetime import parameter_slots
from amanda.scope.driver import Driver
from amanda.scope.report import Report


class EagerDriver(EagerExecution, Driver):
    """A driver that instruments calls as they happen; a subclass adds primitives of its tensors."""

    def introduce(self) -> None:
        """Mark the framework's code, and register the types of values that distinguish ops."""
        super().introduce()
        for kind in self.identity_types:
            interceptor.add_identity_type(kind)
        if self.slot_of is not None:
            parameter_slots.add_finder(self.slot_of)

    def site(self, target: Any, op: Any, key: str, flags: int = 0) -> interceptor.Site:
        """Return the site of an operator, whose calls come to `handle`.

        target: the callable that the program calls.  op: the op that tools see.  key: name of the operator,
        unique in the framework, which enters op ids.  flags: flags of `amanda.interceptor`.
        """
        return interceptor.Site(
            target, op, key, digest(self._short_name, key), self.handle, flags, self.reader
        )

    def closing(self, report: Report) -> None:
        """Turn values from routines back into views of the tensors that they replaced."""
        for name, source in () if self.views is None else self.views.release():
            report.add(
                f"what is written after the scope into a result of {name}, or into what that was a view of",
                "a routine gave the result another value, so the two no longer share memory", source,
            )  # fmt: skip
