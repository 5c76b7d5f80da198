"""Signals during callbacks of programs: XLA would turn an exception of a handler into its own error."""

# Its functions in C are ten times as fast as those of signal, which make enums.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = sorted(signal.valid_signals())  # once, since each program that calls Python goes through them


class _RoutineState(threading.local):
    """State of a thread; in_routine: True while a routine runs, whose caller catches exceptions."""

    in_routine = False


_thread = _RoutineState()


class _RoutineContext:
    """Context of a routine, in which exceptions of handlers are raised at once: it may wait for a user."""

    def __enter__(self) -> None:
        _thread.in_routine = True

    def __exit__(self, *_: object) -> None:
        _thread.in_routine = False


running_routine = _RoutineContext()


@contextmanager
def collecting_exceptions(failures: list[BaseException]) -> Iterator[None]:
    """Collect exceptions of signal handlers in a list within the context, unless a routine runs.

    Nothing happens on threads other than the main thread, on which Python runs handlers.
    """
    handlers: dict[int, Callable[..., Any]] = {}
    if threading.current_thread() is threading.main_thread():
        pairs = ((number, _signal.getsignal(number)) for number in _NUMBERS)
        handlers = {number: handler for number, handler in pairs if callable(handler)}
    if not handlers:
        yield
        return
    # A copy: `_restore` takes handlers out of the dict as it puts them back.
    originals, is_open = dict(handlers), True

    def collect(number: int, frame: Any) -> Any:
        try:
            return originals[number](number, frame)
        except BaseException as error:
            # Raised within a callback XLA would turn it into its own error; a routine's caller catches it.
            if _thread.in_routine or not is_open:
                raise
            failures.append(error)

    for number in handlers:
        _signal.signal(number, collect)
    try:
        yield
    finally:
        is_open = False
        _restore(handlers, collect)


def _restore(handlers: dict[int, Callable[..., Any]], collect: Callable[..., Any]) -> None:
    """Restore all handlers, even if a signal raises meanwhile."""
    try:
        while handlers:
            number = next(iter(handlers))
            if _signal.getsignal(number) is collect:  # unless the program has set another meanwhile
                _signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _restore(handlers, collect)
