"""Plans: what the analysis of an op came to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from amanda.action import Action, in_turn
from amanda.errors import ReplaceConflictError

if TYPE_CHECKING:
    from amanda._backward import SettledStep
    from amanda._layer import Layer
    from amanda.context import OpContext


class BackwardPlan:
    """What the tools of one layer do at one backward op."""

    __slots__ = ("after", "before", "replace")

    def __init__(self) -> None:
        self.before: list[Action] = []
        self.replace: Action | None = None
        self.after: list[Action] = []

    def add(self, actions: Iterable[Action]) -> None:
        """Sort actions into their places."""
        for action in actions:
            if action.type.is_replacement:
                self.replace = action
            else:
                (self.after if action.type.is_after else self.before).append(action)

    @property
    def actions(self) -> list[Action]:
        """All of them, in order."""
        return [*self.before, *([self.replace] if self.replace else []), *self.after]

    def __bool__(self) -> bool:
        return bool(self.before or self.replace or self.after)


class Plan(BackwardPlan):
    """What the tools of one layer do at one op, forward and backward.

    context: what the forward analyses put in; backward contexts start from it.
    settled: for which inputs' need of a gradient every backward op has been analysed.
    """

    __slots__ = ("backward", "context", "settled")

    def __init__(self, context: OpContext) -> None:
        super().__init__()
        self.context = context
        self.settled: set[Hashable] = set()
        self.backward: dict[int, BackwardPlan] = {}


class Combined:
    """The plans of a chain of layers for one op, laid out for execution.

    forward: whether anything is inserted in the forward pass.
    actions: what is inserted before and after the op, in order.
    watching: the plans of layers that have routines for backward ops.
    quiet: needs of gradients for which nothing is wanted of the backward ops.
    settled: what is done at backward ops that have been analysed, by the driver's name for their place.
    """

    __slots__ = ("actions", "after", "before", "forward", "plans", "quiet", "replace", "settled", "watching")

    def __init__(self, plans: Sequence[tuple[Layer, Plan]]) -> None:
        self.plans = tuple(plans)
        self.before = tuple(in_turn((action for _, plan in plans for action in plan.before), False))
        self.after = tuple(in_turn((action for _, plan in plans for action in plan.after), True))
        self.actions = self.before + self.after
        self.replace = only_replacement(plan.replace for _, plan in plans)
        self.forward = bool(self.before or self.replace or self.after)
        self.watching = tuple(plan for layer, plan in plans if layer.wants_backward)
        self.quiet: set[Hashable] = {None}
        self.settled: dict[Hashable, SettledStep] = {}

    @property
    def gives_outputs(self) -> bool:
        """Whether routines after the op are given values of it, which they may change."""
        return any(action.select != () for action in self.after)

    @property
    def takes_run(self) -> bool:
        """Whether a routine, of the backward ops that are known too, takes what an execution hands on."""
        plans = [one for _, plan in self.plans for one in (plan, *plan.backward.values())]
        return any(action.takes_run for plan in plans for action in plan.actions)

    def is_settled(self, gradients: Hashable) -> bool:
        """Whether every backward op of executions with this need of gradients has been analysed."""
        return all(gradients in plan.settled for plan in self.watching)

    def traced(self, gradients: Hashable) -> bool:
        """Whether the backward ops of an execution are wanted.

        gradients: which inputs need a gradient; None where autodiff records nothing.
        """
        if gradients in self.quiet:
            return False
        wanted = any(gradients not in plan.settled or any(plan.backward.values()) for plan in self.watching)
        if not wanted:
            self.quiet.add(gradients)
        return wanted


def merged(plans: Sequence[BackwardPlan]) -> BackwardPlan:
    """What the layers of a chain do at one backward op, as one plan."""
    whole = BackwardPlan()
    whole.before = in_turn((action for plan in plans for action in plan.before), False)
    whole.after = in_turn((action for plan in plans for action in plan.after), True)
    whole.replace = only_replacement(plan.replace for plan in plans)
    return whole


def only_replacement(replacements: Iterable[Action | None]) -> Action | None:
    """The one replacement among these, if any.

    Raises ReplaceConflictError when tools of nested scopes replace one op.
    """
    found = [one for one in replacements if one is not None]
    if len(found) > 1:
        first, second = (type(action.tool).__name__ for action in found[:2])
        raise ReplaceConflictError(
            f"{second} wants to replace an op that {first}, of a scope around, replaces already; one op "
            "has one replacement: apply one of the two, or let one use insert_before_op or insert_after_op"
        )
    return found[0] if found else None
