"""The tool: chooses the steps that are watched, and keeps the alarms."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Annotated, Any, Literal
from weakref import ref

import amanda
from amanda.backend import when_imported
from amanda.errors import ToolError
from amanda.options import NonNegativeFloat, PositiveInt, PositiveShare, Range, Seed, Share, checked
from amanda.tools.kit import RequiredNames
from amanda.tools.sentinel import _pytorch
from amanda.tools.sentinel._alarms import Alarm, SentinelError
from amanda.tools.sentinel._budget import Budget
from amanda.tools.sentinel._judged import judged
from amanda.tools.sentinel._ranks import Ranks
from amanda.tools.sentinel._result import Counts, SentinelResult
from amanda.tools.sentinel._watch import Watch

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


class SentinelTool(amanda.Tool):
    """Watch training steps of PyTorch within a time budget; `result` has the alarms, `clear` starts anew.

    A step ends with the step of any optimizer of torch.optim, or with a call of `step`.  In a watched step
    the tool looks at a share of the forward and backward ops: it computes norms of their outputs, and runs
    them again on the same inputs.  In other steps no driver of Amanda is attached.

    budget: share of the training time that watching may take; None to watch every step.
    share: share of the ops of a watched step that the tool looks at; all of one step after a NaN was found.
    threshold: robust deviations above the median at which a norm is a spike.  window: number of executions
        in the median.
    ranks: compare gradients and parameters of the ranks of torch.distributed.
    stop: raise SentinelError at the first alarm, at the end of the step.
    compiled: treatment of compiled functions in watched steps, as in `amanda.apply`.
    seed: seed of the choice of ops.  limit: number of alarms that the result keeps.

    Raises OptionError for options that are not valid.
    """

    is_copied_when_used = False

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
        self._options = budget, threshold, window, ranks, stop, limit
        self._watching = share, seed, compiled
        self._handles: list[Any] = []
        self._admissions: list[Callable[[amanda.OpContext], bool]] = []
        self._scope: amanda.Scope | None = None
        self._thread = 0
        self.clear()

    def clear(self) -> None:
        """Drop alarms, norms and times; steps are counted from 0."""
        share, seed, compiled = self._watching
        self._watch = Watch(share, seed, self._alarm, self._close)
        for admits in self._admissions:
            self._watch.restrict(admits)
        self._step_scope = amanda.apply(self._watch, compiled=compiled)
        self._budget, self._counts = Budget(self._options[0]), Counts()
        self._ranks = Ranks(self._name_of)
        self._alarms: list[Alarm] = []
        self._told: set[tuple[str, ...]] = set()
        self._optimizers: set[ref[Any]] = set()
        self._dropped = 0
        self._closer: bool | None = None
        """True if the next step is watched whole, for the first NaN; False once that is done."""
        self._remarks: dict[str, None] = {}
        self._begun, self._inside = perf_counter(), 0.0

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
        reports = [f"{one.what}: {one.reason}" for one in self._step_scope.report]
        result.remarks = [*self._remarks, *self._ranks.remarks, *reports[:10]]
        return result

    def step(self) -> None:
        """End a step, in training without an optimizer of torch.optim."""
        self._end_step()

    def scope_entered(self) -> None:
        """Begin a step, and follow the steps of optimizers from now on, or once torch is imported."""
        self._thread = get_ident()
        self._call_off = when_imported("torch.optim.optimizer", self._follow)
        self._begin_step()

    def _follow(self) -> None:
        from torch.optim import optimizer

        _REQUIRED.check()
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(self._before_update),
            optimizer.register_optimizer_step_post_hook(lambda *given: self._end_step()),
        ]

    def scope_left(self) -> None:
        """Look at what is left of the last step."""
        self._call_off()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._judge()
        self._take(self._ranks.received(wait=True), stop=False)
        if not any(one.kind == "nan" for one in self._alarms):
            self._take(self._spoilt(), stop=False)
        if not self._counts.steps:
            self._remarks[
                "No step ended: no optimizer of torch.optim made one, and `step` was not called."
            ] = None

    def _spoilt(self) -> list[Alarm]:
        """Return an alarm if a parameter is not finite, which no watched step has told."""
        optimizers = [one for one in (weak() for weak in self._optimizers) if one is not None]
        every = [x for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]]
        floating = [x for x in every if _pytorch.is_plain(x) and (x.is_floating_point() or x.is_complex())]
        with amanda.disabled():
            norms = _pytorch.read([_pytorch.norm(x) for x in floating])
        spoilt = [x for x, norm in zip(floating, norms, strict=True) if not math.isfinite(norm)]
        if not spoilt:
            return []
        detail = (
            f"{len(spoilt)} of {len(floating)} parameters hold NaN or infinity as the scope closes, the "
            f"first is {self._name_of(spoilt[0])}; it began in a step that was not watched"
        )
        return [Alarm("nan", self._counts.steps, "", "", "", "", detail)]

    def _begin_step(self) -> None:
        self._begun, self._inside = perf_counter(), 0.0
        self._watch.step = self._counts.steps
        if self._closer or self._budget.allows():
            self._watch.share = 1.0 if self._closer else self._watching[0]
            self._watch.allowance = math.inf if self._closer else self._budget.allowance
            self._closer = False if self._closer else self._closer
            self._scope = self._step_scope
            self._scope.start()

    def _close(self) -> None:
        """Close the scope of a watched step, at its end or once its allowance is spent on new ops."""
        if self._scope is not None and not self._scope.closed:
            self._scope.stop()

    def _before_update(self, optimizer: Any, *given: Any) -> None:
        """Compare the ranks, which hold the same gradients by now."""
        self._optimizers.add(ref(optimizer))
        if not self._options[3] or get_ident() != self._thread:
            return
        begun, step = perf_counter(), self._counts.steps
        with amanda.disabled():
            alarms = self._ranks.received()
            if self._ranks.is_due(step):
                parameters = [one for group in optimizer.param_groups for one in group["params"]]
                alarms += self._ranks.send(
                    step, parameters, lambda: self._budget.interval(perf_counter() - begun)
                )
        self._inside += perf_counter() - begun
        self._take(alarms)

    def _end_step(self) -> None:
        if get_ident() != self._thread:
            self._remarks["Steps on other threads than the one that opened the scope were not watched."] = (
                None
            )
            return
        begun = perf_counter()
        watched, exhausted = self._scope is not None, self._scope is not None and self._scope.closed
        alarms = self._judge()
        now = perf_counter()
        self._inside += now - begun + self._watch.seconds
        self._watch.seconds = 0.0
        self._budget.step_ended(now - self._begun, self._inside, watched, exhausted)
        self._counts.steps += 1
        self._counts.watched += watched
        self._begin_step()
        if alarms and self._options[4]:
            raise SentinelError(alarms[0])

    def _judge(self) -> list[Alarm]:
        """Close the scope of a watched step, and return its alarms."""
        if self._scope is None:
            return []
        self._close()
        self._scope = None
        _, threshold, window, *_ = self._options
        overflowed, self._watch.overflowed = self._watch.overflowed, False
        norms = self._watch.end_step()
        if overflowed:
            self._counts.skipped += 1
        elif norms:
            with amanda.disabled():
                values = _pytorch.read([one.value for one in norms])
            alarms, followed = judged(self._counts.steps, norms, values, threshold, window)
            self._counts.followed += followed
            if self._closer is None and self._watch.share < 1 and any(one.kind == "nan" for one in alarms):
                self._closer = True
            self._take(alarms, stop=False)
        return [one for one in self._alarms if one.step == self._counts.steps]

    def _take(self, alarms: list[Alarm], stop: bool = True) -> None:
        for alarm in alarms:
            self._alarm(alarm)
        if alarms and stop and self._options[4]:
            raise SentinelError(alarms[0])

    def _alarm(self, alarm: Alarm) -> None:
        place = alarm.kind, alarm.phase, alarm.type, alarm.module, alarm.source
        if place not in self._told:
            logger.warning("sentinel: %s", alarm)
            self._told.add(place)
        if len(self._alarms) < self._options[5]:
            self._alarms.append(alarm)
        else:
            self._dropped += 1

    def _name_of(self, parameter: Any) -> str:
        path = self._watch.paths.get(self.identity_of(parameter))
        return path or f"of shape {tuple(parameter.shape)}"
