"""Observers of a graph that AOTAutograd traces: their values wait, and few calls of Python hand them over.

A call for each value would be a kernel for each, of which the compiler keeps the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from amanda.backend import Action, Executions, Observed, OpFacts

from ._ops import Program, custom_ops
from ._record import uninstrumented

if TYPE_CHECKING:
    from ._called import Called, Values
    from ._ops import GraphExecution

AT_ONCE = 128
"""Tensors that wait at most: memory is held until their observers have seen them."""

_WAITING = "_amanda_waiting"


def can_wait(action: Action) -> bool:
    """Return True for a routine that may be called later than at its op."""
    return action.observer and not (action.takes_run or action.takes_shapes or action.opening)


class Gathering:
    """Observers of one trace of a graph, and the values that wait for them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._members: list[tuple[int, Values]] = []
        self._count = 0

    @classmethod
    def of(cls, program: Program, token: torch.Tensor) -> Gathering:
        """Return that of the trace that a token stands for."""
        found: Gathering | None = getattr(token, _WAITING, None)
        if found is None:
            found = cls(program)
            setattr(token, _WAITING, found)
        return found

    def add(self, token: torch.Tensor, slot: int, values: Values, backward: bool) -> None:
        """Have the observer at a slot wait with its values; in the backward pass until its end at most."""
        if backward and not self._members:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.hand_over(token))
        self._members.append((slot, values))
        self._count += len(values.flat)
        if self._count >= AT_ONCE:
            self.hand_over(token)

    def hand_over(self, token: torch.Tensor) -> None:
        """Put one call of the observers that wait into the trace."""
        members, self._members, self._count = self._members, [], 0
        if not members:
            return
        program = self._program
        slots = tuple(slot for slot, _ in members)
        counts = [(len(values.flat), len(values.numbers)) for _, values in members]
        slot = program.slot(
            ("gathered", slots, tuple(counts)),
            lambda: Gathered([program.table[slot] for slot in slots], counts),
        )
        tensors = [one for _, values in members for one in values.flat]
        numbers = [one for _, values in members for one in values.numbers]
        with uninstrumented():
            custom_ops().call(token, tensors, numbers, [], program.number, slot)


@dataclass(slots=True)
class _Place:
    """One observer at one place."""

    action: Action
    facts: OpFacts


class Gathered:
    """Observers that a graph calls together; counts: of the tensors and the numbers of each."""

    def __init__(self, called: Sequence[Called], counts: Sequence[tuple[int, int]]) -> None:
        self._called = called
        self._counts = counts
        self._alone: list[int] = []
        self._together: dict[Any, list[int]] = {}
        for i, one in enumerate(called):
            (action,) = one.actions
            if action.gathered is None:
                self._alone.append(i)
            else:
                self._together.setdefault((action.gathered, id(action.tool)), []).append(i)
        self._prepared: dict[Any, dict[Any, Any]] = {key: {} for key in self._together}

    def handed(self, values: Sequence[Any], numbers: Sequence[int]) -> list[Sequence[Any]]:
        """Return the tensors of each observer; take the numbers of a run."""
        found, at, number = [], 0, 0
        for one, (tensors, own) in zip(self._called, self._counts, strict=True):
            found.append(one.handed(values[at : at + tensors], numbers[number : number + own]))
            at, number = at + tensors, number + own
        return found

    def run(self, execution: GraphExecution, flat: Sequence[Sequence[Any]]) -> list[Any]:
        """Call the observers whose tools' scopes are open; those with a gathered form after the others."""
        for i in self._alone:
            self._called[i].run(execution, flat[i])
        for key, members in self._together.items():
            (action,) = self._called[members[0]].actions
            if execution.runs_action(action):
                seen = [self._observed(self._called[i], flat[i]) for i in members]
                Executions(seen, prepared=self._prepared[key]).observe(action)
        return []

    @staticmethod
    def _observed(called: Called, flat: Sequence[Any]) -> Observed:
        (action,) = called.actions
        values = called.values([one.detach() for one in flat])
        return Observed(values, action.kwargs, _Place(action, called.facts), _no_run)


def _no_run(place: Any) -> dict[Any, Any]:
    """Return what routines of an execution hand on: nothing, since none that is gathered takes it."""
    return {}
