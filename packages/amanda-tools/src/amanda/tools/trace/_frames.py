"""Ops that are under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from amanda.tools.trace._graph import Position
from amanda.tools.trace._living import Given
from amanda.tools.trace._recorder import Place

_KEPT = 256
"""Most ops under way within one another; frames of ops that raised stay until then."""


class Frame(NamedTuple):
    """An op under way.

    target: the recorded op that the execution is one of; None for a new op.  forward: of a backward op.
    given: the tensors among the inputs by flat position.  serial: of the last write before the op.
    number: that autodiff's next node would have had.
    """

    place: Place
    inputs: tuple[Position, ...]
    target: int | None
    forward: int | None = None
    given: Sequence[Given | None] = ()
    serial: int = 0
    number: int | None = None


class Frames(threading.local):
    """The ops under way in each thread, the innermost last."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []

    def push(self, frame: Frame) -> None:
        """Begin an op."""
        del self._frames[:-_KEPT]
        self._frames.append(frame)

    def pop(self, place: Place) -> Frame | None:
        """End an op, and return its frame; frames within that one are of ops that raised."""
        for i in range(len(self._frames) - 1, -1, -1):
            if self._frames[i].place is place:
                frame = self._frames[i]
                del self._frames[i:]
                return frame
        return None
