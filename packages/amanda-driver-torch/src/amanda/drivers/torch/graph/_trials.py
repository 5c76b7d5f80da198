"""Traceable routines on tensors without data: what they hold, and whether they can be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from amanda.backend import Action, OpFacts, run_replacement, run_routine
from amanda.errors import RoutineError

from ._ops import TENSORS

if TYPE_CHECKING:
    from ._held import Held
    from ._instrumented import BackwardSite, Inlet, Instrumented, Step
    from ._record import Ran
    from ._routines import Routines
    from ._symbols import Symbols


class Trials:
    """Tries the traceable routines of nodes before the graph is made."""

    def __init__(self, routines: Routines, symbols: Symbols) -> None:
        self._routines = routines
        self._symbols = symbols

    def forward(self, inlet: Instrumented, ran: Ran, steps: Sequence[Step]) -> None:
        """Try the routines at a node's ops and at their backward ops."""
        for call, step in zip(ran.calls, steps, strict=True):
            combined, facts = step.combined, step.facts
            inputs = self._in_turn(combined.before, list(call.call.inputs), facts, inlet.held)
            if combined.replace is not None:
                self._try(combined.replace, inputs, facts, inlet.held)
            outputs, _ = TENSORS.flatten(call.outputs)
            self._in_turn(combined.after, outputs, facts, inlet.held)
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
        try:
            with held.collecting():
                changed = self._changed(action, values, facts)
            fakes = self._symbols.fakes
            stand_ins = [fakes.from_tensor(one, static_shapes=True) for one in held.tensors]
            with held.replaced_by(stand_ins), patch.object(fakes, "allow_non_fake_inputs", False):
                self._changed(action, values, facts)
        except RoutineError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            program = self._routines.program
            program.called_as_python[action] = facts, f"it cannot be traced: {reason}"
            program.report(f"traceable {action}", f"it cannot be traced: {reason}, so it runs as Python")
            return values
        return changed

    def _changed(self, action: Action, values: list[Any], facts: OpFacts) -> list[Any]:
        if action.type.is_replacement:
            run_replacement(TENSORS, action, values, facts, {})
            return values
        return run_routine(TENSORS, action, values, facts, {}, self._routines.program.state)
