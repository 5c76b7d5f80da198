"""The dicts `run` of executions, also of those that a framework may run again."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.plan.results import matched
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.tensors import TensorOps

Routine = Callable[..., Any]


class Runs:
    """The dict of the execution under way in each thread, for the routines at one op that take `run`.

    The first that needs the dict begins it, the last ends it.  No op executes within itself, since the ops
    within it have other places; an execution that raised leaves its dict to the next one, which begins anew.
    """

    __slots__ = ("_present",)

    def __init__(self) -> None:
        self._present: dict[int, dict[str, Any]] = {}

    def fresh(self) -> dict[str, Any]:
        """Return the dict of an execution that begins in Python."""
        return {}

    def begin(self) -> dict[str, Any]:
        """Return the dict of an execution that begins in native code."""
        run = self._present[get_ident()] = self.fresh()
        return run

    def end(self) -> dict[str, Any]:
        """Return the dict of the execution under way, which native code needs no more."""
        return self._present.pop(get_ident(), {})

    def resumed(self, called: Sequence[Action], traced: bool = False) -> dict[str, Any]:
        """Return the dict for Python, which goes on after native code has called some routines.

        traced: whether native code may have handed the dict on to backward ops.
        """
        begun = any(action.takes_run for action in called)
        run = self._present.pop(get_ident(), None) if begun or traced else None
        if run is not None:
            return run
        return {} if begun else self.fresh()  # native code has ended what the last routine began

    def routines(
        self, ops: TensorOps, before: Sequence[Action], after: Sequence[Action], traced: bool
    ) -> dict[Action, Routine]:
        """Return the routines of actions that take `run` as native code calls them: without it.

        traced: whether the dict is handed on as the op has run, ahead of the routines after it.
        """
        earlier, later = ([one for one in side if one.takes_run] for side in (before, after))
        stages = [*earlier, *([None] if traced else []), *later]
        last = len(stages) - 1
        return {
            action: _given(ops, action, self._of_thread if i else self.begin, self.end if i == last else None)
            for i, action in enumerate(stages)
            if action is not None
        }

    def handed_on(self, before: Sequence[Action], after: Sequence[Action]) -> dict[str, Any]:
        """Return the dict as the op has run, for its backward ops."""
        later = any(one.takes_run for one in after)
        if not any(one.takes_run for one in before):
            return self.begin() if later else self.fresh()
        return self._of_thread() if later else self.end()

    def _of_thread(self) -> dict[str, Any]:
        run = self._present.get(get_ident())
        return self.begin() if run is None else run  # an op that made no node has handed nothing on


class RecordedRuns(Runs):
    """The same for executions that may be recomputations, or be recomputed, as the state says."""

    __slots__ = ("_op_id", "_ops")

    def __init__(self, ops: TensorOps, op_id: int) -> None:
        super().__init__()
        self._ops = ops
        self._op_id = op_id

    def fresh(self) -> dict[str, Any]:
        """Return the dict of an execution: in a recomputation what the first execution has left in it."""
        state = interceptor.ACTIVATION.get().state
        run: dict[str, Any] = {} if state.recall is None else state.recall.take(self._op_id)
        if state.records:
            execution = _Execution(self._ops, run)
            for record in state.records:
                record.add(self._op_id, execution)
        return run


class _Execution:
    """One execution, with what its routines have left in `run`."""

    __slots__ = ("ops", "run")

    def __init__(self, ops: TensorOps, run: dict[str, Any]) -> None:
        self.ops = ops
        self.run = run

    def drop_tensors(self) -> None:
        """Drop the tensors in `run`: a checkpoint exists to save their memory."""
        is_tensor = self.ops.is_tensor
        self.run = {key: one for key, one in self.run.items() if not any(map(is_tensor, spread([one])))}


class RunRecord:
    """The `run` dicts of the executions inside a checkpoint, by op and in order, for its recomputation."""

    __slots__ = ("_executions",)

    def __init__(self) -> None:
        self._executions: dict[int, list[_Execution]] = {}

    def add(self, op_id: int, execution: _Execution) -> None:
        """Add an execution that begins."""
        self._executions.setdefault(op_id, []).append(execution)

    def close(self) -> None:
        """Drop the tensors, as that part of the program has run."""
        for executions in self._executions.values():
            for execution in executions:
                execution.drop_tensors()

    def recall(self) -> Recall:
        """Return what a recomputation takes the executions from."""
        return Recall(self._executions)


class Recall:
    """The executions of a record, as a recomputation comes to them."""

    __slots__ = ("_executions", "_next")

    def __init__(self, executions: Mapping[int, Sequence[_Execution]]) -> None:
        self._executions = executions
        self._next: dict[int, int] = {}

    def take(self, op_id: int) -> dict[str, Any]:
        """Return what the op's next execution left in `run`; {} of one that did not run before."""
        number = self._next.get(op_id, 0)
        self._next[op_id] = number + 1
        executions = self._executions.get(op_id, ())
        return dict(executions[number].run) if number < len(executions) else {}


def _given(
    ops: TensorOps, action: Action, present: Callable[[], dict[str, Any]], end: Callable[[], Any] | None
) -> Routine:
    """Return a routine that is given the dict, and no graph that the dict could keep alive."""
    func, isolated = action.func, not action.differentiable

    def routine(*values: Any, **kwargs: Any) -> Any:
        run = present()
        given = [ops.kept(value) for value in values] if isolated else values
        result = func(*given, run=run, **kwargs)
        if end is not None:
            end()
        if not isolated or result is None:
            return result
        own = {id(one): value for one, value in zip(given, values, strict=True)}
        return [own.get(id(one), one) for one in matched(action, result, values) or ()]

    return routine
