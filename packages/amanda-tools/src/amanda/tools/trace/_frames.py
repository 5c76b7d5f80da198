"""Ops that are under way, and the tensors that they were given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from amanda.tools.trace._graph import Position
from amanda.tools.trace._recorder import Place

_KEPT = 256
"""Frames of ops that raised stay behind; so many ops may be under way within one another."""


class Given(NamedTuple):
    """A tensor that an op was given: a weak reference, what it was recorded as, and its version then."""

    reference: Callable[[], Any]
    tensor: int
    version: int | None


class Frame(NamedTuple):
    """An op under way.

    given: by flat position.  target: the recorded op that stands for this execution; None for a new one.
    serial: of the last write before the op.  number: that autodiff's next node would have had.
    """

    place: Place
    inputs: tuple[Position, ...]
    target: int | None = None
    forward: int | None = None
    given: Sequence[Given | None] = ()
    serial: int = 0
    number: int | None = None


class Frames:
    """The ops under way in each thread, the innermost last."""

    def __init__(self) -> None:
        self._local = threading.local()

    def push(self, frame: Frame) -> None:
        """An op begins."""
        frames = self._of_thread()
        del frames[:-_KEPT]
        frames.append(frame)

    def pop(self, place: Place) -> Frame | None:
        """An op ends: its frame. Those within it are of ops that raised."""
        frames = self._of_thread()
        for i in range(len(frames) - 1, -1, -1):
            if frames[i].place is place:
                frame = frames[i]
                del frames[i:]
                return frame
        return None

    def _of_thread(self) -> list[Frame]:
        frames: list[Frame] | None = getattr(self._local, "frames", None)
        if frames is None:
            frames = self._local.frames = []
        return frames


def flat(values: Sequence[Any]) -> Iterator[Any]:
    """Values, each list among them as its elements."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def reference(tensor: Any) -> Callable[[], Any]:
    """A weak reference where there can be one."""
    try:
        return weakref.ref(tensor)
    except TypeError:
        return lambda: tensor
