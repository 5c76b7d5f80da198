"""Routines at the ops of a graph: part of it where they are traceable, else calls of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from amanda.action import differentiable
from amanda.backend import Action, OpFacts
from amanda.plan import Actions, run_replacement, run_routine

from ._called import Called, CalledForGradients, CalledInstead, Values, cloned, gradients_of
from ._gathering import Gathering
from ._ops import Program, custom_ops, tensors
from ._record import uninstrumented


class Routines:
    """Runs routines for one call of a node, and in the backward pass of that.

    token: of the execution, where routines are called as Python.  standing_in: makes a context in which
    others stand for the tensors that the routines hold.
    """

    def __init__(
        self,
        program: Program,
        token: torch.Tensor | None,
        standing_in: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.program = program
        self.token = token
        self._standing_in = standing_in

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context for routines, in which nothing is instrumented."""
        with uninstrumented(), self._standing_in():
            yield

    def inlines(self, action: Action) -> bool:
        """Return True if a routine becomes part of the graph."""
        return action.traceable and not action.takes_run and action not in self.program.called_as_python

    def run(
        self,
        action: Action,
        values: list[Any],
        facts: OpFacts,
        mutable: Sequence[int] = (),
    ) -> list[Any]:
        """The values after a routine."""
        if action.opening:
            return values
        if not self.inlines(action):
            action = self._as_call(action, facts)
        return run_routine(tensors(), action, values, facts, {}, self.program.state.autodiff, mutable)

    def in_turn(
        self, actions: Iterable[Action], values: list[Any], facts: OpFacts, mutable: Sequence[int] = ()
    ) -> list[Any]:
        """The values after some routines; mutable: positions of the user's tensors that the op writes."""
        for action in actions:
            values = self.run(action, values, facts, mutable)
        return values

    def replace(self, action: Action, call: Any, inputs: list[Any], facts: OpFacts) -> Any:
        """Return what a routine gives instead of an op; NotImplemented: the op shall run."""
        if self.inlines(action):
            result = run_replacement(tensors(), action, inputs, facts, {}, call.targets, call.computation())
            return result if result is NotImplemented else call.formed(result)
        values = Values(cloned(inputs, call.targets))  # what autograd saves is not what is written below
        compute, targets = call.computation(), call.targets
        slot = self._slot(
            action, facts, values, lambda: CalledInstead(action, facts, values, compute, targets)
        )
        results = self._taped(slot, values, [])
        if call.targets:
            for target, result in zip(call.targets, results, strict=True):
                inputs[target].copy_(result)
            written = [inputs[target] for target in call.targets]
            return written[0] if len(written) == 1 else tuple(written)
        return call.formed(tuple(results)) if len(results) != 1 else results[0]

    def hook(self, node: Any, facts: OpFacts, plan: Actions) -> None:
        """Put routines around a backward op of autograd's graph."""
        entered: list[Any] = []

        def before(gradients: Sequence[Any]) -> Any:
            with self.at_work():
                entered[:] = self.in_turn(plan.before, list(gradients), facts)
            return tuple(entered)

        def after(gradients: Sequence[Any], outer: Sequence[Any]) -> Any:
            with self.at_work():
                left = list(gradients)
                if plan.replace is not None:
                    left = self._replaced(plan.replace, left, entered, facts)
                return tuple(self.in_turn(plan.after, left, facts))

        if plan.before or plan.replace:
            node.register_prehook(before)
        if plan.after or plan.replace:
            node.register_hook(after)

    def _replaced(self, action: Action, left: list[Any], entered: list[Any], facts: OpFacts) -> list[Any]:
        wanted = [i for i, one in enumerate(left) if one is not None]
        if self.inlines(action):
            result = run_replacement(tensors(), action, entered, facts, {})
            if result is NotImplemented:
                return left
            results = gradients_of(result, len(left), wanted, action, facts)
        else:
            values = Values(entered)
            likes = [left[i] for i in wanted]
            leaving = tuple(one is not None for one in left)
            slot = self._slot(
                action, facts, values, lambda: CalledForGradients(action, facts, values, leaving), leaving
            )
            results = custom_ops().call(
                self.token, [*values.flat, *likes], values.numbers, likes, self.program.number, slot
            )
        placed = list(left)
        for i, one in zip(wanted, results, strict=True):
            placed[i] = one
        return placed

    def _as_call(self, action: Action, facts: OpFacts) -> Action:
        """An action whose routine is a node that calls the routine."""
        taped = (action.differentiable or self.program.state.autodiff) and not action.observer

        def call(*given: Any) -> Any:
            values = Values(given)
            gives = () if action.observer else values.given
            slot = self._slot(action, facts, values, lambda: Called(action, facts, values, gives))
            if self.program.gathers(action, facts) and self.token is not None:
                waiting = Gathering.of(self.program, self.token)
                waiting.add(self.token, slot, values, action.type.is_backward)
                return None
            likes = list(values.tensors) if gives else []
            if taped:
                results = self._taped(slot, values, likes)
            else:
                results = custom_ops().call(
                    self.token, values.flat, values.numbers, likes, self.program.number, slot
                )
            if not gives:
                return None
            placed = values.with_tensors(results)
            return placed if len(placed) > 1 or isinstance(placed[0], list) else placed[0]

        call.__qualname__ = getattr(action.func, "__qualname__", str(action.func))
        return Action(action.type, differentiable(call) if taped else call, action.tool, action.select, {})

    def _slot(
        self, action: Action, facts: OpFacts, values: Values, make: Callable[[], Called], which: Any = None
    ) -> int:
        """The slot of a routine; a backend that runs the graph as it is has other values each time."""
        slot = self.program.slot((id(facts), action, values.pattern, which), make)
        called: Any = self.program.table[slot]
        called.others = values.others
        return slot

    def _taped(self, slot: int, values: Values, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(
            Taped.apply(  # type: ignore[no-untyped-call]
                self.token, self.program.number, slot, len(likes), values.numbers, *values.flat, *likes
            )
        )


class Taped(torch.autograd.Function):
    """A routine that is called as Python and takes part in autodiff."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, program: int, slot: int, count: int, numbers: list[int], *given: Any
    ) -> Any:
        values, likes = list(given[: len(given) - count]), list(given[len(given) - count :])
        ctx.slot = slot
        ctx.count = count
        ctx.save_for_backward(token, *values)
        return tuple(custom_ops().tape(token, values, numbers, likes, program, slot))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        token, *values = ctx.saved_tensors
        pulled = custom_ops().pull(token, list(gradients), values, ctx.slot)
        needed = ctx.needs_input_grad[5 : 5 + len(values)]
        given = [one if needs else None for one, needs in zip(pulled, needed, strict=True)]
        return None, None, None, None, None, *given, *[None] * ctx.count
