"""The state of a thread: an op whose backward ops are wanted, a gradient function, a backward pass."""

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

    nested: whether another tape records it.  earlier: whether its tape may have recorded before the scope.
    claims: by a gradient's id, the gradient, and for each op that it may be of whether that made the tensor
    it is the gradient of, and after how many calls of gradient functions.
    """

    __slots__ = ("_before", "_frame", "calls", "claims", "counts", "earlier", "nested", "state", "traces")

    def __init__(self, state: State, nested: bool, earlier: bool) -> None:
        self.state = state
        self.nested = nested
        self.earlier = earlier
        self.claims: dict[int, tuple[Any, dict[Mark, tuple[bool, int]]]] = {}
        self.calls = 0
        self.traces: dict[int, Trace] = {}
        self.counts: dict[int, int] = {}

    def claim(self, gradient: Any, mark: Mark, made: bool) -> None:
        """A gradient may be of an op: of that which made its tensor, or else of that which read it."""
        self.claims.setdefault(gradient._id, (gradient, {}))[1][mark] = made, self.calls

    def returned(self, gradients: Iterable[Any], inputs: Iterable[int], mark: Mark | None) -> None:
        """A gradient function gave the gradients of inputs, which are ids of tensors."""
        self.calls += 1
        for gradient, given in zip(gradients, inputs, strict=False):
            maker = Mark.by_output.get(given)
            made = maker is not None and maker.trace is not None
            owner = maker if made else mark
            if owner is not None:
                for tensor in tensors_of([gradient]):
                    self.claim(tensor, owner, made)

    def owner(self, gradients: Iterable[Any]) -> Mark | None:
        """The op that the sum of some gradients is of.

        An op that passes a gradient on as it is makes it one of several tensors: the sum is of the one that
        all have in common, and else of the one that was reached last.
        """
        known = [self.claims[one._id][1] for one in gradients if one._id in self.claims]
        if not known:
            return None
        makers = [found for one in known if (found := {mark for mark, (made, _) in one.items() if made})]
        common = set.intersection(*makers) if makers else set()
        latest = {mark: claim for one in known for mark, claim in one.items() if not common or mark in common}
        return max(latest, key=lambda mark: latest[mark])

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
