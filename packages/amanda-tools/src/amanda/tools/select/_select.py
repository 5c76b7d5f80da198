"""Selection of the ops that a tool is applied to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import amanda
from amanda.action import Routine
from amanda.errors import AmandaError
from amanda.options import Name, NonNegativeInt, PositiveInt, checked, shown
from amanda.tools.mapping import StandardMapping
from amanda.tools.select._patterns import Paths, Patterns, listed, unmatched
from amanda.tools.steps import Steps, Window

Phase = Literal["forward", "backward", "optimizer", "construction"]
"""Parts of a run: the model, its gradient, the step of an optimiser, or the making of a model."""

ToolT = TypeVar("ToolT", bound=amanda.Tool)


class SelectionError(AmandaError, ValueError):
    """A type, module or phase of a selection is not valid."""


class Selection:
    """Ops by type, module and phase; an op is selected if each of them that is given fits.

    type: words of StandardMapping ("conv2d") or the framework's own names ("Conv2D"); `*` and `?` stand for
    letters.  A backward op has the type of its forward op.  module: paths of modules; what lies in a module
    is selected with it, and `*` stands for any part ("layer4", "*.attention"); Keras' layers may be given by
    their names.  phase: "forward", "backward", "optimizer", for the steps of PyTorch's optimizers,
    "construction", for what makes a model, or None for all.  With "backward" forward analysis routines are
    called all the same, since those of backward ops may read what they note down; nothing that they insert
    runs.

    """

    @checked(error=SelectionError)
    def __init__(
        self,
        type: Name | Sequence[Name] = (),
        module: Name | Sequence[Name] = (),
        phase: Phase | None = None,
    ) -> None:
        self._types = Patterns("type", listed("type", type, SelectionError) or None)
        self._modules = Paths("module", listed("module", module, SelectionError) or None)
        self._phase = phase
        self._matched = self._met = False

    def let(self, tool: amanda.Tool) -> None:
        """Apply a tool to the selected ops alone."""
        if self._types.patterns or self._phase:
            tool.depends_on(StandardMapping())
        tool.restrict(self)
        if self._phase == "backward":
            tool.wrap_routines(_backward_alone)

    def __call__(self, context: amanda.OpContext) -> bool:
        """Return True if the analysis routines are called for an op."""
        self._met = True
        if not self._has_phase(context):
            return False
        typed = self._types.patterns is None or self._types(*_names(context))
        placed = self._modules(*context.get_scopes())
        self._matched = self._matched or (typed and placed)
        return typed and placed

    def __str__(self) -> str:
        options = [str(one) for one in (self._types, self._modules) if one.patterns is not None]
        return ", ".join([*options, f"phase={self._phase}"] if self._phase else options)

    def unmatched(self) -> list[str]:
        """Say what selected no op, with the nearest names; nothing where no op was met."""
        if self._matched or not self._met:
            return []
        if self._types.matched and self._modules.matched:
            return [f"no op was selected by {self._types} and {self._modules} together"]
        return unmatched([self._types, self._modules]) or [f"no op was selected by phase={self._phase}"]

    def _has_phase(self, context: amanda.OpContext) -> bool:
        if self._phase is None:
            return True
        phase: Phase = context["phase"]
        return phase == self._phase or (phase == "forward" and self._phase == "backward")


@checked(error=SelectionError)
def select(
    tool: ToolT,
    *,
    type: Name | Sequence[Name] = (),
    module: Name | Sequence[Name] = (),
    phase: Phase | None = None,
    start: NonNegativeInt = 0,
    end: NonNegativeInt | None = None,
    frequency: PositiveInt = 1,
    steps: Steps | None = None,
) -> ToolT:
    """The tool itself, applied to these ops alone, at the steps of `range(start, end, frequency)`.

    type, module, phase: see `Selection`.  steps: what counts them; one of its own if None is given.
    Raises SelectionError, and `amanda.tools.steps.WindowError` where no step is in the range.
    """
    if not isinstance(tool, amanda.Tool):
        raise SelectionError(f"select: tool is {shown(tool)}; give a tool, such as FlopsTool()")
    selection = Selection(type, module, phase)
    window = Window(Steps() if steps is None else steps, start, end, frequency)
    selection.let(tool)
    if (start, end, frequency) != (0, None, 1):
        window.let(tool)
    return tool


def leave_construction(tool: amanda.Tool) -> None:
    """Apply a tool to what a program computes, and not to the making of its models."""
    tool.depends_on(StandardMapping())
    tool.restrict(lambda context: context["phase"] != "construction")


def _backward_alone(context: amanda.OpContext, type: amanda.ActionType, routine: Routine) -> Routine | None:
    return routine if type.is_backward else None


def _names(context: amanda.OpContext) -> tuple[str, ...]:
    return str(context["type"]), str(context.get_op_type()), getattr(context.get_op(), "__name__", "")
