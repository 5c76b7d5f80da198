"""Counting steps: of training, of inference, of decoding."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import get_ident

import amanda
from amanda import interceptor
from amanda.action import opening
from amanda.options import checked, deprecated

Listener = Callable[[int], object]

_OUTSIDE_LIMIT = 100


@dataclass
class _Candidate:
    """An op whose executions may begin steps.

    inside: in the call of a module, or in a graph.  order: of the first execution.
    thread: on which its executions count; None for any, since a graph calls back on threads of its own.
    """

    inside: bool
    order: int
    thread: int | None
    executions: int = 0

    def leads(self, other: _Candidate | None) -> bool:
        """Return True if this op begins steps rather than the other one."""
        if other is None or other is self:
            return True
        if self.inside != other.inside:
            return self.inside
        if (self.executions > 1) != (other.executions > 1):
            return self.executions > 1
        return self.order < other.order


class Steps(amanda.Tool):
    """Counts steps from 0; tools that go by steps depend on it.

    A step begins when the leading op executes again, on the thread on which it did first. Leading is, of
    the first ops of outermost module calls (in a graph, of its runs), the earliest that repeats: each batch
    of a training loop is a step, and each batch of an evaluation that calls the same model. As long as
    there is none, the earliest line outside of modules that repeats leads.  After a call of `step` only
    further ones begin steps.

    In a graph a step begins as a run of it begins, ahead of every operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._listeners: list[Listener] = []
        self._explicit = False
        self._candidates: dict[Hashable, _Candidate] = {}
        self._models: set[int] = set()
        self._leader: _Candidate | None = None
        self._between_runs = True
        self.add_inst_for_op(self._look)

    def step(self) -> None:
        """Begin a step here, and at no op any more."""
        self._explicit = True
        self._turn(self.number + 1)

    @deprecated(use="clear", since="amanda-tools 0.2", gone="0.4")
    def restart(self) -> None:
        """Count from 0 again.  Deprecated: use `clear`."""
        self.clear()

    def clear(self) -> None:
        """Count from 0 again: the next step that begins is the first."""
        self._leader = None
        for one in self._candidates.values():
            one.executions = 0
        self._turn(0)

    @checked
    def on_step(self, listener: Listener) -> None:
        """Call `listener(number)` at the beginning of each step, ahead of its routines, and now."""
        self._listeners.append(listener)
        listener(self.number)

    def _turn(self, number: int) -> None:
        self.number = number
        for listener in self._listeners:
            listener(number)

    def _look(self, context: amanda.OpContext) -> None:
        if context.is_static():  # no step of it
            return
        place = self._place(context)
        if place is None:
            return
        if place not in self._candidates:
            eager = context.is_eager()
            inside = not isinstance(place, tuple)
            thread = get_ident() if eager else None
            self._candidates[place] = _Candidate(inside, len(self._candidates), thread)
        context.insert_before_op(self._execute, inputs=[], place=place)

    def _place(self, context: amanda.OpContext) -> Hashable:
        """Return the key of an op that may begin steps; None for an op that may not."""
        op_id = context.get_op_id()
        if op_id in self._candidates:
            return op_id
        if not context.is_eager():
            first, self._between_runs = self._between_runs, False
            return op_id if first else None
        if subjects := interceptor.subjects():
            model = interceptor.ordinal(subjects[0])
            first = model not in self._models
            self._models.add(model)
            return op_id if first else None
        # Outside modules nothing says where a repetition begins, and each time has an id of its own.
        line = (context.get_source(), context.get_op_type())
        return line if line in self._candidates or len(self._candidates) < _OUTSIDE_LIMIT else None

    @opening
    def _execute(self, place: Hashable) -> None:
        one = self._candidates[place]
        self._between_runs = True
        if one.thread not in (None, get_ident()):
            return
        one.executions += 1
        if one.leads(self._leader) and not self._explicit:
            self._leader = one
            if self.number != one.executions - 1:
                self._turn(one.executions - 1)
