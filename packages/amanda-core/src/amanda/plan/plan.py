"""Plans: what the analysis of an op came to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from amanda.errors import ReplaceConflictError
from amanda.plan.action import Action, InstrumentationPoint, in_turn
from amanda.plan.runs import RecordedRuns, Runs

if TYPE_CHECKING:
    from amanda.plan.context import OpContext
    from amanda.plan.layer import Layer
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tools import AnyTool


Recorded = dict[tuple[InstrumentationPoint, int], tuple[Action, ...]]
"""Actions by the analysis routine that recorded them: its point, and its place in the layer's order there."""


Changes = dict[str, Any]
"""Values that analyses wrote into a context, by key; `DELETED` for a key that they deleted."""

DELETED = object()


class Actions:
    """The actions at one op, or at one backward op: before it, instead of it, after it."""

    __slots__ = ("after", "before", "replace")

    def __init__(self) -> None:
        self.before: Sequence[Action] = ()
        self.replace: Action | None = None
        self.after: Sequence[Action] = ()

    def add(self, actions: Iterable[Action]) -> None:
        """Sort actions into their places."""
        for action in actions:
            if action.type.is_replacement:
                self.replace = action
            elif action.type.is_after:
                self.after = (*self.after, action)
            else:
                self.before = (*self.before, action)

    @classmethod
    def of(cls, recorded: Recorded) -> Actions:
        """Return the actions that analysis routines recorded, in the order of the routines."""
        whole = cls()
        for key in sorted(recorded, key=lambda key: (key[0].is_after, key[1])):
            whole.add(recorded[key])
        return whole

    @classmethod
    def merged(cls, several: Sequence[Actions]) -> Actions:
        """Return the actions of several layers, the outermost first, in the order in which they run.

        Raises ReplaceConflictError when tools of nested scopes replace one op.
        """
        if len(several) == 1:
            return several[0].in_turn()
        whole = cls()
        whole.before = tuple(in_turn((action for one in several for action in one.before), False))
        whole.after = tuple(in_turn((action for one in several for action in one.after), True))
        whole.replace = only_replacement(one.replace for one in several)
        return whole

    def in_turn(self) -> Actions:
        """Return the same actions in the order in which they run; these themselves where they are in it."""
        if len(self.before) < 2 and len(self.after) < 2:
            return self
        ordered = Actions()
        ordered.before = tuple(in_turn(self.before, False))
        ordered.after = tuple(in_turn(self.after, True))
        ordered.replace = self.replace
        return ordered

    @property
    def inserted(self) -> tuple[Action, ...]:
        """Return the actions before and after the op, in order."""
        return (*self.before, *self.after)

    @property
    def all(self) -> tuple[Action, ...]:
        """Return all actions, in order."""
        return (*self.before, *([self.replace] if self.replace else []), *self.after)

    def __bool__(self) -> bool:
        return bool(self.before or self.replace or self.after)


class BackwardRecord:
    """Knowledge of the backward ops of a plan's op.

    actions: those of the plan's own layer, by the id of the backward op.
    partial: what each analysis routine has recorded, of backward ops that not all its tools have analysed.
    complete: needs of gradients for which every backward op has been analysed.
    quiet: needs of gradients for which no layer wants anything of them.
    steps: of all layers, in a driver's native form, by the driver's name for the place of a backward op.
    """

    __slots__ = ("actions", "complete", "partial", "quiet", "steps")

    def __init__(self) -> None:
        self.actions: dict[int, Actions] = {}
        self.partial: dict[int, Recorded] = {}
        self.reopen()

    def reopen(self) -> None:
        """Expect backward ops that have not been analysed."""
        self.complete: set[Hashable] = set()
        self.quiet: set[Hashable] = {None}
        self.steps: dict[Hashable, Any] = {}


_UNWATCHED = BackwardRecord()
"""Of plans without routines for backward ops; nothing is added to it."""


class Plan(Actions):
    """The actions at one op of the tools of a layer, and of the layers around it, laid out for execution.

    own: the actions of the layer's own tools.
    context: what their forward analyses put in; backward contexts start from it.
    watches: True if a layer has routines for backward ops.
    backward: what is known of the backward ops, if it `watches`.
    written: changes of the context by the layer's own tools after the op, and at backward ops: by the id of
    the backward op, if any, and the point.
    undone: what leads from the context back to how it was before the op.
    """

    __slots__ = (
        "_around",
        "_recomputation",
        "_recorded_runs",
        "_runs",
        "backward",
        "context",
        "layer",
        "own",
        "undone",
        "watches",
        "written",
    )

    def __init__(self, layer: Layer, context: OpContext, outer: Plan | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.context = context
        self.own = Actions()
        self._around: tuple[Plan, ...] = () if outer is None else outer.chain
        self._runs: Runs | None = None
        self._recorded_runs: RecordedRuns | None = None
        self._recomputation: Actions | None = None
        self.watches: bool = layer.wants_backward or (outer is not None and outer.watches)
        self.backward = BackwardRecord() if self.watches else _UNWATCHED
        self.written: dict[tuple[int | None, InstrumentationPoint], Changes] = {}
        self.undone: Changes = {}

    @property
    def around(self) -> tuple[Plan, ...]:
        """Return the plan of each layer around, the outermost first."""
        return self._around

    @property
    def chain(self) -> tuple[Plan, ...]:
        """Return the plan of each layer around, the outermost first, and this one."""
        return (*self._around, self)  # kept, it would be a circle, and the plan live until a collection

    @property
    def watching(self) -> list[Plan]:
        """Return the plans of the chain whose layers have routines for backward ops."""
        if not self._around:
            return [self] if self.watches else []
        return [plan for plan in self.chain if plan.layer.wants_backward]

    def lay_out(self) -> None:
        """Take over what the chain's tools have recorded so far."""
        whole = Actions.merged([plan.own for plan in self.chain]) if self._around else self.own.in_turn()
        self.before, self.replace, self.after = whole.before, whole.replace, whole.after
        self._recomputation = None

    def actions(self, recomputed: bool) -> Actions:
        """Return the actions at an execution.  recomputed: whether a framework runs it again."""
        if not recomputed:
            return self
        if self._recomputation is None:
            again = self._recomputation = Actions()
            for action in self.all:
                again.add(filter(None, [action.in_recomputation()]))
        return self._recomputation

    @property
    def gives_outputs(self) -> bool:
        """Return True if routines after the op are given values of it, which they may change."""
        return any(action.select != () for action in self.after)

    @property
    def takes_shapes(self) -> bool:
        """Return True if a routine before or after the op takes shapes."""
        return any(action.takes_shapes for action in self.inserted)

    def runs(self, ops: TensorOps, recorded: bool) -> Runs:
        """Return the dicts of the executions under way.

        recorded: whether executions may be recomputations, or be recomputed.
        """
        if recorded:
            if self._recorded_runs is None:
                self._recorded_runs = RecordedRuns(ops, self.context.get_op_id())
            return self._recorded_runs
        if self._runs is None:
            self._runs = Runs()
        return self._runs

    @property
    def takes_run(self) -> bool:
        """Return True if a routine takes `run`, also one of the backward ops that are known."""
        known = [one for plan in self.chain for one in (plan.own, *plan.backward.actions.values())]
        return any(action.takes_run for actions in known for action in actions.all)

    @property
    def hands_on_shapes(self) -> bool:
        """Return True if a routine at a backward op that is known takes shapes."""
        known = [one for plan in self.watching for one in plan.backward.actions.values()]
        return any(action.takes_shapes for actions in known for action in actions.all)

    def unanalysed(self, backward_id: int, tools: Sequence[AnyTool]) -> Sequence[AnyTool]:
        """Return those of some tools of the plan's layer that have not analysed a backward op."""
        recorded = self.backward.partial.get(backward_id)
        if recorded is None:
            return () if backward_id in self.backward.actions else tools
        done = [self.layer.routines[point][i].tool for point, i in list(recorded)]
        return [tool for tool in tools if not any(tool is one for one in done)]

    def is_known(self, backward_id: int) -> bool:
        """Return True if all tools of the plan's layer have analysed a backward op."""
        return backward_id in self.backward.actions and backward_id not in self.backward.partial

    def is_complete(self, gradients: Hashable) -> bool:
        """Return True if every backward op of executions with this need of gradients has been analysed."""
        return all(gradients in plan.backward.complete for plan in self.watching)

    def wants_backward(self, gradients: Hashable) -> bool:
        """Return True if the backward ops of an execution are wanted.

        gradients: which inputs need a gradient; None where autodiff records nothing.
        """
        if not self.watches or gradients in self.backward.quiet:
            return False
        wanted = any(
            gradients not in plan.backward.complete or any(plan.backward.actions.values())
            for plan in self.watching
        )
        if not wanted:
            self.backward.quiet.add(gradients)
        return wanted


def only_replacement(replacements: Iterable[Action | None]) -> Action | None:
    """Return the one replacement among these, if any.

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
