"""Signals that arrive while a function runs: handled after it, or told apart from its own exceptions."""

import _signal as signals  # type: ignore[import-not-found]  # the public module is twenty times as slow
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def uninterrupted(work: Callable[[], None]) -> None:
    """Call `work`; delay the handlers of signals that arrive meanwhile, such as that of Ctrl+C, to its end.

    On a thread other than the main one `work` is called as it is: Python runs no handlers there.
    """
    # To set a handler on another thread is an error.
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    handlers: dict[int, Handler] = {}
    delayed_calls: list[tuple[Handler, int, FrameType | None]] = []

    def delay(handler: Handler, number: int, frame: FrameType | None) -> None:
        delayed_calls.append((handler, number, frame))

    try:
        _replace_handlers(handlers, delay)
        work()
    finally:
        try:
            _restore_handlers(handlers)
        finally:
            _restore_handlers(handlers)  # a signal may have interrupted the call above
    # In the order of arrival; the first that raises keeps the rest from running, as it would have done.
    for handler, number, frame in delayed_calls:
        handler(number, frame)


def undo(steps: list[Callable[[], object]]) -> None:
    """Call the functions that undo some steps, the last first, and remove each from the list.

    A function that raises stays in the list, for the next call.
    """
    while steps:
        steps[-1]()  # before it is dropped: an interrupted step is called again
        steps.pop()


@contextmanager
def collect_signal_errors() -> Iterator[list[BaseException]]:
    """Return a context that lists the exceptions of signal handlers, such as the user's KeyboardInterrupt.

    The exceptions are raised where the signal arrived, as without the context.  On a thread other than the
    main one the list stays empty: Python runs no handlers there.
    """
    handlers: dict[int, Handler] = {}
    signal_errors: list[BaseException] = []

    def call_and_list(handler: Handler, number: int, frame: FrameType | None) -> None:
        """Call a handler; list its exception, and raise it."""
        try:
            handler(number, frame)
        except BaseException as error:
            signal_errors.append(error)
            raise

    try:
        if threading.current_thread() is threading.main_thread():
            _replace_handlers(handlers, call_and_list)
        yield signal_errors
    finally:
        try:
            _restore_handlers(handlers)
        finally:
            _restore_handlers(handlers)  # a signal may have interrupted the call above


def _replace_handlers(
    handlers_to_restore: dict[int, Handler], call: Callable[[Handler, int, FrameType | None], None]
) -> None:
    """Make each signal that the program handles call `call(handler, number, frame)` instead of its handler.

    handlers_to_restore: gets each replaced handler, by number of the signal, for `_restore_handlers`.
    """

    def replacement(number: int, frame: FrameType | None) -> None:
        call(handler_by_number[number], number, frame)

    # Every backward pass comes here: no generator, and a look at each signal.
    handler_by_number = {
        number: handler for number in range(1, signal.NSIG) if callable(handler := signals.getsignal(number))
    }
    for number, handler in handler_by_number.items():
        # Before it is replaced: to set it again does no harm where an interrupt comes here.
        handlers_to_restore[number] = handler
        signals.signal(number, replacement)


def _restore_handlers(handlers: dict[int, Handler]) -> None:
    """Put handlers back and remove them from the dict, all of them also where one raises."""
    if handlers:
        number = next(iter(handlers))
        # A signal that is pending runs its handler at once.  The recursion restores the rest even then.
        try:
            signals.signal(number, handlers[number])
        finally:
            del handlers[number]
            _restore_handlers(handlers)
