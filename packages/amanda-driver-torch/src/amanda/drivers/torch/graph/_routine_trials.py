"""Trial runs of traceable routines on tensors without data: which tensors they hold, and if they trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from amanda.backend import Action, OpFacts
from amanda.errors import RoutineError
from amanda.plan import run_replacement, run_routine

from ._ops import TENSORS
from ._routine_inputs import HeldTensors

if TYPE_CHECKING:
    from amanda.graph import History

    from ._instrumented import BackwardSite, InstrumentedCall, InstrumentedNode, OpStep
    from ._node_runs import NodeRun
    from ._routines import NodeRoutines
    from ._symbols import GraphSymbols


class RoutineTrials:
    """Trial runs of the traceable routines of nodes, before the graph is copied.

    history: of values that routines read, for earlier graphs of the same code.
    """

    def __init__(self, routines: NodeRoutines, symbols: GraphSymbols, history: History | None) -> None:
        self._routines = routines
        self._symbols = symbols
        self._history = history

    def try_routines_of_node(
        self, instrumented: InstrumentedNode, node_run: NodeRun, steps: Sequence[OpStep]
    ) -> None:
        """Try the routines at a node's ops and at the backward ops of these."""
        for call, step in zip(node_run.calls, steps, strict=True):
            plan, facts = step.plan, step.facts
            inputs = self._try_all(plan.before, list(call.call.inputs), facts, instrumented.held_tensors)
            if plan.replace is not None:
                self._try_routine(plan.replace, inputs, facts, instrumented.held_tensors)
            self._try_all(plan.after, call.values, facts, instrumented.held_tensors)
            for site in step.backward.values():
                self.try_routines_of_backward_op(instrumented, site)

    def try_routines_of_backward_op(self, instrumented: InstrumentedCall, site: BackwardSite) -> None:
        """Try the routines at a backward op."""
        facts, plan = site
        incoming, outgoing = list(facts.grad_outputs or ()), list(facts.grad_inputs or ())
        incoming = self._try_all(plan.before, incoming, facts, instrumented.held_tensors)
        if plan.replace is not None:
            self._try_routine(plan.replace, incoming, facts, instrumented.held_tensors)
        self._try_all(plan.after, outgoing, facts, instrumented.held_tensors)

    def _try_all(
        self, actions: Sequence[Action], values: list[Any], facts: OpFacts, held_tensors: HeldTensors
    ) -> list[Any]:
        """Try routines one after another, each on the values after the last."""
        for action in actions:
            values = self._try_routine(action, values, facts, held_tensors)
        return values

    def _try_routine(
        self, action: Action, values: list[Any], facts: OpFacts, held_tensors: HeldTensors
    ) -> list[Any]:
        """Run an inlined routine without data, and return the values after it.

        Notes the routine and the tensors that it holds.  A routine that cannot be traced, or that reads what
        changes often, is noted as called by Python; the values are then returned unchanged.
        Raises RoutineError for a routine that breaks a rule.
        """
        if not self._routines.is_inlined(action):
            return values
        changing_name = self._history.volatile_name(action) if self._history is not None else ""
        if changing_name:
            self._call_as_python(action, facts, f"what it reads changes often: {changing_name}")
            return values
        program, used_tensors = self._routines.program, HeldTensors()
        try:
            # A real tensor that the mode lets through would be a constant of the graph without notice.
            with program.reads.tracing([action]), used_tensors.collecting(self._make_stand_in), patch.object(
                self._symbols.fakes, "allow_non_fake_inputs", False
            ):  # fmt: skip
                changed = self._run_without_data(action, values, facts)
        except RoutineError:  # the routine breaks a rule, as it would in Python
            raise
        except Exception as error:  # of any kind: routines may do what only values allow
            first_line = str(error).partition("\n")[0]
            self._call_as_python(action, facts, f"it cannot be traced: {first_line}")
            return values
        program.traced.append((action, used_tensors.tensors))
        for tensor in used_tensors.tensors:
            held_tensors.add(tensor)
        return changed

    def _make_stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data for one that a routine holds."""
        stand_in = self._symbols.fakes.from_tensor(tensor, static_shapes=True)
        return stand_in.detach().requires_grad_(tensor.requires_grad)

    def _call_as_python(self, action: Action, facts: OpFacts, reason: str) -> None:
        """Note, and report, that the graph is to call a traceable routine as Python."""
        program = self._routines.program
        program.called_as_python[action] = facts, reason
        program.report(f"traceable {action}", f"{reason}, so it runs as Python")

    def _run_without_data(self, action: Action, values: list[Any], facts: OpFacts) -> list[Any]:
        """Run a routine, and return the values after it; those of a replacement are not used."""
        if action.type.is_replacement:
            run_replacement(TENSORS, action, values, facts, {})
            return values
        return run_routine(TENSORS, action, values, facts, {}, self._routines.program.state.autodiff)
