"""Saving of results before the end: at intervals, and at a signal whose Python handler cannot run."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import amanda

GRACE = 1.0
"""Seconds without an answer to a signal, after which the main thread is taken to wait in native code."""
_SOON = 0.1


class Saving(threading.Thread):
    """Thread that calls `save` every so many seconds, and when a signal's handler cannot run.

    A launcher ends a rank that waits for another one in a collective by a signal, and kills the rank some
    seconds later; Python runs handlers on the main thread, which waits.  A signal that arrives just before a
    blocking system call does not interrupt the call, so the thread sends the signal once more.
    """

    def __init__(self, save: Callable[[], None], every: float | None) -> None:
        super().__init__(name="amanda-saving", daemon=True)
        self._save = save
        self._every = every
        self._handler: Any = None
        self._ended = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def receive_signals(self, handler: Any) -> None:
        """Watch a handler's signals, unless the program has a wakeup descriptor; call on the main thread."""
        self._handler = handler
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)

    def ignore_signals(self) -> None:
        """Stop watching signals in a forked child, which would notify the thread of its parent."""
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._writing):
            signal.set_wakeup_fd(before)

    def run(self) -> None:
        """Save at intervals and at signals, until `end`."""
        with amanda.disabled():
            self._run()

    def _run(self) -> None:
        while not self._ended.is_set():
            ready, _, _ = select.select([self._reading], [], [], self._every)
            arrived = os.read(self._reading, 64) if ready else b""
            ending = set(arrived) & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
            if ready and (not ending or self._ended.wait(_SOON)):
                continue
            for number in ending:
                self._send_again(number)
            if not self._ended.wait(GRACE if ready else 0):
                self._save()

    def _send_again(self, number: int) -> None:
        """Send a signal to the main thread, unless the program has a handler of its own for it."""
        main = threading.main_thread().ident
        if main is not None and signal.getsignal(number) == self._handler:
            signal.pthread_kill(main, number)

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        os.write(self._writing, b"\0")
