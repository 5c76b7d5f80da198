"""Signals whose handlers raise, at random moments."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from amanda import Scope
from amanda.scope.attachment import attachment

AGAIN = 2e-5
"""Seconds after which an interrupt is tried again that came while other functions were under way."""


class Interrupts:
    """Raises a KeyboardInterrupt at some moment within the next seconds, or not at all.

    within: raise only while a function of a file in this folder is under way; "" for any.
    """

    def __init__(self, within: str = "") -> None:
        self.armed, self.raised = False, 0
        self._within = within
        self._random = random.Random(0)

    def handle(self, _: int, frame: FrameType | None) -> None:
        if self.armed and frame is not None and not frame.f_code.co_filename.startswith(self._within):
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        elif self.armed:
            self.armed = False
            self.raised += 1
            raise KeyboardInterrupt

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle SIGALRM within the block."""
        before = signal.signal(signal.SIGALRM, self.handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)

    def around(self, program: Callable[[], Any], seconds: float) -> None:
        """Run a program with an interrupt, which may come as it ends."""
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, seconds))
        try:
            self.armed = True
            program()
            self.armed = False
        except KeyboardInterrupt:
            pass
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def opened() -> list[Scope]:
    """Return the scopes that are open: an interrupt may come between the last line and `__exit__`."""
    return list(attachment._scopes)
