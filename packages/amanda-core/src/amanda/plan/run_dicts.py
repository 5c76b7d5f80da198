"""The dicts `run` of executions, also of executions that a framework may recompute."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.plan.routine import match_results
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.tensors import TensorOps

Routine = Callable[..., Any]


class RunDicts:
    """The dict `run` of the execution under way in each thread, for the routines at one op that take `run`.

    Native code does not pass the dict; the routines that it calls take their thread's dict from here.
    The first routine that takes the dict creates it, the last routine drops it.  An op never executes within
    itself, since ops within it have other ids, so one dict a thread is enough.  An execution that raised
    leaves its dict behind; the next execution replaces the dict.
    """

    __slots__ = ("_dict_by_thread",)

    def __init__(self) -> None:
        # By thread: a plan is shared by all threads, and each has an execution of its own.
        self._dict_by_thread: dict[int, dict[str, Any]] = {}

    def new_dict(self) -> dict[str, Any]:
        """Create the dict of an execution."""
        return {}

    def begin(self) -> dict[str, Any]:
        """Create and store the dict of an execution that native code runs."""
        run = self._dict_by_thread[get_ident()] = self.new_dict()
        return run

    def end(self) -> dict[str, Any]:
        """Remove and return this thread's dict, which native code no longer needs; {} where there is none."""
        return self._dict_by_thread.pop(get_ident(), {})

    def dict_for_python(
        self, called_natively: Sequence[Action], shared_with_backward: bool = False
    ) -> dict[str, Any]:
        """Return the dict of an execution that goes on in Python: a new one, or that of native code.

        The dict of native code is removed here: Python holds it from now on.
        called_natively: the actions whose routines native code has called.
        shared_with_backward: whether native code may have passed the dict to backward ops.
        """
        was_begun = any(action.takes_run for action in called_natively)
        run = self._dict_by_thread.pop(get_ident(), None) if was_begun or shared_with_backward else None
        if run is not None:
            return run
        # If a routine was called and no dict is there, native code has dropped it after the last routine.
        return {} if was_begun else self.new_dict()

    def routines_for_native_code(
        self, ops: TensorOps, before: Sequence[Action], after: Sequence[Action], shared_with_backward: bool
    ) -> dict[Action, Routine]:
        """Return, for the actions that take `run`, routines that native code calls without `run`.

        The first of them begins the dict, the last ends it.
        shared_with_backward: whether the dict is passed to backward ops once the op has run, before the
        routines after it.
        """
        # None stands for backward ops, which begin or end the dict if they are the first or last user.
        users: list[Action | None] = [action for action in before if action.takes_run]
        users += [None] if shared_with_backward else []
        users += [action for action in after if action.takes_run]
        last_index = len(users) - 1
        routine_by_action = {}
        for i, action in enumerate(users):
            if action is not None:
                take_dict = self.begin if i == 0 else self._dict_of_thread
                drop_dict = self.end if i == last_index else None
                routine_by_action[action] = _with_run_dict(ops, action, take_dict, drop_dict)
        return routine_by_action

    def source_for_backward(
        self, before: Sequence[Action], after: Sequence[Action]
    ) -> Callable[[], dict[str, Any]]:
        """Return a function for the dict of the backward ops, to be called when native code has run the op.

        It creates the dict if no routine before the op takes it, and drops it if none after the op does.
        """
        was_begun = any(action.takes_run for action in before)
        is_needed_later = any(action.takes_run for action in after)
        if was_begun:
            return self._dict_of_thread if is_needed_later else self.end
        return self.begin if is_needed_later else self.new_dict

    def _dict_of_thread(self) -> dict[str, Any]:
        """Return this thread's dict; begin one where there is none."""
        run = self._dict_by_thread.get(get_ident())
        # Where the op created no node of autograd, the function of `source_for_backward` was not called.
        return self.begin() if run is None else run


class RecordedRunDicts(RunDicts):
    """Dicts of executions that a framework may recompute, or that are recomputations, as the state says."""

    __slots__ = ("_op_id", "_ops")

    def __init__(self, ops: TensorOps, op_id: int) -> None:
        super().__init__()
        self._ops = ops
        self._op_id = op_id

    def new_dict(self) -> dict[str, Any]:
        """Return the dict of an execution: in a recomputation what the first execution has left in it.

        Adds the execution to the records of the checkpoints under way.
        """
        # Read at each execution: one plan serves executions inside and outside of checkpoints.
        state = interceptor.ACTIVATION.get().state
        executions = state.recomputed_executions
        run: dict[str, Any] = {} if executions is None else executions.next_dict(self._op_id)
        if state.checkpoint_records:
            execution = _RecordedExecution(self._ops, run)
            # Checkpoints may be nested, and each of them may be computed again by itself.
            for record in state.checkpoint_records:
                record.add(self._op_id, execution)
        return run


class _RecordedExecution:
    """One execution, with what its routines have left in `run`."""

    __slots__ = ("ops", "run")

    def __init__(self, ops: TensorOps, run: dict[str, Any]) -> None:
        self.ops = ops
        self.run = run

    def drop_tensors(self) -> None:
        """Drop the tensors in `run`: a checkpoint exists to save their memory."""
        is_tensor = self.ops.is_tensor
        self.run = {key: value for key, value in self.run.items() if not any(map(is_tensor, spread([value])))}


class RunRecord:
    """The `run` dicts of the executions inside a checkpoint, by op and in order, for its recomputation."""

    __slots__ = ("_executions",)

    def __init__(self) -> None:
        self._executions: dict[int, list[_RecordedExecution]] = {}

    def add(self, op_id: int, execution: _RecordedExecution) -> None:
        """Add an execution at its start."""
        self._executions.setdefault(op_id, []).append(execution)

    def drop_tensors(self) -> None:
        """Drop the tensors in the dicts; call at the end of the checkpointed function."""
        for executions in self._executions.values():
            for execution in executions:
                execution.drop_tensors()

    def recomputed_executions(self) -> RecomputedExecutions:
        """Return the executions in the order in which a recomputation repeats them."""
        return RecomputedExecutions(self._executions)


class RecomputedExecutions:
    """The recorded executions of each op, handed out in order as a recomputation repeats them."""

    __slots__ = ("_counts", "_executions")

    def __init__(self, executions: Mapping[int, Sequence[_RecordedExecution]]) -> None:
        self._executions = executions
        self._counts: dict[int, int] = {}  # of executions so far, by op

    def next_dict(self, op_id: int) -> dict[str, Any]:
        """Return a copy of `run` of the op's next execution; {} where the op did not execute before."""
        # A recomputation runs the ops of the checkpoint in the same order, so the count says which execution
        # it is.
        number = self._counts.get(op_id, 0)
        self._counts[op_id] = number + 1
        executions = self._executions.get(op_id, ())
        # A copy, since a checkpoint may be recomputed more than once.
        return dict(executions[number].run) if number < len(executions) else {}


def _with_run_dict(
    ops: TensorOps,
    action: Action,
    take_dict: Callable[[], dict[str, Any]],
    drop_dict: Callable[[], Any] | None,
) -> Routine:
    """Return a function of the values alone that calls an action's routine with the dict `run`.

    An isolated routine gets values without their graph, which the dict could keep.
    take_dict: returns the thread's dict.  drop_dict: called after the routine; None where routines follow.
    """
    func, isolated = action.func, not action.differentiable

    def routine(*values: Any, **kwargs: Any) -> Any:
        """Call the action's routine with `run`; return its result, with originals of values handed back."""
        run = take_dict()
        arguments = [ops.detach_value(value) for value in values] if isolated else values
        result = func(*arguments, run=run, **kwargs)
        if drop_dict is not None:
            drop_dict()
        if not isolated or result is None:
            return result
        # The routine received detached values: what it hands back unchanged has to be the original, with its
        # graph.
        value_by_id = {id(argument): value for argument, value in zip(arguments, values, strict=True)}
        return [value_by_id.get(id(item), item) for item in match_results(action, result, values) or ()]

    return routine
