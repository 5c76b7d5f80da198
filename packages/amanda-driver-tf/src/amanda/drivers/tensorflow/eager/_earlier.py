"""Ops that tapes recorded before the scope: their backward ops are no tool's, which is reported."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from tensorflow.python.eager import backprop
from tensorflow.python.framework import ops

from ._calls import UNSTOPPABLE
from ._state import NOBODY, local, tensors_of

if TYPE_CHECKING:
    from amanda.backend import Attributes, State

_BEFORE = "it was recorded on a tape before the scope"
_SUMS_AND_ZEROS = frozenset({"AddN", "Fill", "OnesLike", "ZerosLike"})
"""Ops of a tape itself."""


class Earlier:
    """Tells what was recorded before the scope from what a tape recorded in it."""

    def __init__(self) -> None:
        self._since = 0
        self._tapes: weakref.WeakSet[Any] = weakref.WeakSet()

    def enter(self, attributes: Attributes) -> None:
        """Note which tapes are new from now on, until `attributes` are restored."""
        self._since = ops.uid()
        push = backprop.GradientTape._push_tape

        @functools.wraps(push)
        def push_tape(tape: Any) -> None:
            if tape._tape is None:
                self._tapes.add(tape)
            push(tape)

        attributes.set(backprop.GradientTape, "_push_tape", push_tape)

    def has(self, tape: Any) -> bool:
        """Return True if a tape, as native code has it, may have recorded before."""
        return not any(one._tape is tape for one in self._tapes)

    def tell_op(self, type: str, tensors: Sequence[Any]) -> None:
        """Report backward ops of an op without a mark, though a tool may want them.

        tensors: its inputs and outputs as far as the tape has kept them for its gradient.
        """
        activation = interceptor.active()
        if activation is None or local.frame is NOBODY:
            return
        kept = tensors_of(tensors)
        if type in UNSTOPPABLE:
            reason = "it computes its gradients by a tape of its own"
        elif self._is_earlier(kept) and not _is_quiet(type, activation.state):
            reason = _BEFORE
        else:
            return
        activation.state.report(f"the backward ops of {type}", reason)

    def tell_function(self, type: str) -> None:
        """Report an op of a backward function that no op is known for: a custom gradient."""
        activation, under_way = interceptor.active(), local.under_way
        if activation is None or under_way is None or not under_way.earlier or type in _SUMS_AND_ZEROS:
            return
        activation.state.report("the backward ops of a custom gradient", _BEFORE)

    def _is_earlier(self, kept: Sequence[Any]) -> bool:
        if kept:
            return all(tensor._id < self._since for tensor in kept)
        return local.under_way is not None and local.under_way.earlier


def _is_quiet(type: str, state: State) -> bool:
    """Return True if there was an op of that type whose backward ops no tool asked for: it is not marked."""
    chain = () if state.stack is None else state.stack.chain
    plans = [plan for stack in chain for known in stack.plans.values() for plan in known.values()]
    return any(
        plan.backward.complete
        and not any(plan.backward.actions.values())
        and plan.context.get_op().type == type
        for plan in plans
    )
