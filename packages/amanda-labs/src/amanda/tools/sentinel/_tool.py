"""The tool: chooses the steps to watch by a time budget, and keeps the alarms."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Annotated, Any, Literal, NamedTuple
from weakref import ref

import amanda
from amanda.backend import when_imported
from amanda.errors import ToolError
from amanda.options import NonNegativeFloat, PositiveInt, PositiveShare, Range, Seed, Share, checked
from amanda.tools.kit import RequiredNames
from amanda.tools.sentinel import _reruns
from amanda.tools.sentinel._result import (
    Alarm,
    Ranks,
    SentinelError,
    SentinelResult,
    StepCounts,
    norm_alarms,
)
from amanda.tools.sentinel._watch import StepWatcher

_REQUIRED = RequiredNames(
    "amanda.tools.sentinel",
    "torch",
    "torch:Tensor._base",
    "torch:Tensor._is_view",
    "torch:_C.DisableTorchFunction",
    "torch:_C._autograd._saved_tensors_hooks_is_enabled",
    "torch:_C._current_autograd_node",
    "torch:_C._len_torch_dispatch_stack",
    "torch.utils._python_dispatch:_disable_current_modes",
)

Compiled = Literal["eager", "instrument"]
logger = logging.getLogger("amanda")


class _Options(NamedTuple):
    """The options of a SentinelTool."""

    budget: float | None
    threshold: float
    window: int
    ranks: bool
    stop: bool
    limit: int
    share: float
    seed: int
    compiled: Compiled


class SentinelTool(amanda.Tool):
    """Detect silent data corruption, NaN, spikes and diverging ranks in training, within a time budget.

    `result` has the alarms, `clear` drops them.  For PyTorch.
    A step ends with the step of any optimizer of torch.optim, or with a call of `step`.  In a watched step
    the tool computes norms of the outputs of a share of the forward and backward ops, and runs these again on
    the same inputs.  In other steps no driver of Amanda is attached.

    Args:
        budget: Share of the training time that watching may take; None to watch every step.
        share: Share of the ops of a watched step that are checked; in one step after the first NaN, all ops.
        threshold: Robust deviations above the median at which a norm is a spike.
        window: Number of executions in the median.
        ranks: Compare gradients and parameters of the ranks of torch.distributed.
        stop: Raise SentinelError at the first alarm, at the end of the step.
        compiled: Treatment of compiled functions in watched steps, as in `amanda.apply`.
        seed: Seed of the choice of ops.
        limit: Number of alarms that the result keeps.

    Raises:
        OptionError: For options that are not valid.
    """

    purpose = "debug"
    is_copied_when_used = False

    # In steps that are not watched nothing is attached, so they cost next to nothing.
    intercepts = False

    @checked
    def __init__(
        self,
        budget: PositiveShare | None = 0.01,
        share: Share = 0.1,
        threshold: NonNegativeFloat = 12.0,
        window: Annotated[int, Range(8, 1_000_000)] = 64,
        ranks: bool = True,
        stop: bool = False,
        compiled: Compiled = "instrument",
        seed: Seed = 0,
        limit: PositiveInt = 1_000,
    ) -> None:
        super().__init__()
        self._options = _Options(budget, threshold, window, ranks, stop, limit, share, seed, compiled)
        self._optimizer_hooks: list[Any] = []
        self._admissions: list[Callable[[amanda.OpContext], bool]] = []
        self._scope: amanda.Scope | None = None  # `_step_scope` in a watched step
        self._scope_thread = 0
        self.clear()

    def clear(self) -> None:
        """Drop alarms, norms and times; steps are counted from 0."""
        options = self._options
        self._watch = StepWatcher(options.share, options.seed, self._record_alarm, self._close_scope)
        for admits in self._admissions:
            self._watch.restrict(admits)
        self._step_scope = amanda.apply(self._watch, compiled=options.compiled)
        self._budget, self._counts = Budget(options.budget), StepCounts()
        self._ranks = Ranks(self._name_of)
        self._alarms: list[Alarm] = []
        self._logged_places: set[tuple[str, ...]] = set()
        # Weakly, since an optimizer holds the parameters of its model.
        self._optimizers: set[ref[Any]] = set()
        self._dropped = 0
        self._watches_all_next: bool | None = None
        """True after the first NaN: all ops of the next step are watched; False once that step has begun."""
        self._remarks: dict[str, None] = {}
        self._step_begun_at, self._tool_seconds = perf_counter(), 0.0

    def restrict(self, admits: Callable[[amanda.OpContext], bool]) -> None:
        """Watch only ops whose context `admits` accepts."""
        super().restrict(admits)
        self._admissions.append(admits)
        self._watch.restrict(admits)

    def wrap_routines(self, wrap: Any) -> None:
        """Raise ToolError: the tool chooses its steps itself."""
        raise ToolError(
            "sentinel chooses the steps that it watches by its budget: give no start, end or frequency"
        )

    @property
    def result(self) -> SentinelResult:
        """Return the alarms so far, and a row for each watched op."""
        self._counts.comparisons = self._ranks.comparisons
        budget = self._budget
        result = SentinelResult(
            list(self._watch.ops.values()), self._alarms, self._counts, budget.spent, budget.passed,
            budget.share, self._dropped,
        )  # fmt: skip
        reports = [f"{entry.what}: {entry.reason}" for entry in self._step_scope.report]
        result.remarks = [*self._remarks, *self._ranks.remarks, *reports[:10]]
        return result._of_tool(self)

    def step(self) -> None:
        """End a step, in training without an optimizer of torch.optim."""
        self._end_step()

    def scope_entered(self) -> None:
        """Begin a step, and hook the steps of optimizers: at once, or when torch is imported."""
        self._scope_thread = get_ident()
        # The tool must not be what imports a framework.
        self._cancel_import_hook = when_imported("torch.optim.optimizer", self._hook_optimizers)
        self._begin_step()

    def _hook_optimizers(self) -> None:
        """Register hooks that run before and after the step of any optimizer of torch.optim."""
        from torch.optim import optimizer

        _REQUIRED.check()
        self._optimizer_hooks = [
            optimizer.register_optimizer_step_pre_hook(self._before_update),
            optimizer.register_optimizer_step_post_hook(lambda *arguments: self._end_step()),
        ]

    def scope_left(self) -> None:
        """Judge the last step, which has not ended, receive the last hashes, and look for NaN in parameters.

        Here alarms raise nothing, and a remark is kept if no step ended.
        """
        self._cancel_import_hook()
        for handle in self._optimizer_hooks:
            handle.remove()
        self._optimizer_hooks.clear()
        self._judge_step()
        self._record_alarms(self._ranks.receive_alarms(wait=True), stop=False)
        # NaN may have begun in a step that was not watched, but parameters keep it.
        if not any(alarm.kind == "nan" for alarm in self._alarms):
            self._record_alarms(self._find_non_finite_parameters(), stop=False)
        if not self._counts.steps:
            self._remarks[
                "No step ended: no optimizer of torch.optim made one, and `step` was not called."
            ] = None

    def _find_non_finite_parameters(self) -> list[Alarm]:
        """Return an alarm if a parameter of an optimizer is not finite, without an op; otherwise no alarm."""
        optimizers = [optimizer for weak in self._optimizers if (optimizer := weak()) is not None]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        floating_parameters = [
            parameter
            for group in groups
            for parameter in group["params"]
            if _reruns.is_plain(parameter) and (parameter.is_floating_point() or parameter.is_complex())
        ]
        # The tool's own arithmetic is not an op of the program.
        with amanda.disabled():
            norms = _reruns.to_host([_reruns.norm_of(parameter) for parameter in floating_parameters])
        norm_pairs = zip(floating_parameters, norms, strict=True)
        non_finite_parameters = [parameter for parameter, norm in norm_pairs if not math.isfinite(norm)]
        if not non_finite_parameters:
            return []
        count, first_name = len(non_finite_parameters), self._name_of(non_finite_parameters[0])
        detail = (
            f"{count} of {len(floating_parameters)} parameters hold NaN or infinity as the scope closes, the "
            f"first is {first_name}; it began in a step that was not watched"
        )
        # No watched op made the values, so the alarm names no op.
        return [Alarm("nan", self._counts.steps, phase="", type="", module="", source="", detail=detail)]

    def _begin_step(self) -> None:
        """Begin a step, and open the scope of the watcher if the budget allows, or after the first NaN."""
        self._step_begun_at, self._tool_seconds = perf_counter(), 0.0
        self._watch.step = self._counts.steps
        if self._watches_all_next or self._budget.allows():
            self._watch.share = 1.0 if self._watches_all_next else self._options.share
            self._watch.allowance = math.inf if self._watches_all_next else self._budget.allowance
            if self._watches_all_next:
                self._watches_all_next = False
            self._scope = self._step_scope
            self._scope.start()

    def _close_scope(self) -> None:
        """Close the scope of a watched step, at its end or once its allowance is spent on new ops."""
        if self._scope is not None and not self._scope.closed:
            self._scope.stop()

    def _before_update(self, optimizer: Any, *arguments: Any) -> None:
        """Compare the ranks, if that is due: data-parallel ranks hold the same gradients before an update.

        Alarms are of comparisons that earlier steps began.  The optimizer is noted in any case.
        """
        self._optimizers.add(ref(optimizer))
        if not self._options.ranks or get_ident() != self._scope_thread:
            return
        start, step = perf_counter(), self._counts.steps
        with amanda.disabled():
            alarms = self._ranks.receive_alarms()
            if self._ranks.is_due(step):
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                alarms += self._ranks.send(
                    step, parameters, lambda: self._budget.interval(perf_counter() - start)
                )
        self._tool_seconds += perf_counter() - start
        self._record_alarms(alarms)

    def _end_step(self) -> None:
        """Judge the step, count its time, and begin the next; raise SentinelError for an alarm with `stop`.

        On another thread than the one that opened the scope, only a remark is kept.
        """
        if get_ident() != self._scope_thread:
            self._remarks["Steps on other threads than the one that opened the scope were not watched."] = (
                None
            )
            return
        start = perf_counter()
        is_watched = self._scope is not None
        # The watcher closes the scope within a step once its allowance is spent.
        is_exhausted = self._scope is not None and self._scope.closed
        alarms = self._judge_step()
        now = perf_counter()
        self._tool_seconds += now - start + self._watch.seconds
        self._watch.seconds = 0.0
        self._budget.step_ended(now - self._step_begun_at, self._tool_seconds, is_watched, is_exhausted)
        self._counts.steps += 1
        self._counts.watched += is_watched
        self._begin_step()
        if alarms and self._options.stop:
            raise SentinelError(alarms[0])

    def _judge_step(self) -> list[Alarm]:
        """Close the scope of a watched step, and return its alarms; none for a step that was not watched.

        A step whose gradients overflowed in mixed precision is skipped, as the optimizer skips it.  After the
        first NaN, all ops of the next step are to be watched.
        """
        if self._scope is None:
            return []
        self._close_scope()
        self._scope = None
        has_overflowed, self._watch.overflowed = self._watch.overflowed, False
        norms = self._watch.end_step()
        if has_overflowed:
            self._counts.skipped += 1
        elif norms:
            with amanda.disabled():
                values = _reruns.to_host([norm.value for norm in norms])
            alarms, further_count = norm_alarms(
                self._counts.steps, norms, values, self._options.threshold, self._options.window
            )
            self._counts.followed += further_count
            has_nan = any(alarm.kind == "nan" for alarm in alarms)
            # The first NaN: the next step looks at all ops, if this one looked at some.
            if has_nan and self._watches_all_next is None and self._watch.share < 1:
                self._watches_all_next = True
            self._record_alarms(alarms, stop=False)
        return [alarm for alarm in self._alarms if alarm.step == self._counts.steps]

    def _record_alarms(self, alarms: list[Alarm], stop: bool = True) -> None:
        """Log and keep alarms; raise SentinelError for the first if `stop` and the tool's option say so."""
        for alarm in alarms:
            self._record_alarm(alarm)
        if alarms and stop and self._options.stop:
            raise SentinelError(alarms[0])

    def _record_alarm(self, alarm: Alarm) -> None:
        """Log the first alarm of an op, and keep alarms up to the limit; count those beyond as dropped."""
        # A broken unit raises an alarm in every step; the log has each place once.
        key = alarm.kind, alarm.phase, alarm.type, alarm.module, alarm.source
        if key not in self._logged_places:
            logger.warning("sentinel: %s", alarm)
            self._logged_places.add(key)
        if len(self._alarms) < self._options.limit:
            self._alarms.append(alarm)
        else:
            self._dropped += 1

    def _name_of(self, parameter: Any) -> str:
        """Return the path of a parameter; its shape where no watched op has read it."""
        path = self._watch.paths.get(self.identity_of(parameter))
        return path or f"of shape {tuple(parameter.shape)}"


_ENOUGH = 3
"""Steps that were not watched, after which one may be."""
_BURST = 0.1
"""Share of a step that a watched one may spend on ops that are new."""
_STALL = 10
"""A watched step that took longer than this many times the tool's own work was held up by something else."""


class Budget:
    """Time spent on watching, and whether the next step may be watched.

    share: of the time since the beginning; None for all steps.

    The cost of a watched step is the longer of the time in the tool's own code, and the time of the step
    beyond the median of the others.  A step is watched once the time that has passed has earned the cost of
    the steps before, and the one that is expected.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.passed = self.spent = 0.0
        # The last steps alone: their time changes with batches and machines.
        self._unwatched_seconds: deque[float] = deque(maxlen=31)
        self._watched_costs: deque[float] = deque(maxlen=7)
        self._backward_reserve = 0.0
        """Cost of analysing forward ops so far, until a step is watched to its end.

        Their backward ops cost about as much, all in one step.
        """

    def step_ended(
        self, seconds: float, tool_seconds: float, is_watched: bool, is_exhausted: bool = False
    ) -> None:
        """Count a step and its cost; tool_seconds: of its seconds, those in the tool's own code.

        is_exhausted: True if watching ended before the step did, at the allowance.
        """
        self.passed += seconds
        if not is_watched:
            self.spent += tool_seconds
            self._unwatched_seconds.append(seconds - tool_seconds)
            return
        has_unwatched = bool(self._unwatched_seconds)
        extra_seconds = seconds - median(self._unwatched_seconds) if has_unwatched else tool_seconds
        # A step that was held up by something else would spend the budget of hours.
        cost = max(tool_seconds, min(extra_seconds, _STALL * tool_seconds))
        self.spent += cost
        self._watched_costs.append(cost)
        self._backward_reserve = self._backward_reserve + cost if is_exhausted else 0.0

    @property
    def allowance(self) -> float:
        """Seconds after which a watched step analyses no further forward ops; infinite for all steps."""
        return math.inf if self.share is None else _BURST * median(self._unwatched_seconds)

    def allows(self) -> bool:
        """Return True if the next step may be watched."""
        if self.share is None:
            return True
        # Without a few unwatched steps nobody knows what a watched one costs more.
        if len(self._unwatched_seconds) < _ENOUGH:
            return False
        # The first watched step is expected to take its allowance.
        expected_cost = median(self._watched_costs) if self._watched_costs else self.allowance
        return self.spent + expected_cost + self._backward_reserve <= self.share * self.passed

    def interval(self, seconds: float) -> int:
        """Return how many steps lie between repetitions of work that takes `seconds`."""
        if self.share is None or not self._unwatched_seconds:
            return 1
        return max(1, int(seconds / (0.5 * self.share * median(self._unwatched_seconds))) + 1)
