"""Saving results before the end: from time to time, and at a signal that native code keeps from Python."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

GRACE = 1.0
"""Seconds after which a signal that ends the process has not been answered: it waits in native code."""


class Saving(threading.Thread):
    """Calls `save` every so many seconds, and where the main thread does not come to its signal handler.

    A rank that waits for another in a collective is told to end by its launcher, and after some seconds is
    killed; Python's handlers run on the main thread, which waits.
    """

    def __init__(self, save: Callable[[], None], every: float | None) -> None:
        super().__init__(name="amanda-saving", daemon=True)
        self._save = save
        self._every = every
        self._ended = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)

    def hear_signals(self) -> None:
        """Hear of signals, unless the program does so itself.  On the main thread."""
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)

    def leave_signals(self) -> None:
        """Hear of none, in a child that would tell its parent's thread of its own."""
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._writing):
            signal.set_wakeup_fd(before)

    def run(self) -> None:
        """Wait and save, until `end`."""
        while not self._ended.is_set():
            ready, _, _ = select.select([self._reading], [], [], self._every)
            arrived = os.read(self._reading, 64) if ready else b""
            if ready and not set(arrived) & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}:
                continue
            if not self._ended.wait(GRACE if ready else 0):
                self._save()

    def end(self) -> None:
        """Save no more."""
        self._ended.set()
        os.write(self._writing, b"\0")
