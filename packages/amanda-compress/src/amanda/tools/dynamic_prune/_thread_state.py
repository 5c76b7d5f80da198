"""State of the execution under way, where several threads execute a model at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import amanda
from amanda.errors import ToolError

T = TypeVar("T")


class PerThreadState(Generic[T]):
    """State of the ops of a tool that each thread which executes the program has for itself.

    Routines that a graph calls on threads of its framework have the state of the thread that runs the graph.
    The state ends with its thread or its key.  make: a new state.
    """

    def __init__(self, tool: amanda.Tool, make: Callable[[], T]) -> None:
        self._tool, self._make = ref(tool), make
        self._states: WeakKeyDictionary[Any, WeakKeyDictionary[Any, T]] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def __getstate__(self) -> tuple[amanda.Tool | None, Callable[[], T]]:
        """Return what a copy has of it, without the states, which belong to threads of this process."""
        return self._tool(), self._make

    def __setstate__(self, state: tuple[amanda.Tool, Callable[[], T]]) -> None:
        """Begin without states."""
        self.__init__(*state)  # type: ignore[misc]

    def of(self, key: Any) -> T:
        """Return the state of a key, an object that can be referred to weakly, in this execution.

        Raises ToolError on a framework's own thread, where several threads execute the program.
        """
        states = self._last = self._present()
        found = states.get(key)
        if found is None:
            found = states[key] = self._make()
        return found

    def last(self, key: Any) -> T | None:
        """Return the state of this thread's last execution; None where that had no such key.

        Where this thread has executed nothing, the last execution of any thread counts.
        """
        caller = amanda.Tool.caller()
        own = None if caller is None else self._states.get(caller)
        return (self._last if own is None else own).get(key)

    def _present(self) -> WeakKeyDictionary[Any, T]:
        caller = amanda.Tool.caller()
        if caller is not None:
            states = self._states.get(caller)
            if states is None:
                states = self._states[caller] = WeakKeyDictionary()
            return states
        if len(self._states) > 1:
            raise ToolError(
                f"{type(self._tool()).__name__}: a thread of the framework recomputes ops for one of "
                f"{len(self._states)} threads that execute the program, and nothing tells for which; give "
                "each thread a tool of its own"
            )
        return next(iter(self._states.values()), self._last)

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._last = WeakKeyDictionary()
