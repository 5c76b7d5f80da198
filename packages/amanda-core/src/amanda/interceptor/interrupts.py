"""Signals that arrive while something is under way: handled after it, or told apart from what it raises."""

import _signal as signals  # type: ignore[import-not-found]  # the public module is twenty times as slow
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def uninterrupted(work: Callable[[], None]) -> None:
    """Call it as a whole; a KeyboardInterrupt, say, is raised when it has come to its end, or before it.

    Python runs the handlers on the main thread alone, so any other thread calls it as it is.
    """
    # To set a handler on another thread is an error.
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    handlers: dict[int, Handler] = {}
    arrived: list[tuple[Handler, int, FrameType | None]] = []

    try:
        _replace_handlers(handlers, lambda handler, number, frame: arrived.append((handler, number, frame)))
        work()
    finally:
        try:
            _restore_handlers(handlers)
        finally:
            _restore_handlers(handlers)  # those that an exception has left
    # In the order of arrival; the first that raises keeps the rest from running, as it would have done.
    for handler, number, frame in arrived:
        handler(number, frame)


def undo(steps: list[Callable[[], object]]) -> None:
    """Call what undoes each step, last first; one that raises is called again the next time."""
    while steps:
        steps[-1]()  # before it is dropped: an interrupted step is called again
        steps.pop()


@contextmanager
def raised_by_signals() -> Iterator[list[BaseException]]:
    """Collect what handlers of signals raise meanwhile: the user's KeyboardInterrupt, not the work's own.

    Any other thread than the main one runs no handlers.
    """
    handlers: dict[int, Handler] = {}
    raised: list[BaseException] = []

    def call(handler: Handler, number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        if threading.current_thread() is threading.main_thread():
            _replace_handlers(handlers, call)
        yield raised
    finally:
        try:
            _restore_handlers(handlers)
        finally:
            _restore_handlers(handlers)


def _replace_handlers(
    handlers: dict[int, Handler], call: Callable[[Handler, int, FrameType | None], None]
) -> None:
    """Call `call(handler, number, frame)` in the place of each handler of the program."""

    def replacement(number: int, frame: FrameType | None) -> None:
        call(originals[number], number, frame)

    installed = ((number, signals.getsignal(number)) for number in range(1, signal.NSIG))
    originals = {number: handler for number, handler in installed if callable(handler)}
    for number, handler in originals.items():
        handlers[number] = handler  # first: to set it again does no harm where an interrupt comes here
        signals.signal(number, replacement)


def _restore_handlers(handlers: dict[int, Handler]) -> None:
    """Put handlers back, all of them also where one is called at once and raises."""
    if handlers:
        number = next(iter(handlers))
        try:
            signals.signal(number, handlers[number])
        finally:
            del handlers[number]
            _restore_handlers(handlers)
