"""Native programs of plans: the interceptor's C code runs them without Python between the routines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.eager.trace import Trace
from amanda.plan.action import replacement_arguments, signature_error
from amanda.plan.facts import add_note, error_note
from amanda.plan.routine import mutation_error
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.eager.call import Call, EagerOps
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.plan import Actions, Plan
    from amanda.plan.run_dicts import Routine, RunDicts
    from amanda.scope.state import State


# In `Call.argument_indices`: the input is a default of the signature, not an argument.
_DEFAULT = -1


def cache_program(
    ops: EagerOps, call_cache: interceptor.CallCache, key: int, plan: Plan, call: Call, state: State
) -> None:
    """Store a native program for calls of this form, if native code can execute the plan.

    Stores None where calls of this form have no work, and nothing where Python has to execute the plan.
    key: the call_cache's key of the form.  state: state of a thread; part of the key.
    """
    needs_grad = ops.needs_grad(call.inputs)
    wants_backward = plan.has_backward_routines and plan.wants_backward(needs_grad)
    actions = plan.actions(state.recomputed_executions is not None)
    if not actions and not (wants_backward and call.has_derivative()):
        # Calls of this form have no work, though the op has a plan: native code runs the op itself.
        call_cache.learn(key, None)
        return
    if not ops.may_run_natively:
        return
    # Plans of the chain are of one op: any has its facts.
    facts = plan.chain[0].context._facts
    run_dicts = plan.run_dicts(ops, state.may_recompute)
    leave_trace = None
    if wants_backward:
        leave_trace = _trace_recorder(ops, call_cache, plan, actions, run_dicts, call, needs_grad, facts)
        if leave_trace is None:
            return
    refuses_argument = None
    # An in-place op or `out=` whose outputs routines may replace.
    if call.target_positions and needs_grad is not None and plan.has_output_routines:
        writes_first_input_alone = call.target_positions == (0,)
        if not writes_first_input_alone or not ops.is_tensor(call.inputs[0]):
            return
        # The op's own backward may have saved the tensor that a routine then writes into; where the driver
        # cannot replace the saved tensor by a copy, Python runs the call.
        refuses_argument = ops.may_hide_saved_tensors
    program = _build_program(ops, plan, actions, run_dicts, call, facts, leave_trace, refuses_argument)
    if program is not None:
        call_cache.learn(key, program)


def _trace_recorder(
    ops: EagerOps,
    call_cache: interceptor.CallCache,
    plan: Plan,
    actions: Actions,
    run_dicts: RunDicts,
    call: Call,
    needs_grad: Hashable,
    facts: OpFacts,
) -> Callable[[int, int, int, Any, list[Any]], None] | None:
    """Return a function that attaches the traces of native executions; None where only Python can.

    Once all backward ops are analysed and no routine takes `run`, executions share one trace, which native
    code attaches without Python.
    """
    # Native code handles one written tensor, the first input.
    writes_other_tensors = call.target_positions and (
        call.target_positions != (0,) or isinstance(call.inputs[0], (list, tuple))
    )
    if writes_other_tensors or any(action.differentiable for action in plan.inserted):
        return None
    backward_facts = facts.for_backward_op(None, 0, True)
    backward_facts.drop_values()
    if plan.is_backward_complete(needs_grad) and not plan.takes_run:
        shared_trace = Trace(facts.op_id, needs_grad, plan, run={})
        shared_trace.store_facts(ops, backward_facts, inputs=[], outputs=[])  # no analysis reads values
        attach_shared_trace: Callable[..., None] = ops.native_trace_marker(
            shared_trace, writes_input=bool(call.target_positions)
        )
        return attach_shared_trace

    # Taken out of the call, which the function below would keep alive with its tensors.
    written_positions = tuple(call.written_positions)
    positions_if_none_returned = tuple(call.unreturned_positions(None))
    take_run_dict = run_dicts.source_for_backward(actions.before, actions.after)

    def leave_trace(begin: int, start: int, end: int, outputs: Any, inputs: list[Any]) -> None:
        """Attach a trace of its own to an execution; begin, start, end: see `EagerOps.backward_ops_between`.

        Drops the op's programs where executions may share one trace from now on.
        """
        trace = Trace(facts.op_id, needs_grad, plan, take_run_dict())
        returned_values, _ = ops.flatten(outputs)
        values = returned_values or [inputs[i] for i in positions_if_none_returned]
        trace.shapes = (ops.shapes(inputs), ops.shapes(values))
        trace.store_facts(ops, backward_facts, inputs, values)
        if plan.is_backward_complete(needs_grad) and not plan.takes_run:
            # The program that called this function was built for incomplete analyses; build a faster one.
            call_cache.forget()
        nodes = ops.backward_ops_between(begin, start, end)
        ops.attach_trace(trace, nodes, [*values, *(inputs[i] for i in written_positions)])

    return leave_trace


def _build_program(
    ops: EagerOps,
    plan: Plan,
    actions: Actions,
    run_dicts: RunDicts,
    call: Call,
    facts: OpFacts,
    leave_trace: Callable[..., None] | None,
    refuses_argument: Callable[[Any], bool] | None,
) -> interceptor.Program | None:
    """Return the native program for calls of this form; None where Python has to execute the plan.

    leave_trace: called with the clock readings around the op, if backward ops have to be traced.
    refuses_argument: returns True for a first argument with which Python has to run the call; None if native
    code can run all calls.

    Native code calls the routines and checks that they did not modify their arguments. A returned tensor of
    the same dtype, shape and device replaces the original; after any other result Python continues.
    """
    argument_indices = call.argument_indices()
    if argument_indices is None:
        return None
    # Such a routine receives copies of the tensors that the op writes, which Python makes.
    if call.written_positions and any(action.differentiable for action in plan.inserted):
        return None
    # Native code passes either returned or written tensors to routines as outputs, not both.
    any_result_but_none = ...
    if call.unreturned_positions(any_result_but_none):
        return None
    accepts_equal_inputs = call.accepts_equal_inputs()
    replacement = None
    if actions.replace is not None:
        if not accepts_equal_inputs or leave_trace is not None:
            return None
        replacement = _replacement_step(ops, actions.replace, call)
        if replacement is None:
            return None
    # Defaults of the signature: a call of this form does not pass them, so native code takes them from here.
    defaults = tuple(
        value if index == _DEFAULT else None
        for value, index in zip(call.inputs, argument_indices, strict=True)
    )
    is_traced = leave_trace is not None
    routine_by_action = run_dicts.routines_for_native_code(ops, actions.before, actions.after, is_traced)
    return _program_of_routines(
        actions.before, actions.after, lambda: facts, argument_indices, defaults, plan, leave_trace,
        refuses_argument, replacement, accepts_equal_inputs, is_traced and plan.backward_takes_shapes,
        tuple(call.unreturned_positions(None)), routine_by_action=routine_by_action,
        replacement_action=actions.replace,
    )  # fmt: skip


def program_on_values(
    actions: Sequence[Action], find_facts: Callable[[], OpFacts]
) -> interceptor.Program | None:
    """Return a native program for routines without an op, such as routines on gradients; none takes `run`.

    find_facts: returns the op's facts, for errors.
    """
    return _program_of_routines(actions, (), find_facts)


def _program_of_routines(
    before: Sequence[Action],
    after: Sequence[Action],
    find_facts: Callable[[], OpFacts],
    *arguments_of_op: Any,
    routine_by_action: Mapping[Action, Routine] = MappingProxyType({}),
    replacement_action: Action | None = None,
) -> interceptor.Program | None:
    """Return a native program; None where its routines take more values than native code can hold.

    find_facts: returns the op's facts, for errors.
    arguments_of_op: further arguments of `interceptor.Program`, in its order, for programs with an op.
    routine_by_action: functions to call instead of an action's own.  replacement_action: runs instead of the
    op; its step is among `arguments_of_op`.
    """
    # Native code reports errors by the index of a step; the replacement is the last.
    replacement_actions = [] if replacement_action is None else [replacement_action]
    reporter = _ErrorReporter((*before, *after, *replacement_actions), find_facts)

    def steps(actions: Sequence[Action]) -> tuple[tuple[Any, ...], ...]:
        return tuple(_routine_step(action, routine_by_action.get(action, action.func)) for action in actions)

    try:
        return interceptor.Program(steps(before), steps(after), reporter, *arguments_of_op)
    except ValueError:  # more values than the fixed arrays of native code hold
        return None


def _replacement_step(
    ops: EagerOps, action: Action, call: Call
) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
    """Return the step that runs instead of the op, and the names of the inputs that it takes by keyword.

    None where Python has to run the replacement, also to raise the error of arguments that do not fit.
    """
    if action.takes_run or action.takes_original or action.reads:
        return None
    inputs = call.inputs
    if action.select is None:

        def holds_tensors(position: int) -> bool:
            return any(map(ops.is_tensor, spread([inputs[position]])))

        # Positions stand for the inputs: native code takes the values of each call from there.
        positions, position_by_name = replacement_arguments(
            action.parameters, range(len(inputs)), call.names, holds_tensors
        )
    elif any(position >= len(inputs) for position in action.select):
        return None
    else:
        positions, position_by_name = list(action.select), {}
    arguments = [inputs[position] for position in positions]
    kwargs = {name: inputs[position] for name, position in position_by_name.items()}
    # A call that would raise is left to Python, whose error lists the op's values.
    if (
        position_by_name.keys() & action.kwargs.keys()
        or signature_error(action, inputs, call.names, arguments, kwargs) is not None
    ):
        return None
    isolated = False  # a replacement takes part in autodiff
    selected_positions = (*positions, *position_by_name.values())
    step = action.func, selected_positions, dict(action.kwargs), action.tool._amanda.lock, isolated
    return step, tuple(position_by_name)


def _routine_step(action: Action, routine: Routine) -> tuple[Any, ...]:
    """Return a routine in the form that `interceptor.Program` takes."""
    lock, isolated = action.tool._amanda.lock, not action.differentiable
    return routine, action.select, dict(action.kwargs), lock, isolated, action.takes_shapes


class _ErrorReporter:
    """Raises and annotates errors of routines in native code, which calls these methods by name."""

    __slots__ = ("_actions", "_find_facts")

    def __init__(self, actions: Sequence[Action], find_facts: Callable[[], OpFacts]) -> None:
        self._actions = actions
        self._find_facts = find_facts

    def failed(self, step: int, error: BaseException) -> None:
        """Add a note to a routine's exception with the op and the tool."""
        action = self._actions[step]
        add_note(error, error_note(self._find_facts(), action.tool, str(action)))

    def mutated(self, step: int, index: int) -> None:
        """Raise MutationError for a routine that wrote into an argument."""
        raise mutation_error(self._actions[step], index)
