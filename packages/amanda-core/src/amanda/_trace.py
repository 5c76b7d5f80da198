"""What one execution of an op hands on to its backward ops."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda._facts import OpFacts
    from amanda._plan import Combined
    from amanda._tensors import TensorOps


class Trace:
    """What an execution leaves for its backward ops; it lives as long as their graph.

    gradients: which inputs needed a gradient.
    layer: the tools of the scope that it was made in.
    anew: whether its backward ops are analysed in each pass, as without the cache.
    """

    __slots__ = (
        "__weakref__", "anew", "combined", "facts", "gradients", "layer", "op_id", "pending", "plans", "run"
    )  # fmt: skip

    def __init__(
        self, op_id: int, gradients: Hashable, combined: Combined, run: dict[str, Any], anew: bool = False
    ) -> None:
        self.op_id = op_id
        self.anew = anew
        self.gradients = gradients
        self.combined = combined
        self.plans = combined.plans
        self.layer = combined.plans[-1][0]
        self.run = run
        self.facts: OpFacts | None = None
        self.pending: set[int] = set()

    def again(self) -> Trace:
        """A trace for the backward ops of this execution's backward ops."""
        trace = copy(self)
        trace.pending = set()
        return trace

    def keep(self, ops: TensorOps, told: OpFacts, inputs: list[Any], outputs: list[Any]) -> None:
        """Keep what the contexts of backward ops shall know: the values too, if some are to be analysed."""
        facts = told.at_backward(None, 0, True)
        if self.combined.is_settled(self.gradients):
            facts.drop_values()
        else:
            facts.inputs = [ops.kept(value) for value in inputs]
            facts.outputs = [ops.kept(value) for value in outputs]
            facts.dropped = False
        self.facts = facts

    def finish(self, again: bool = True) -> None:
        """Hear that every backward op of the execution has been analysed.

        again: whether another pass may come through them.
        """
        if again and self.anew:
            return
        if not self.combined.is_settled(self.gradients):
            for _, plan in self.plans:
                plan.settled.add(self.gradients)
        if self.facts is not None:
            self.facts.drop_values()
