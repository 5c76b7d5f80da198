"""The number of an execution of an op."""

from __future__ import annotations

from typing import Any, Protocol


class Counted(Protocol):
    """A record of an op that counts its executions."""

    executions: int


def execution_number(record: Counted, run: dict[Any, Any] | None, recomputed: bool) -> int:
    """Return the number of this execution, from 0 on, and count it in `record.executions`.

    A recomputation has the number of its first execution, and is not counted.
    record: hashable.  run, recomputed: of the routine; None and False where nothing runs again.
    """
    if recomputed and run is not None and record in run:
        number: int = run[record]
        return number
    number, record.executions = record.executions, record.executions + 1
    if run is not None:
        run[record] = number
    return number
