"""Traceable routines on tensors without data: what they hold, and whether they can be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from amanda.backend import Action, OpFacts
from amanda.errors import RoutineError
from amanda.plan import run_replacement, run_routine

from ._held import Held
from ._ops import TENSORS

if TYPE_CHECKING:
    from amanda.graph import History

    from ._instrumented import BackwardSite, Inlet, Instrumented, Step
    from ._record import Ran
    from ._routines import Routines
    from ._symbols import Symbols


class Trials:
    """Tries the traceable routines of nodes before the graph is made.

    history: of what routines read, for earlier graphs of the same code.
    """

    def __init__(self, routines: Routines, symbols: Symbols, history: History | None) -> None:
        self._routines = routines
        self._symbols = symbols
        self._history = history

    def forward(self, inlet: Instrumented, ran: Ran, steps: Sequence[Step]) -> None:
        """Try the routines at a node's ops and at their backward ops."""
        for call, step in zip(ran.calls, steps, strict=True):
            plan, facts = step.plan, step.facts
            inputs = self._in_turn(plan.before, list(call.call.inputs), facts, inlet.held)
            if plan.replace is not None:
                self._try(plan.replace, inputs, facts, inlet.held)
            self._in_turn(plan.after, call.values, facts, inlet.held)
            for site in step.backward.values():
                self.backward(inlet, site)

    def backward(self, inlet: Inlet, site: BackwardSite) -> None:
        """Try the routines at a backward op."""
        facts, plan = site
        entering, leaving = list(facts.grad_outputs or ()), list(facts.grad_inputs or ())
        entering = self._in_turn(plan.before, entering, facts, inlet.held)
        if plan.replace is not None:
            self._try(plan.replace, entering, facts, inlet.held)
        self._in_turn(plan.after, leaving, facts, inlet.held)

    def _in_turn(self, actions: Sequence[Action], values: list[Any], facts: OpFacts, held: Held) -> list[Any]:
        for action in actions:
            values = self._try(action, values, facts, held)
        return values

    def _try(self, action: Action, values: list[Any], facts: OpFacts, held: Held) -> list[Any]:
        if not self._routines.inlines(action):
            return values
        restless = self._history.volatile_name(action) if self._history is not None else ""
        if restless:
            self._call_as_python(action, facts, f"what it reads changes often: {restless}")
            return values
        program, used = self._routines.program, Held()
        try:
            with program.reads.tracing([action]), used.collecting(self._stand_in), patch.object(
                self._symbols.fakes, "allow_non_fake_inputs", False
            ):  # fmt: skip
                changed = self._changed(action, values, facts)
        except RoutineError:
            raise
        except Exception as error:
            self._call_as_python(action, facts, f"it cannot be traced: {str(error).partition(chr(10))[0]}")
            return values
        program.traced.append((action, used.tensors))
        for tensor in used.tensors:
            held.add(tensor)
        return changed

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        stand_in = self._symbols.fakes.from_tensor(tensor, static_shapes=True)
        return stand_in.detach().requires_grad_(tensor.requires_grad)

    def _call_as_python(self, action: Action, facts: OpFacts, reason: str) -> None:
        program = self._routines.program
        program.called_as_python[action] = facts, reason
        program.report(f"traceable {action}", f"{reason}, so it runs as Python")

    def _changed(self, action: Action, values: list[Any], facts: OpFacts) -> list[Any]:
        if action.type.is_replacement:
            run_replacement(TENSORS, action, values, facts, {})
            return values
        return run_routine(TENSORS, action, values, facts, {}, self._routines.program.state.autodiff)
