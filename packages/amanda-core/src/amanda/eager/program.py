"""Plans as programs of the native interceptor, which runs routines without Python in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.eager.trace import Trace
from amanda.plan.arguments import arguments, refused
from amanda.plan.notes import add_note, describe
from amanda.plan.routine import mutation
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.eager.call import Call, EagerOps
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.plan import Actions, Plan
    from amanda.plan.runs import Routine, Runs
    from amanda.scope.state import State


def learn(ops: EagerOps, memo: interceptor.Memo, key: int, plan: Plan, call: Call, state: State) -> None:
    """Teach native code what calls like this one come to, if it can do that.

    key: under which the memo learns of them.  state: of calls that have this key.
    """
    gradients = ops.gradients(call.inputs)
    traced = plan.watches and plan.wants_backward(gradients)
    actions = plan.actions(state.recall is not None)
    if not (actions or traced):
        memo.learn(key, None)
        return
    facts = plan.chain[0].context._facts
    runs = plan.runs(ops, state.is_recorded)
    trace = _tracer(ops, memo, plan, actions, runs, call, gradients, facts) if traced else None
    if traced and trace is None:
        return
    refuse = None
    if call.targets and gradients is not None and plan.gives_outputs:
        if call.targets != (0,) or not ops.is_tensor(call.inputs[0]):
            return
        refuse = ops.saves_out_of_reach
    program = _program_of(ops, plan, actions, runs, call, facts, trace, refuse)
    if program is not None:
        memo.learn(key, program)


def _tracer(
    ops: EagerOps,
    memo: interceptor.Memo,
    plan: Plan,
    actions: Actions,
    runs: Runs,
    call: Call,
    gradients: Hashable,
    facts: OpFacts,
) -> Callable[[int, int, int, Any, list[Any]], None] | None:
    """Leaves the traces of executions; None where it takes more."""
    written = call.targets and (call.targets != (0,) or isinstance(call.inputs[0], (list, tuple)))
    if written or any(action.differentiable for action in plan.inserted):
        return None
    if plan.is_complete(gradients) and not plan.takes_run:
        settled = Trace(facts.op_id, gradients, plan, {})
        settled.keep(ops, facts, [], [])
        leaving: Callable[..., None] = ops.leaving(settled, bool(call.targets))
        return leaving

    mutable = tuple(call.mutable)

    def leave_trace(begin: int, start: int, end: int, outputs: Any, inputs: list[Any]) -> None:
        run = runs.handed_on(actions.before, actions.after)
        trace = Trace(facts.op_id, gradients, plan, run)
        values = ops.flatten(outputs)[0]
        trace.shapes = (ops.shapes(inputs), ops.shapes(values))
        trace.keep(ops, facts, inputs, values)
        if plan.is_complete(gradients) and not plan.takes_run:
            memo.forget()  # less is left to do
        made = ops.made_between(begin, start, end)
        ops.attach_trace(trace, made, [*values, *(inputs[i] for i in mutable)])

    return leave_trace


def _program_of(
    ops: EagerOps,
    plan: Plan,
    actions: Actions,
    runs: Runs,
    call: Call,
    facts: OpFacts,
    trace: Callable[..., None] | None,
    refuse: Callable[[Any], bool] | None,
) -> interceptor.Program | None:
    """Return what native code shall do at calls like this one; None where it cannot.

    trace: hears of the backward ops that the op made, if they are wanted.
    refuse: whether a call with this first argument is for Python, if that differs among calls like these.

    Native code hands values to routines and sees that they are left alone. Tensors that they return take the
    place of others like them; a routine that returns anything else is where Python goes on.
    """
    sources = call.sources()
    if sources is None:
        return None
    if call.mutable and any(action.differentiable for action in plan.inserted):
        return None
    substitutes = call.takes_equals()
    replace = None
    if actions.replace is not None:
        replace = _replacement(ops, actions.replace, call) if substitutes and trace is None else None
        if replace is None:
            return None
    constants = tuple(
        value if source == -1 else None for value, source in zip(call.inputs, sources, strict=True)
    )
    routines = runs.routines(ops, actions.before, actions.after, trace is not None)
    return _program(
        actions.before, actions.after, facts, sources, constants, plan, trace, refuse, replace, substitutes,
        trace is not None and plan.hands_on_shapes, routines=routines, replaced_by=actions.replace,
    )  # fmt: skip


def program_on_values(actions: Sequence[Action], facts: OpFacts) -> interceptor.Program | None:
    """The same for routines on values that are there already, such as gradients; none takes `run`."""
    return _program(actions, (), facts)


def _program(
    before: Sequence[Action],
    after: Sequence[Action],
    facts: OpFacts,
    *form: Any,
    routines: Mapping[Action, Routine] = MappingProxyType({}),
    replaced_by: Action | None = None,
) -> interceptor.Program | None:
    told = _FailureNotes((*before, *after, *([] if replaced_by is None else [replaced_by])), facts)
    steps = [tuple(_step(one, routines.get(one, one.func)) for one in actions) for actions in (before, after)]
    try:
        return interceptor.Program(*steps, told, *form)
    except ValueError:  # more values than native code has room for
        return None


def _replacement(ops: EagerOps, action: Action, call: Call) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
    """Return the step that runs instead of the op, and the names of its last inputs.

    None where Python has to run the replacement.
    """
    if action.takes_run or action.takes_original or action.reads:
        return None
    inputs = call.inputs
    positions, named = list(action.select or ()), dict[str, int]()
    if action.select is None:

        def holds_tensors(position: int) -> bool:
            return any(map(ops.is_tensor, spread([inputs[position]])))

        positions, named = arguments(action.parameters, range(len(inputs)), call.names, holds_tensors)
    elif any(position >= len(inputs) for position in positions):
        return None
    given, kwargs = [inputs[i] for i in positions], {name: inputs[i] for name, i in named.items()}
    if named.keys() & action.kwargs.keys() or refused(action, inputs, call.names, given, kwargs) is not None:
        return None
    step = action.func, (*positions, *named.values()), dict(action.kwargs), action.tool._amanda.lock, False
    return step, tuple(named)


def _step(action: Action, routine: Routine) -> tuple[Any, ...]:
    lock, isolated = action.tool._amanda.lock, not action.differentiable
    return routine, action.select, dict(action.kwargs), lock, isolated, action.takes_shapes


class _FailureNotes:
    """Says in Python what went wrong in native code."""

    __slots__ = ("_actions", "_facts")

    def __init__(self, actions: Sequence[Action], facts: OpFacts) -> None:
        self._actions = actions
        self._facts = facts

    def failed(self, step: int, error: BaseException) -> None:
        """Note on a routine's exception where it comes from."""
        action = self._actions[step]
        add_note(error, describe(self._facts, action.tool, str(action)))

    def mutated(self, step: int, index: int) -> None:
        """Raise for a routine that wrote into a value that it was given."""
        raise mutation(self._actions[step], index)
