"""The tool: applies another tool in the steps that are logged, and writes what that one found."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import islice
from pathlib import Path
from threading import get_ident
from typing import Any, Literal

import amanda
from amanda.action import Routine
from amanda.backend import State, when_imported
from amanda.files import check_file_to_write
from amanda.options import Name, NonNegativeInt, PositiveInt, checked, shown
from amanda.tools.live._scalars import RUN_RESULTS, scalars_of
from amanda.tools.live._writers import LiveError, begin_run
from amanda.tools.results import Result
from amanda.tools.steps import Steps, Window

logger = logging.getLogger("amanda")

Compiled = Literal["eager", "instrument"]
StepEndEvent = Literal["call", "optimizer", "execution"] | None
"""Kind of events that end steps: calls, steps of an optimizer, or executions; None until one has."""


class LiveTool(amanda.Tool):
    """Log what a tool finds in every n-th step to a writer, while the program runs.

    Step n, from 1 on, is logged if n is a multiple of `every`.  The tool runs in these steps alone, and its
    numbers are of that step; in all other steps no driver of Amanda is attached.  `NanTool` and
    `SentinelTool` run throughout, and their numbers are counts since the last log.
    A step ends with the step of any optimizer of torch.optim; with a call of `step`, after which optimizers
    end none; or, in a program without such an optimizer, with an execution of the model as
    `amanda.tools.steps.Steps` counts them.

    Args:
        tool: Tool with a `result` and a `clear()`, which looks and changes nothing.
        writer: ScalarWriter: any object with a method `scalars(step, values)`.
        every: Number of steps from one log to the next.
        columns: Columns of the result's rows to log, instead of the numbers of `scalars_of`.
        limit: Most numbers of a step; further ones are left out, which is logged once.
        save: File for the result, written when the scope closes; its suffix names the form.
        compiled: Treatment of compiled functions in the steps in which the tool runs, as in `amanda.apply`.

    Raises:
        LiveError: For a tool that changes what the program computes, and for one without numbers to log.
        OptionError: For options that are not valid.
    """

    purpose = None
    is_copied_when_used = False

    # The tool has scopes of its own: between them the program is as it is without Amanda.
    intercepts = False

    @checked
    def __init__(
        self,
        tool: amanda.Tool,
        writer: Any,
        every: PositiveInt = 50,
        columns: Sequence[Name] | None = None,
        limit: PositiveInt = 200,
        save: str | Path | None = None,
        compiled: Compiled = "instrument",
    ) -> None:
        super().__init__()
        # A class has the method too, and is a likely slip.
        if not callable(getattr(writer, "scalars", None)) or isinstance(writer, type):
            raise LiveError(f"writer is {shown(writer)}; give an object with scalars(step, values)")
        result = _checked_result(tool, columns, save)
        self._tool: Any = tool
        self._writer, self._every = writer, every
        self._columns, self._limit = columns, limit
        # Absolute, since the program may change its working directory.
        self._save = None if save is None else Path(save).absolute()
        self._runs_throughout = getattr(result, "name", "") in RUN_RESULTS
        self._tool_scope = amanda.apply(tool, compiled=compiled)
        # Executions are counted until an optimizer or a call of `step` ends a step.
        self._steps = Steps()
        # While executions are counted the tool runs in this scope, unless it runs throughout.
        counting_tools = [self._steps] if self._runs_throughout else [self._steps, tool]
        self._counting_scope = amanda.apply(*counting_tools, compiled=compiled)
        if not self._runs_throughout:
            tool.wrap_routines(self._gate_routine)  # so that they run in logged executions alone
        self._scope_thread, self._is_open = 0, False
        self._optimizer_hook: Any = None  # its handle, once torch.optim is imported in the scope
        # Executions are numbered from 0, so that number `every` - 1 is that of step `every`.
        self._window_start = every - 1
        self._window = Window(self._steps, start=self._window_start, frequency=every)
        self._reset()
        self._steps.on_step(self._execution_began)

    def _reset(self) -> None:
        """Begin at step 0, without a result."""
        self.resume(0)
        self._step_end_event: StepEndEvent = None
        self._steps_per_end = 1
        """Number of steps between the last two ends: more than 1 where several run in one call."""
        self._counts_at_last_log: Mapping[str, float] = {}
        """Of a tool that runs throughout."""
        self._has_optimizer = self._is_limit_logged = False

    def clear(self) -> None:
        """Forget results, and count steps from 0 again."""
        self._tool.clear()
        self._reset()

    @property
    def result(self) -> Any:
        """Return the tool's result: of the last logged step, or of the run if the tool runs throughout.

        It is a copy with remarks on the logged steps, and on what was not instrumented in them.
        """
        result = copy(self._tool.result if self._result is None else self._result)
        if hasattr(result, "remarks"):
            reports = [f"{entry.what}: {entry.reason}" for entry in self._tool_scope.report[:10]]
            if isinstance(result, Result) and not self._runs_throughout:
                # First of all, since every other sentence and number is of that step.
                result.lead = self._sentence()
            else:
                reports = [self._sentence(), *reports]
            result.remarks = [*result.remarks, *reports]
        return result

    def _sentence(self) -> str:
        """Return a sentence on the steps that were logged, and which of them the result is of."""
        ended_count = self._step_number - self._start_step
        if not ended_count:
            reason = (
                ": the program has an optimizer of torch.optim, whose steps were waited for in the thread of "
                "the scope"
            )
            return f"No step ended{reason if self._has_optimizer else ''}."
        if not self._logged_count:
            return (
                f"No step was logged: {ended_count:,} ended, and multiples of {self._every:,} are logged; "
                "every=1 logs each."
            )
        logged = f"{self._logged_count:,} of {ended_count:,} steps were logged to {_place(self._writer)}."
        return logged if self._runs_throughout else f"Of step {self._last_logged_step:,} alone: {logged}"

    def restrict(self, admits: Callable[[amanda.OpContext], bool]) -> None:
        """Restrict the tool that is logged."""
        self._tool.restrict(admits)

    def wrap_routines(self, wrap: Any) -> None:
        """Wrap the routines of the tool that is logged."""
        self._tool.wrap_routines(wrap)

    def depends_on(self, *tools: amanda.Tool) -> None:
        """Have the tool that is logged depend on others."""
        # This tool has no routines; with dependencies that have some, drivers would be attached throughout.
        self._tool.depends_on(*tools)

    def unmatched(self) -> list[str]:
        """Return a sentence for each selection of the tool that no op has matched."""
        return list(self._tool.unmatched())

    @checked
    def resume(self, step: NonNegativeInt) -> None:
        """Continue after a step, without a result so far; call this method before the scope opens.

        Args:
            step: Number of the last step of the earlier run, such as that of a checkpoint.
        """
        self._step_number = step  # the last step that ended
        self._start_step = step  # the step after which counting began
        self._first_step = step + 1
        self._last_logged_step = step
        self._logged_count = 0  # of steps after the start step
        self._result: Any = None  # of the last logged step, unless the tool runs throughout
        self._steps.clear()
        # The next execution, 0 of the window, is of step + 1; the window opens at a multiple of `every`.
        start = (-step - 1) % self._every
        if start != self._window_start:
            self._window_start, self._window = start, Window(self._steps, start=start, frequency=self._every)
            self._tool.analyse_again()  # its routines ask the former window

    @checked
    def step(self, number: PositiveInt | None = None) -> None:
        """End a step.  From the first call on, calls of this method alone end steps.

        Args:
            number: Of the step that ends; None for one more than the last.
        """
        if number is not None and self._step_end_event != "call":
            self._first_step = number  # of a program that counts steps itself, and may have been resumed
        self.end_step(number)
        self.begin_step()

    def begin_calls(self, step: int) -> None:
        """Count steps by calls alone, from the one after `step`; a callback calls this ahead of the scope."""
        self._step_end_event = "call"
        # In a scope that the program opened, executions are counted already.
        self._close(self._counting_scope)
        self.resume(step)

    @property
    def is_open(self) -> bool:
        """True while a scope with this tool is open."""
        return self._is_open

    def end_step(self, number: int | None = None) -> None:
        """End a step, and log it if it is due; the next begins with a call of `begin_step`.

        Args:
            number: Number of the step that ends; None for one more than the last.
        """
        if self._step_end_event != "call":
            # An optimizer may have ended this very step before.
            self._restart_step_numbers()
        self._end_step("call", self._step_number + 1 if number is None else number)

    def begin_step(self) -> None:
        """Open the tool's scope, if the tool runs in the step that begins."""
        is_due = self._is_due(self._step_number, self._step_number + self._steps_per_end)
        # While executions are counted, the tool is in the scope that counts them.
        if is_due and self._is_open and self._counting_scope.closed and self._tool_scope.closed:
            self._tool_scope.start()

    def _is_due(self, previous: int, number: int) -> bool:
        """Return True if a multiple of `every` is among the steps after `previous` up to `number`."""
        return number // self._every > previous // self._every

    def _end_step(self, event: StepEndEvent, number: int) -> None:
        """End a step, and close the tool's scope; log the step if it is due and the tool ran in it.

        What the tool found in a step that is not due is dropped, unless the tool runs throughout.
        event: what ended the step.
        """
        previous, self._step_number, self._step_end_event = self._step_number, number, event
        self._steps_per_end = max(1, number - previous)
        has_run_counted = not self._counting_scope.closed and self._window.open
        has_run = has_run_counted or not self._tool_scope.closed
        self._close(self._counting_scope)
        if not self._runs_throughout:
            self._close(self._tool_scope)
        if has_run and self._is_due(previous, number):
            self._log(number)
        elif has_run and not self._runs_throughout:
            self._tool.clear()

    @staticmethod
    def _close(*scopes: amanda.Scope) -> None:
        """Close those of some scopes that are open."""
        for scope in scopes:
            if not scope.closed:
                scope.stop()

    def scope_entered(self) -> None:
        """Begin a step, and hook the steps of optimizers, once torch is imported.

        Raises LiveError if the tool that is logged is itself in an open scope.
        """
        if State.current().is_open(self._tool):
            # Each log clears its result, and steps that are not logged would be in the next one.
            name = type(self._tool).__name__
            raise LiveError(f"this {name} is in an open scope already; give LiveTool another {name}()")
        self._scope_thread, self._is_open, self._optimizer_hook = get_ident(), True, None
        if self._runs_throughout:
            self._tool_scope.start()
        if self._step_end_event in (None, "execution"):
            self._counting_scope.start()
        # The tool must not be what imports a framework.  A hook of the tool's own runs ahead of this one.
        self._cancel_import_watch = when_imported("torch.optim.optimizer", self._hook_optimizers)
        self.begin_step()

    def _hook_optimizers(self) -> None:
        """Register a hook that runs after the step of any optimizer of torch.optim."""
        from torch.optim import optimizer

        self._optimizer_hook = optimizer.register_optimizer_step_post_hook(
            lambda *arguments: self._optimizer_stepped()
        )

    def scope_left(self) -> None:
        """Log a last execution and the last counts, save the result, and close the writer.

        The step under way has not ended, and is not logged.
        """
        self._is_open = False
        self._cancel_import_watch()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        if self._step_end_event == "execution":
            # No further execution tells that the last one has ended.
            self._execution_began(self._steps.number + 1)
        self._close(self._counting_scope, self._tool_scope)
        if not self._runs_throughout:
            self._tool.clear()  # drops the step under way
        elif self._step_number > self._last_logged_step:
            self._log(self._step_number)
        if self._save is not None:
            self.result.save(self._save)
        close = getattr(self._writer, "close", None)
        if callable(close):
            close()

    def _optimizer_stepped(self) -> None:
        """End a step, unless `step` ends steps, or this is another thread than that of the scope."""
        if self._step_end_event != "call" and get_ident() == self._scope_thread:
            if self._step_end_event == "execution":
                # Ahead of the training weights are drawn, or the model is evaluated.
                self._restart_step_numbers()
            self._end_step("optimizer", self._step_number + 1)
            self.begin_step()

    def _restart_step_numbers(self) -> None:
        """Number steps from the start again: what ended before was no step, or is the present one.

        Logs a warning if such executions were logged as steps.
        """
        if self._step_end_event == "execution":
            self._logged_count = 0
            if self._last_logged_step > self._start_step:
                logger.warning(
                    "live: numbers up to step %s are of what ran ahead of the first step; later ones are of "
                    "the training", f"{self._last_logged_step:,}",
                )  # fmt: skip
        self._step_number = self._start_step

    def _execution_began(self, ended_count: int) -> None:
        """End the step of the execution before, if executions end steps, and log it if it is due.

        The first call with an ended execution decides if they do: in a program without an optimizer.
        ended_count: of executions.
        """
        if self._step_end_event is None and ended_count and not self._has_optimizer:
            # Asked once, since it takes as long as a collection of garbage.
            self._has_optimizer = _has_optimizer()
            self._step_end_event = None if self._has_optimizer else "execution"
        previous, step = self._step_number, self._start_step + ended_count
        if self._step_end_event == "execution" and step > previous:
            self._step_number = step
            if self._is_due(previous, step):
                self._log(step)

    def _gate_routine(self, context: amanda.OpContext, type: amanda.ActionType, routine: Routine) -> Routine:
        """Return a routine that runs in logged executions alone, where executions are counted."""
        return routine if self._counting_scope.closed else self._window.gate(context, type, routine)

    def _log(self, number: int) -> None:
        """Write what the tool found up to the end of a step, unless this or a later step was logged.

        Then the tool starts anew; of a tool that runs throughout, the numbers since the last log are written.
        """
        if number <= self._last_logged_step:
            return
        # Reading results and writing them is no work of the program.
        with amanda.disabled():
            result = self._tool.result
            numbers: Mapping[str, float] = scalars_of(result, self._columns)
            if not self._runs_throughout:
                self._result = result
                self._tool.clear()
            elif self._columns is None:
                earlier, self._counts_at_last_log = self._counts_at_last_log, numbers
                numbers = {name: count - earlier.get(name, 0) for name, count in numbers.items()}
            if not self._logged_count:
                begin_run(self._writer, self._first_step)
            if logged_numbers := self._first_numbers(numbers):
                self._writer.scalars(number, logged_numbers)
        self._last_logged_step, self._logged_count = number, self._logged_count + 1

    def _first_numbers(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Return the first numbers up to the limit; log once that there are more."""
        if len(numbers) > self._limit and not self._is_limit_logged:
            self._is_limit_logged = True
            logger.warning(
                "live: a step has %s numbers, of which the first %s are logged; "
                "select ops by type= or module=, or raise limit", f"{len(numbers):,}", f"{self._limit:,}",
            )  # fmt: skip
        return dict(islice(numbers.items(), self._limit))


def _checked_result(tool: amanda.Tool, columns: Sequence[str] | None, save: str | Path | None) -> Any:
    """Return the present result of a tool.

    Raises LiveError, which says why, for a tool that cannot be logged, and FileError for a file that cannot
    be written.
    """
    name = type(tool).__name__
    if isinstance(tool, LiveTool):
        raise LiveError("tool is a LiveTool, which logs a tool itself; give the tool that is to be logged")
    if tool.purpose in ("change", "compress"):
        raise LiveError(f"{name} changes what the program computes, and would do so in some steps alone")
    if not hasattr(tool, "result"):
        raise LiveError(f"{name} has no result, so there is nothing to log")
    result: Any = tool.result
    scalars_of(result, columns)
    if not callable(getattr(tool, "clear", None)):
        raise LiveError(f"{name} has no method clear(), so its numbers would be of all steps before")
    if save is not None:
        check_file_to_write(Path(save))
        # A result with a `save` of its own may have other forms.
        has_forms = isinstance(result, Result) and type(result).save is Result.save
        if has_forms and not str(save).endswith(tuple(result._suffixes)):
            raise LiveError(f"save: {save} ends in none of {', '.join(result._suffixes)}")
    return result


def _place(writer: Any) -> str:
    """Return where a writer writes, as it says itself; the name of its class if it does not say so."""
    kind = type(writer)
    has_words = any({"__str__", "__repr__"} & vars(base).keys() for base in kind.__mro__[:-1])
    return str(writer) if has_words else kind.__name__


def _has_optimizer() -> bool:
    """Return True if the program has made an optimizer of torch.optim."""
    module = sys.modules.get("torch.optim.optimizer")
    # By type(): to ask an object for its class may run code of the program.
    return module is not None and any(issubclass(type(x), module.Optimizer) for x in gc.get_objects())
