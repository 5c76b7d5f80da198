"""Activations with their plans by op, the extents of scopes, and the locks of tools, in pure Python."""

import threading
from contextlib import suppress
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


class Lock:
    """A reentrant lock; a process that forks finds it free in the child."""

    _forks = 0

    def __init__(self) -> None:
        self._fork_count = Lock._forks
        self._lock = threading.RLock()

    def __enter__(self) -> "Lock":
        # A thread that held the lock as the process forked does not exist in the child, to release it.
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
        caches: bool = True,
        variant: int = 0,
    ) -> None:
        self.table = table
        self.state = state
        self.active = active
        # `caches` and `variant` are for native programs, of which there are none here.

    def become(self, activation: "Activation") -> None:
        """Put in force what another activation holds, in every context that has this one."""
        self.active, self.table, self.state = activation.active, activation.table, activation.state


ACTIVATION: ContextVar[Activation] = ContextVar("amanda.activation")
"""The activation of an execution context; `active()` is the way to ask for it."""


def forked() -> None:
    """Find every lock free that another thread held: this process is a forked child."""
    # A number instead of a list of locks: each lock compares it when it is next entered.
    Lock._forks += 1


_MOST_TRIES = 16


class Extent:
    """Context manager that calls `_begin` and `_end`, methods of a subclass, on entry and exit.

    An exception out of these is raised once `_unsettled` is false: until then `_end` is called again. Only
    the native interceptor has no instant between the statement and these methods at which a signal may come.
    """

    _unsettled = False

    def _begin(self) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        # An extent within itself is the outer one's to settle.
        entered = self._unsettled
        try:
            return self._begin()
        except BaseException:
            if not entered:
                self._settle()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        """End what an exception has left unsettled."""
        # A user may hold Ctrl+C down: each interrupts the next try, and the number ends the game.
        for _ in range(_MOST_TRIES):
            if not self._unsettled:
                return
            with suppress(BaseException):  # the exception that came first is raised
                self._end()
