"""Plans by op, locks, and what is in force."""

import threading
from contextvars import ContextVar
from typing import Any


class PlanTable:
    """Plans by op id."""

    def __init__(self) -> None:
        self._plans: dict[int, Any] = {}

    def get(self, op_id: int) -> Any:
        """The plan kept under an op id, or NotImplemented."""
        return self._plans.get(op_id, NotImplemented)

    def set(self, op_id: int, plan: Any) -> None:
        """Keep a plan; None means that nothing is inserted."""
        self._plans[op_id] = plan

    def discard(self, op_id: int) -> None:
        """Forget an op id."""
        self._plans.pop(op_id, None)

    def clear(self) -> None:
        """Forget every op id."""
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)


class Tally:
    """Executions by the shapes of their values."""

    def __init__(self, limit: int = 1024) -> None:
        self._calls: dict[Any, int] = {}

    def add(self, shapes: Any) -> None:
        """Count an execution; a tuple for each side, of a shape for each value."""
        self._calls[shapes] = self._calls.get(shapes, 0) + 1

    def items(self) -> list[tuple[Any, int]]:
        """Pairs of shapes and how many executions had them, in the order of the first."""
        return list(self._calls.items())

    def clear(self) -> None:
        """Forget the executions."""
        self._calls = {}

    def __len__(self) -> int:
        return len(self._calls)


class Lock:
    """A reentrant lock; a process that forks finds it free in the child."""

    _forks = 0

    def __init__(self) -> None:
        self._fork_count = Lock._forks
        self._lock = threading.RLock()

    def __enter__(self) -> "Lock":
        if self._fork_count != Lock._forks:
            self._fork_count = Lock._forks
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock = threading.RLock()
        self._lock.acquire()
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class Activation:
    """The tools and switches of an execution context."""

    def __init__(
        self,
        table: PlanTable | None,
        state: Any,
        active: bool = True,
        memos: bool = True,
        variant: int = 0,
    ) -> None:
        self.table = table
        self.state = state
        self.active = active

    def become(self, activation: "Activation") -> None:
        """Put in force what another activation holds, in every context that has this one."""
        self.active, self.table, self.state = activation.active, activation.table, activation.state


ACTIVATION: ContextVar[Activation] = ContextVar("amanda.activation")
"""The activation of an execution context; `active()` is the way to ask for it."""
