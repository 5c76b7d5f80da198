"""Work that no signal handler of the program interrupts: what arrives meanwhile is handled after it."""

import _signal as signals  # type: ignore[import-not-found]  # the public module is twenty times as slow
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def uninterrupted(work: Callable[[], None]) -> None:
    """Call it as a whole; a KeyboardInterrupt, say, is raised when it has come to its end, or before it.

    Python runs the handlers on the main thread alone, so any other thread calls it as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    handlers: dict[int, Handler] = {}
    arrived: list[tuple[Handler, int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append((noting[number], number, frame))

    try:
        noting = {n: one for n in range(1, signal.NSIG) if callable(one := signals.getsignal(n))}
        for number, handler in noting.items():
            handlers[number] = handler
            signals.signal(number, note)
        work()
    finally:
        _hand_back(handlers)
    for handler, number, frame in arrived:
        handler(number, frame)


def _hand_back(handlers: dict[int, Handler]) -> None:
    """Put handlers back, all of them also where one is called at once and raises."""
    if handlers:
        number = next(iter(handlers))
        try:
            signals.signal(number, handlers[number])
        finally:
            del handlers[number]
            _hand_back(handlers)
