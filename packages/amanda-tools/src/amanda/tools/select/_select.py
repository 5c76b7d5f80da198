"""Which ops a tool is applied to."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, get_args

import amanda
from amanda.action import Routine
from amanda.errors import AmandaError
from amanda.tools.mapping import StandardMapping
from amanda.tools.steps import Steps, Window

Phase = Literal["forward", "backward", "optimizer"]
"""What an op is a part of: the model, its gradient, or the step of an optimiser."""

ToolT = TypeVar("ToolT", bound=amanda.Tool)

_SEEN = 10_000


class SelectionError(AmandaError, ValueError):
    """A selection that cannot be."""


class Selection:
    """Ops by type, module and phase; an op is selected if each of them that is given fits.

    type: words of StandardMapping ("conv2d") or the framework's own names ("Conv2D"); `*` and `?` stand for
    letters.  A backward op has the type of its forward op.  module: paths of modules; what lies in a module
    is selected with it, and `*` stands for any part ("layer4", "*.attention"); Keras' layers may be given by
    their names.  phase: "forward", "backward", or "optimizer", for the steps of PyTorch's optimizers.  With
    "backward" the forward analysis routines are called all the same, since those of backward ops may read
    what they note down; nothing that they insert runs.

    matched: whether an op was selected.  types, modules: of the ops that were not.
    """

    def __init__(
        self,
        type: str | Sequence[str] = (),
        module: str | Sequence[str] = (),
        phase: Phase | None = None,
    ) -> None:
        self._types, self._modules = _listed("type", type), [_path(one) for one in _listed("module", module)]
        if phase not in (None, *get_args(Phase)):
            raise SelectionError(f'phase is {phase!r}; it is "forward", "backward" or "optimizer"')
        self._phase = phase
        self.wanted_types, self.wanted_modules = tuple(self._types), tuple(self._modules)
        self.matched = False
        self.types: set[str] = set()
        self.modules: set[str] = set()

    def let(self, tool: amanda.Tool) -> None:
        """Apply a tool to the selected ops alone."""
        if self._types or self._phase:
            tool.depends_on(StandardMapping())
        tool.restrict(self)
        if self._phase == "backward":
            tool.wrap_routines(_backward_alone)

    def __call__(self, context: amanda.OpContext) -> bool:
        """Whether the analysis routines are called for an op."""
        if not self._has_phase(context):
            return False
        if self._has_type(context) and self._has_module(context):
            self.matched = True
            return True
        if len(self.types) + len(self.modules) < _SEEN:
            self.types.add(context.get("type") or context.get_op_type())
            self.modules.add(context.get_scope())
        return False

    def _has_phase(self, context: amanda.OpContext) -> bool:
        if self._phase is None:
            return True
        phase: Phase = context["phase"]
        return phase == self._phase or (phase == "forward" and self._phase == "backward")

    def _has_type(self, context: amanda.OpContext) -> bool:
        if not self._types:
            return True
        names = (context["type"], context.get_op_type(), getattr(context.get_op(), "__name__", ""))
        return any(fnmatchcase(str(name), pattern) for name in names for pattern in self._types)

    def _has_module(self, context: amanda.OpContext) -> bool:
        return not self._modules or any(
            fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
            for path in map(_path, context.get_scopes())
            for pattern in self._modules
        )


def select(
    tool: ToolT,
    *,
    type: str | Sequence[str] = (),
    module: str | Sequence[str] = (),
    phase: Phase | None = None,
    start: int = 0,
    end: int | None = None,
    frequency: int = 1,
    steps: Steps | None = None,
) -> ToolT:
    """The tool itself, applied to these ops alone, at the steps of `range(start, end, frequency)`.

    type, module, phase: see `Selection`.  steps: what counts them; one of its own if None is given.
    Raises SelectionError and `amanda.tools.steps.WindowError`.
    """
    selection = Selection(type, module, phase)
    window = None
    if (start, end, frequency) != (0, None, 1):
        window = Window(steps or Steps(), start, end, frequency)
    selection.let(tool)
    if window is not None:
        window.let(tool)
    return tool


def _backward_alone(context: amanda.OpContext, type: amanda.ActionType, routine: Routine) -> Routine | None:
    return routine if type.is_backward else None


def _listed(name: str, value: str | Sequence[str]) -> list[str]:
    values = [value] if isinstance(value, str) else list(value)
    for one in values:
        if not isinstance(one, str) or not one:
            raise SelectionError(f"{name} has {one!r}; give names, or patterns with * and ?")
    return values


def _path(scope: str) -> str:
    """A path of modules or name scopes, with one way to separate them."""
    return scope.replace("/", ".")
