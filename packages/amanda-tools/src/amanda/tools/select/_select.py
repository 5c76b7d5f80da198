"""Selection of the ops that a tool is applied to."""

from __future__ import annotations

from typing import Literal, TypeVar

import amanda
from amanda.action import Routine
from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveInt, checked, shown
from amanda.tools.mapping import StandardMapping
from amanda.tools.select._patterns import Globs, Paths, Patterns, listed, unmatched
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
    their names.  exclude: paths of modules whose ops, and those within, are not selected.
    phase: "forward", "backward", "optimizer", for the steps of PyTorch's optimizers, "construction", for what
    makes a model, or None for all.  With "backward" forward analysis routines are called all the same, since
    those of backward ops may read what they note down; nothing that they insert runs.

    """

    @checked(error=SelectionError)
    def __init__(
        self,
        type: Globs = None,
        module: Globs = None,
        phase: Phase | None = None,
        exclude: Globs = None,
    ) -> None:
        self._types = Patterns("type", listed("type", type, SelectionError))
        self._modules = Paths("module", listed("module", module, SelectionError))
        self._exclude = Paths("exclude", listed("exclude", exclude, SelectionError) or ())
        self._phase = phase
        self._matched = self._met = False

    @property
    def has_modules(self) -> bool:
        """True if modules were given."""
        return self._modules.patterns is not None

    @property
    def has_types(self) -> bool:
        """True if types were given."""
        return self._types.patterns is not None

    def let(self, tool: amanda.Tool) -> None:
        """Apply a tool to the selected ops alone."""
        if self.has_types or self._phase:
            tool.depends_on(StandardMapping())
        tool.restrict(self)
        if self._phase == "backward":
            tool.wrap_routines(_backward_alone)

    def __call__(self, context: amanda.OpContext) -> bool:
        """Return True if the analysis routines are called for an op."""
        self._met = True
        return self._has_phase(context) and self.fits(context)

    def fits(self, context: amanda.OpContext, *names: str) -> bool:
        """Return True if type and modules of an op are selected, whatever its phase.

        names: of the op, instead of the word and the names that its context tells.
        """
        self._met = True
        is_of_type = not self.has_types or self._types(*(names or _names(context)))
        is_placed = self._modules(*context.get_scopes())
        fits = is_of_type and is_placed and not self._exclude(*context.get_scopes())
        self._matched = self._matched or fits
        return fits

    def has_path(self, path: str) -> bool:
        """Return True if the modules of the selection have a path, and those excluded do not."""
        return self._modules(path) and not self._exclude(path)

    def __str__(self) -> str:
        exclude = [str(self._exclude)] if self._exclude.patterns else []
        phase = [f"phase={self._phase}"] if self._phase else []
        return ", ".join([*self._wanted(), *exclude, *phase])

    def unmatched(self) -> list[str]:
        """Say which patterns fitted no op, with the nearest names; nothing where no op was met."""
        if not self._met:
            return []
        texts = [*unmatched([self._types, self._modules]), *unmatched([self._exclude], "excluded")]
        if self._matched or texts:
            return texts
        wanted = self._wanted()
        if self._exclude.matched:
            return [f"every op of {' and '.join(wanted) or 'the program'} is excluded by {self._exclude}"]
        if self._types.matched and self._modules.matched:
            return [f"no op was selected by {' and '.join(wanted)} together"]
        return [f"no op was selected by phase={self._phase}"]

    def _wanted(self) -> list[str]:
        """Return types and modules that were given, in words."""
        return [str(option) for option in (self._types, self._modules) if option.patterns is not None]

    def _has_phase(self, context: amanda.OpContext) -> bool:
        if self._phase is None:
            return True
        phase: Phase = context["phase"]
        return phase == self._phase or (phase == "forward" and self._phase == "backward")


@checked(error=SelectionError)
def select(
    tool: ToolT,
    *,
    type: Globs = None,
    module: Globs = None,
    exclude: Globs = None,
    phase: Phase | None = None,
    start: NonNegativeInt = 0,
    end: NonNegativeInt | None = None,
    frequency: PositiveInt = 1,
    steps: Steps | None = None,
) -> ToolT:
    """The tool itself, applied to these ops alone, at the steps of `range(start, end, frequency)`.

    type, module, exclude, phase: see `Selection`.  steps: what counts them; one of its own if None is given.
    Raises SelectionError, and `amanda.tools.steps.WindowError` where no step is in the range.
    """
    if not isinstance(tool, amanda.Tool):
        raise SelectionError(f"select: tool is {shown(tool)}; give a tool, such as FlopsTool()")
    selection = Selection(type, module, phase, exclude)
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
