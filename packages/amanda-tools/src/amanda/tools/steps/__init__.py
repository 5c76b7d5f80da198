"""Steps of a run: when one begins, routines that run at some of them alone, and numbers of executions.

steps = Steps()
window = Window(steps, start=10, end=20)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import amanda
from amanda import interceptor
from amanda.action import GatedObserver, Routine, has_run, marks, opening, with_marks
from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveInt, checked, deprecated
from amanda.tools.mapping import in_construction

__all__ = ["Steps", "Window", "WindowError", "execution_number"]


def execution_number(record: Any, run: dict[Any, Any] | None, recomputed: bool) -> int:
    """Return the number of this execution, from 0 on; count it in `record.executions`, keep it in `run`.

    A recomputation has the number of its first execution, and is not counted.

    Args:
        record: Of an op; hashable.
        run: As routines get it; None where nothing runs again.
        recomputed: As routines get it; False where nothing runs again.
    """
    # A checkpoint runs the op again for the backward pass of the same execution.
    if recomputed and run is not None and record in run:
        return int(run[record])
    number: int = record.executions
    record.executions += 1
    if run is not None:
        run[record] = number
    return number


Listener = Callable[[int], object]

_OUTSIDE_LIMIT = 100


@dataclass
class _StepCandidate:
    """An op whose executions may begin steps.

    is_inside: in the call of a module, or in a graph.  order: of the first execution.
    thread: on which its executions count; None for any, since a graph calls back on threads of its own.
    """

    is_inside: bool
    order: int
    thread: int | None
    executions: int = 0

    def leads(self, rival: _StepCandidate | None) -> bool:
        """Return True if this op begins steps rather than its rival, or there is no rival."""
        if rival is None or rival is self:
            return True
        # A call of a module is a step rather than a line outside.
        if self.is_inside != rival.is_inside:
            return self.is_inside
        # What repeats is a loop; what ran once may be preparation.
        if (self.executions > 1) != (rival.executions > 1):
            return self.executions > 1
        return self.order < rival.order


class Steps(amanda.Tool):
    """Count the steps of a program from 0, such as batches of training.

    A step begins when the leading op executes again, on the thread on which it did first. Leading is, of
    the first ops of outermost module calls (in a graph, of its runs), the earliest that repeats: each batch
    of a training loop is a step, and each batch of an evaluation that calls the same model. As long as
    there is none, the earliest line outside of modules that repeats leads.  After a call of `step` only
    further ones begin steps.

    In a graph a step begins as a run of it begins, ahead of every operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._listeners: list[Listener] = []
        self._only_calls_begin_steps = False  # after a call of `step`
        # By op id, or by line outside of modules.
        self._candidate_by_place: dict[Hashable, _StepCandidate] = {}
        self._model_ordinals: set[int] = set()  # of models whose first op has been analysed
        self._leader: _StepCandidate | None = None
        # Not open while lines need no count: no line leads while the first op of a module does.
        self._line_gate = interceptor.Gate()
        self._is_between_runs = True  # no op of a graph has been analysed since the last execution
        self.add_inst_for_op(self._watch_candidate)

    def step(self) -> None:
        """Begin a step now; from then on only calls of `step` begin steps."""
        self._only_calls_begin_steps = True
        self._begin_step(self.number + 1)

    @deprecated(use="clear", since="amanda-tools 0.2", gone="0.4")
    def restart(self) -> None:
        """Count from 0 again.  Deprecated: use `clear`."""
        self.clear()

    def clear(self) -> None:
        """Count from 0 again, and call the listeners with 0: the next step that begins is the first."""
        self._leader, self._line_gate.open = None, True
        for candidate in self._candidate_by_place.values():
            candidate.executions = 0
        self._begin_step(0)

    @checked
    def on_step(self, listener: Listener) -> None:
        """Call `listener(number)` at the beginning of each step, ahead of its routines, and now."""
        self._listeners.append(listener)
        # At once, so that a window that is added in the midst of a run is right from its first op.
        listener(self.number)

    def _begin_step(self, number: int) -> None:
        self.number = number
        for listener in self._listeners:
            listener(number)

    def _watch_candidate(self, context: amanda.OpContext) -> None:
        """Insert a routine that counts the executions, at an op that may begin steps."""
        if context.is_static():  # an op of a file, which does not run now
            return
        place = self._find_place(context)
        if place is None:
            return
        is_line, count = isinstance(place, tuple), self._count_execution
        if place not in self._candidate_by_place:
            order, thread = len(self._candidate_by_place), get_ident() if context.is_eager() else None
            self._candidate_by_place[place] = _StepCandidate(not is_line, order, thread)
        routine: Any = GatedObserver(self._line_gate, count) if is_line else count
        context.insert_before_op(routine, inputs=[], place=place)

    def _find_place(self, context: amanda.OpContext) -> Hashable:
        """Return the id of an op that may begin steps, or its line outside of modules; None for other ops."""
        op_id = context.get_op_id()
        if op_id in self._candidate_by_place:
            return op_id
        # The run, or the model, is noted here: only the first op of each may begin steps.
        if not context.is_eager():
            is_first_of_run, self._is_between_runs = self._is_between_runs, False
            return op_id if is_first_of_run else None
        if called_modules := interceptor.subjects():
            model = interceptor.ordinal(called_modules[0])
            is_first_of_model = model not in self._model_ordinals
            self._model_ordinals.add(model)
            return op_id if is_first_of_model else None
        # Layers are initialized line by line, which is no loop of the program.
        if in_construction():
            return None
        # Outside modules nothing says where a repetition begins, and each time has an id of its own.
        line = (context.get_source(), context.get_op_type())
        has_room = len(self._candidate_by_place) < _OUTSIDE_LIMIT
        return line if line in self._candidate_by_place or has_room else None

    @opening
    def _count_execution(self, place: Hashable) -> None:
        """Count an execution; begin a step if the op leads."""
        candidate = self._candidate_by_place[place]
        self._is_between_runs = True
        # Replicas and loaders on other threads run the same op for the same step.
        if candidate.thread not in (None, get_ident()):
            return
        candidate.executions += 1
        if candidate.leads(self._leader) and not self._only_calls_begin_steps:
            self._leader, self._line_gate.open = candidate, not candidate.is_inside
            # The first execution finds the number at 0 already.
            if self.number != candidate.executions - 1:
                self._begin_step(candidate.executions - 1)


class WindowError(AmandaError, ValueError):
    """The steps of a window are not valid: a negative start, an end before the start, a frequency below 1."""


class Window:
    """The steps of `range(start, end, frequency)`; `open` is True if the current step is one of them.

    `let` makes a tool's routines run at these steps only. Its analysis routines still run once per op.
    All routines of one execution, which share `run`, follow the decision of the first: otherwise a
    backward routine could miss what its forward routine did not save.

    Args:
        steps: The counter of steps.
        start: First step.
        end: Step after the last; None for no end.
        frequency: A number of steps, of which the first counts.

    Raises:
        WindowError: For steps that are not valid.
    """

    @checked(error=WindowError)
    def __init__(
        self, steps: Steps, start: NonNegativeInt = 0, end: NonNegativeInt | None = None,
        frequency: PositiveInt = 1,
    ) -> None:  # fmt: skip
        if end is not None and end <= start:
            raise WindowError(f"end is {end}, start {start}: no step is in between (end is left out)")
        self._start, self._end, self._frequency = start, end, frequency
        self.steps = steps
        self.open = False
        steps.on_step(self._update_open)

    def let(self, tool: amanda.Tool) -> None:
        """Make the tool's routines run at steps of the window alone, and the tool depend on `steps`."""
        tool.depends_on(self.steps)
        tool.wrap_routines(self.gate)

    def _update_open(self, number: int) -> None:
        is_in_range = number >= self._start and (self._end is None or number < self._end)
        self.open = is_in_range and (number - self._start) % self._frequency == 0

    def gate(self, context: amanda.OpContext, type: amanda.ActionType, routine: Routine) -> Routine:
        """Return a routine, never traceable, that calls another at steps of the window, else does nothing.

        Args:
            context: Of the op that the routine is for.
            type: Kind of the action, which tells replacements: these return NotImplemented at other steps.
            routine: Observes or changes values of the op.
        """
        window, result_if_closed = self, NotImplemented if type.is_replacement else None
        takes_run = has_run(routine)
        # Routines that change values decide in a recomputation as they did at first; observers hear once.
        may_change = context.is_eager() and context.is_forward() and "observer" not in marks(routine)
        signature = _add_run_keyword(routine) if may_change and not takes_run else None

        def gated(*values: Any, **kwargs: Any) -> Any:
            return routine(*values, **kwargs) if window.open else result_if_closed

        def gated_with_run(*values: Any, run: Any, **kwargs: Any) -> Any:
            """Call the routine if the window was open at the first routine of the execution."""
            # The first routine of an execution decides for all, also for those of its backward pass.
            is_open = run.setdefault(window, window.open) if isinstance(run, dict) else window.open
            if takes_run:
                kwargs["run"] = run
            return routine(*values, **kwargs) if is_open else result_if_closed

        wrapper: Routine = gated_with_run if takes_run or signature else gated
        functools.update_wrapper(wrapper, routine, updated=())
        if signature is not None:
            wrapper.__signature__ = signature  # type: ignore[attr-defined]
        # The mark is dropped: inlined into a graph, the decision of one step would hold for all.
        return with_marks(wrapper, marks(routine) - {"traceable"})


def _add_run_keyword(routine: Routine) -> inspect.Signature | None:
    """Return the signature of a routine with a keyword `run` besides; None of one written in C."""
    try:
        signature = inspect.signature(routine)
    except (TypeError, ValueError):
        return None
    run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*signature.parameters.values()]
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return signature.replace(parameters=[*parameters[:-1], run, parameters[-1]])
    return signature.replace(parameters=[*parameters, run])
