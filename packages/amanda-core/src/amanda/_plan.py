"""Layers and plans: what the analysis of an op came to, kept until tool, model or parameter dies."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from amanda import _plugins, interceptor
from amanda._notes import add_note, explained
from amanda._order import routines_at
from amanda._source import codes
from amanda.action import Action, InstrumentationPoint, in_turn
from amanda.context import OpContext
from amanda.errors import ReplaceConflictError

if TYPE_CHECKING:
    from amanda._backward import SettledStep
    from amanda._routine import TensorOps
    from amanda.tool import Analysis, Tool

LAYERS_PER_TOOL = 16


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


class Layer:
    """The tools of one scope, in order, above the layers of the scopes around it.

    by_extents, by_callables: whether the guards ask for shapes, and more than that, of what an op is given.
    twice: whether gradients have been differentiated in turn, so that backward ops have backward ops.
    rewrites: what a driver keeps of graphs rewritten for this layer, by the graph.
    """

    def __init__(self, tools: Sequence[Tool], parent: Layer | None) -> None:
        self.tools = tuple(tools)
        self.chain: tuple[Layer, ...] = (*(parent.chain if parent else ()), self)
        applied = [tool for layer in self.chain for tool in layer.tools]
        self.applied = tuple(applied)
        self.routines = {point: routines_at(point, self.tools, applied) for point in InstrumentationPoint}
        self.guards: list[Analysis] = [*(parent.guards if parent else ())]
        for routines in self.routines.values():
            self.guards += [one for one in routines if one.guard is not None]
        self.by_extents = any(one.guard == "shape" for one in self.guards)
        self.by_callables = any(callable(one.guard) for one in self.guards)
        self.wants_backward = any(self.routines[point] for point in self.routines if point.is_backward)
        self.twice = False
        self.plans: dict[int, dict[Hashable, Plan]] = {}
        self.table = interceptor.PlanTable()
        self.rewrites: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        _mortality.layers.add(self)

    def analyse(self, context: OpContext, point: InstrumentationPoint) -> None:
        """Run this layer's analysis routines of a point on a context."""
        for routine in self.routines[point]:
            context._tool = routine.tool
            with explained(context._facts, routine.tool, point.value), routine.tool._amanda.lock:
                if all(admits(context) for admits in routine.tool._amanda.admissions):
                    routine.callback(context)
        _plugins.plugin_manager().hook.amanda_op_analysed(context=context)

    def key(self, ops: TensorOps, inputs: Sequence[Any]) -> Hashable:
        """What a plan is made for: the signature of the op's inputs, and what the guards answer."""
        if not self.guards:
            return ops.signature(inputs)
        answers: list[Hashable] = [ops.signature(inputs)]
        for tool, _, _, guard, _ in self.guards:
            try:
                answers.append(guard(list(inputs)) if callable(guard) else ops.shapes(inputs))
            except BaseException as error:
                add_note(error, f"[amanda] tool {type(tool).__name__}, guard {guard}")
                raise
        return tuple(answers)

    def differentiate_twice(self) -> bool:
        """Hear that backward ops will have backward ops; whether that was not reckoned with before."""
        if self.twice:
            return False
        settled = False
        for layer in self.chain:
            layer.twice = True
            for plan in [plan for plans in layer.plans.values() for plan in plans.values()]:
                settled = settled or bool(plan.settled)
                plan.settled.clear()
        if settled:
            self.table.clear()
        return settled

    def relearn(self, op_id: int) -> None:
        """Hear that more is left to do at an op than native code has learned."""
        known = self.table.get(op_id)
        if isinstance(known, interceptor.Memo):
            known.forget()

    def forget(self, op_id: int) -> None:
        """Drop every plan of an op."""
        self.plans.pop(op_id, None)
        self.table.discard(op_id)


def layer_of(tools: Sequence[Tool], parent: Layer | None) -> Layer:
    """The layer of these tools above `parent`, with the plans of earlier scopes like it.

    It lives with the tool that comes last, which is the one that depends on the others.
    """
    chain = parent.chain if parent else ()
    key = tuple(
        tuple((tool._amanda.number, tool._amanda.version) for tool in group)
        for group in (*(layer.tools for layer in chain), tuple(tools))
    )
    layers = tools[-1]._amanda.layers if tools else {}
    if key not in layers:
        layers[key] = Layer(tools, parent)
    layer: Layer = layers[key]
    if tools:
        tools[-1]._amanda.layers.move_to_end(key)
        while len(layers) > LAYERS_PER_TOOL:
            tools[-1]._amanda.layers.popitem(last=False)
    return layer


class _Mortality:
    """Which op ids die with which module instance or parameter."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        self.ops: dict[int, set[int]] = {}
        self.subjects: dict[int, set[int]] = {}  # the same by op id, so that the living let go of the dead's

    def bind(self, op_id: int, subjects: Iterable[Any]) -> None:
        """Let plans under an op id die with any of the subjects."""
        for subject in subjects:
            ordinal = interceptor.ordinal(subject)
            self.ops.setdefault(ordinal, set()).add(op_id)
            self.subjects.setdefault(op_id, set()).add(ordinal)

    def forget_all(self, tool: Tool) -> None:
        """Forget every plan that a tool has a part in."""
        for layer in list(self.layers):
            if any(one is tool for one in layer.applied):
                layer.plans.clear()
                layer.rewrites.clear()
                layer.table.clear()

    def forget_ops(self, tool: Tool, op_ids: Iterable[int]) -> None:
        """Forget the plans of some ops that a tool has a part in, and the graphs made for its layers."""
        gone = tuple(op_ids)
        for layer in list(self.layers):
            if any(one is tool for one in layer.applied):
                layer.rewrites.clear()
                for op_id in gone:
                    layer.forget(op_id)

    def on_death(self, ordinal: int) -> None:
        """Forget the plans that belonged to an object that died."""
        for op_id in self.ops.pop(ordinal, ()):
            for other in self.subjects.pop(op_id, ()):
                if other in self.ops:
                    self.ops[other].discard(op_id)
            for layer in list(self.layers):
                layer.forget(op_id)


_mortality = _Mortality()
bind_to_subjects = _mortality.bind
"""`bind_to_subjects(op_id, subjects)`: let what is known of an op die with any of the subjects."""
forget_all = _mortality.forget_all
forget_ops = _mortality.forget_ops
interceptor.configure(codes.describe, _mortality.on_death)


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
