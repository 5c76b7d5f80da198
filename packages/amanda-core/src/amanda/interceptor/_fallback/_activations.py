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
        """Return the plan under an op id; NotImplemented where there is none."""
        return self._plans.get(op_id, NotImplemented)

    def set(self, op_id: int, plan: Any) -> None:
        """Store a plan under an op id.

        Args:
            op_id: Id of the op.
            plan: Plan, or the `CallCache` with the op's plans; None where nothing is inserted.
        """
        self._plans[op_id] = plan

    def discard(self, op_id: int) -> None:
        """Remove the plan under an op id."""
        self._plans.pop(op_id, None)

    def clear(self) -> None:
        """Remove all plans."""
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
    """The tools and switches of an execution context.

    Args:
        table: Plans by op id; None where every call comes to the handler without a plan.
        state: Object that handlers receive.
        active: Whether calls are intercepted.
        caches: Whether native programs of call caches may run.
        variant: Number for which call caches have programs of their own.
    """

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
        """Copy another activation into this one, so that all contexts with this one change."""
        self.active, self.table, self.state = activation.active, activation.table, activation.state


ACTIVATION: ContextVar[Activation] = ContextVar("amanda.activation")
"""The activation of an execution context; `active()` returns the one in force."""


def forked() -> None:
    """Free every lock that another thread held; call this in a forked child."""
    # A number instead of a list of locks: each lock compares it when it is next entered.
    Lock._forks += 1


_MAX_TRIES = 16


class Extent:
    """Context manager of a scope or a switch, whose methods `_begin` and `_end` run on entry and exit.

    The subclass sets `_unsettled` while `_end` has work to do.  If one of the methods raises, `_end` is
    called until `_unsettled` is false, and then the exception is raised.  Only the native interceptor has no
    instant between the statement and these methods at which a signal may come.
    """

    _unsettled = False

    def _begin(self) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        # An extent that is entered again within itself is left to the outer `with` statement.
        was_entered = self._unsettled
        try:
            return self._begin()
        except BaseException:
            if not was_entered:
                self._finish_ending()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:
            self._finish_ending()
            raise

    def _finish_ending(self) -> None:
        """Call `_end` again until `_unsettled` is false, at most `_MAX_TRIES` times; drop its exceptions."""
        # A user may hold Ctrl+C down, which interrupts each try: without a limit this could last for ever.
        for _ in range(_MAX_TRIES):
            if not self._unsettled:
                return
            with suppress(BaseException):  # the exception that came first is raised
                self._end()
