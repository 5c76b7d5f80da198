"""What a thread is at: an op whose backward ops are wanted, a gradient function, a backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from amanda.backend import State, Trace

MARK = "amanda"
"""Name of the attribute that an op's mark is recorded under."""


class Mark:
    """One op on a tape, and the trace of the execution that recorded it.

    place: tells the ops of one execution apart.  inputs: ids of the tensors that it was given.
    order: 1 for a backward op's own, and so on.
    """

    __slots__ = ("__weakref__", "inputs", "order", "place", "trace")

    by_output: ClassVar[WeakValueDictionary[int, Mark]] = WeakValueDictionary()
    """The op on a tape that made a tensor, by the tensor's id, which TensorFlow gives once."""

    def __init__(self, place: int, order: int) -> None:
        self.trace: Trace | None = None
        self.place = place
        self.order = order
        self.inputs: tuple[int, ...] = ()

    def know(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Keep which tensors the op was given and which it made."""
        self.inputs = tuple([tensor._id for tensor in inputs])
        for tensor in outputs:
            self.by_output[tensor._id] = self


class Made:
    """Context of an op's execution; the ops recorded in it are marked."""

    __slots__ = ("_before", "marks", "order")

    def __init__(self, order: int = 0) -> None:
        self.marks: list[Mark] = []
        self.order = order

    def mark(self) -> Mark:
        """A mark for the next op."""
        mark = Mark(len(self.marks), self.order)
        self.marks.append(mark)
        return mark

    def __enter__(self) -> Made:
        self._before, local.made = local.made, self
        return self

    def __exit__(self, *_: object) -> None:
        local.made = self._before


class Frame:
    """A gradient function under way: ops in it are backward ops of the mark's execution.

    gradients: by their ids, the gradients that entered it, and what was computed of them.
    count: how many ops there have been.
    """

    __slots__ = ("_before", "count", "gradients", "mark", "second", "state")

    def __init__(self, mark: Mark, state: State, gradients: Iterable[Any]) -> None:
        self.mark = mark
        self.state = state
        self.count = 0
        self.gradients = {tensor._id: tensor for tensor in tensors_of(gradients)}
        self.second: Trace | None = None

    def __enter__(self) -> Frame:
        self._before, local.frame = local.frame, self
        return self

    def __exit__(self, *_: object) -> None:
        local.frame = self._before


class Pass:
    """A backward pass under way.

    nested: whether another tape records it.  producers: by a gradient's id, the gradient and the mark
    of the op whose output it belongs to.
    """

    __slots__ = ("_before", "_frame", "counts", "nested", "producers", "state", "traces")

    def __init__(self, state: State, nested: bool) -> None:
        self.state = state
        self.nested = nested
        self.producers: dict[int, tuple[Any, Mark]] = {}
        self.traces: dict[int, Trace] = {}
        self.counts: dict[int, int] = {}

    def __enter__(self) -> Pass:
        self._before, local.under_way = local.under_way, self
        self._frame, local.frame = local.frame, None
        return self

    def __exit__(self, *_: object) -> None:
        local.under_way, local.frame = self._before, self._frame


class Outside:
    """Context in a backward pass in which ops are forward ops."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = local.under_way, local.frame, local.made
        local.under_way = local.frame = local.made = None

    def __exit__(self, *_: object) -> None:
        local.under_way, local.frame, local.made = self._before


class _Local(threading.local):
    """made: the op whose backward ops are wanted.  frame: the gradient function under way.
    under_way: the backward pass.  recorded: whether the last op was recorded by us.
    result: the outputs that are not to be recorded again.
    """

    made: Made | None = None
    frame: Frame | None = None
    under_way: Pass | None = None
    recorded = False
    result: Any = None


local = _Local()
NOBODY: Any = Frame.__new__(Frame)
"""The frame of a gradient function whose ops belong to no known execution."""


def tensors_of(gradients: Iterable[Any]) -> list[Any]:
    """The tensors among gradients, also those that sparse ones are made of."""
    found: list[Any] = []
    for gradient in gradients:
        if gradient is None:
            continue
        if hasattr(gradient, "_id"):
            found.append(gradient)
        elif hasattr(gradient, "values") and hasattr(gradient.values, "_id"):
            found.append(gradient.values)
    return found
