"""The tool: measures the time of ops, and the memory of their outputs."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from typing import Any

import amanda
from amanda.options import NonNegativeInt, checked
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.profile._recorder import DeviceClock, KernelProfiler, Probe, Recorder, Schedule
from amanda.tools.profile._records import OpProfile
from amanda.tools.profile._result import ProfileResult
from amanda.tools.profile._rules import RULES, MeasuringFacts
from amanda.tools.steps import Steps


class ProfileTool(amanda.Tool):
    """Measure the time and memory of each op; `result` has the profile, `clear` begins a new one.

    wait, warmup, active, repeat: the schedule.  In each cycle `wait` and `warmup` steps are not recorded,
    then `active` steps are, or all steps if `active` is 0; there are `repeat` cycles, without end for 0.
    Steps are counted as `amanda.tools.steps.Steps` counts them, or begin at calls of `step()`.
    backward: measure backward ops too.  memory: record the memory of tensors.
    kernels: in PyTorch, run torch.profiler in the recorded steps to find the kernels of each op.
    limit: number of executions in the timeline; the table counts all executions.

    Raises OptionError for numbers below 0, and for `repeat` without `active`.
    """

    is_copied_when_used = False

    @checked
    def __init__(
        self,
        wait: NonNegativeInt = 0,
        warmup: NonNegativeInt = 0,
        active: NonNegativeInt = 0,
        repeat: NonNegativeInt = 0,
        backward: bool = True,
        memory: bool = True,
        kernels: bool = False,
        limit: NonNegativeInt = 100_000,
    ) -> None:
        super().__init__()
        schedule = Schedule(wait, warmup, active, repeat)
        schedule.check()
        self._follows_memory, self._tells_kernels = memory, kernels
        self._kernels = KernelProfiler()
        self._recorder = Recorder(schedule, limit, self._read_kernels)
        self._sequences: dict[int, int] = {}
        self._untimed: dict[str, set[tuple[int, int | None]]] = {}
        self._steps = Steps()
        self._steps.on_step(self._recorder.on_step)
        self.depends_on(self._steps, StandardMapping(), MappingTool(RULES))
        self.add_inst_for_op(self._instrument)
        if backward:
            self.add_inst_for_op(self._instrument, backward=True)

    def step(self) -> None:
        """Begin a step; from then on only calls of this method begin steps."""
        self._steps.step()

    @property
    def result(self) -> ProfileResult:
        """Return the profile so far."""
        for clock in self._recorder.clocks.values():
            clock.wait()
        self._read_kernels()
        self._recorder.memory.process_deaths()
        result = ProfileResult.of(self._recorder, self._kernels.obstacle)
        result.remarks = [f"{len(ops):,} ops {reason}." for reason, ops in self._untimed.items()]
        return result

    def clear(self) -> None:
        """Forget the records, and count the present step as step 0; analysed ops stay analysed."""
        self._read_kernels()
        self._recorder.clear()

    def _read_kernels(self) -> None:
        self._kernels.stop(list(self._recorder.places.values()))

    def _instrument(self, context: amanda.OpContext) -> None:
        """Insert the routines that measure the time and memory of an op."""
        facts: MeasuringFacts = context["profile"]
        if facts.untimed:
            op = context.get_op_id(), context.get_backward_op_id()
            self._untimed.setdefault(facts.untimed, set()).add(op)
        if facts.passes:
            return
        before: Callable[..., None] = context.insert_before_op
        after: Callable[..., None] = context.insert_after_op
        if context.is_backward():
            before, after = context.insert_before_backward_op, context.insert_after_backward_op
        place = self._profile_of(context, facts)
        if self._follows_memory and facts.storages is not None:
            sequence, saved = (facts.sequence, facts.saved) if context.is_forward() else (None, None)
            before(self._record_inputs, storages=facts.storages, sequence=sequence)
            after(self._record_outputs, place=place, storages=facts.storages, saved=saved)
        elif self._follows_memory and facts.nbytes is not None:
            after(self._add_output_bytes, place=place, nbytes=facts.nbytes)
        if facts.parallel:
            is_fed = _is_fed(context)
            begin, end = self._recorder.parallel_routines(place, is_fed)
            if is_fed:
                before(begin)
        else:
            begin, end = self._recorder.nested_routines(place, self._probes(facts))
            before(begin, [])
        after(end, [])

    def _probes(self, facts: MeasuringFacts) -> list[Probe]:
        """Return the probes of an op besides the program's clock: torch.profiler, and the clock of a GPU."""
        probes: list[Probe] = [self._kernels] if self._tells_kernels and facts.ranges else []
        if facts.gpu is not None and facts.record is not None:
            probes.append(self._recorder.clocks.setdefault(facts.gpu, DeviceClock(facts.record)))
        return probes

    def _profile_of(self, context: amanda.OpContext, facts: MeasuringFacts) -> OpProfile:
        """Return the profile of a context's op, a new one at the first analysis."""
        op, backward = context.get_op_id(), context.get_backward_op_id()
        places = self._recorder.places
        if (op, backward) not in places:
            phase, kind, name = context["phase"], context["type"], context.get_op_type()
            if context.is_backward():
                phase, kind = "backward", context["backward_type"]
                name = str(context.get_backward_op().__name__)
            places[op, backward] = OpProfile(
                phase, kind, context.get_scope(), context.get_source(), name, backward or op, op,
                runs_others=facts.runs_others, index=len(places),
            )  # fmt: skip
        return places[op, backward]

    @amanda.observer
    def _record_inputs(self, *values: Any, storages: Any, sequence: Any, recomputed: bool) -> None:
        if sequence is not None:
            self._sequences[get_ident()] = sequence()
        self._recorder.memory.record_storages(storages(values), None)

    @amanda.observer
    def _record_outputs(
        self, *values: Any, place: OpProfile, storages: Any, saved: Any, recomputed: bool
    ) -> None:
        """Record the memory of an op's outputs, and of what the op saved for its backward pass."""
        if recomputed:
            place = self._recorder.recomputation(place)
        self._recorder.memory.record_storages(storages(values), place)
        if saved is not None:
            self._recorder.memory.record_storages(saved(values, self._sequences[get_ident()]), place)

    @amanda.observer
    def _add_output_bytes(self, *values: Any, place: OpProfile, nbytes: Any, recomputed: bool) -> None:
        if recomputed:
            place = self._recorder.recomputation(place)
        if self._recorder.recording:
            place.allocated = (place.allocated or 0) + nbytes(values)


def _is_fed(context: amanda.OpContext) -> bool:
    """Return True if the op has an input, at whose arrival the op begins."""
    if context.is_backward():
        return bool(context.get_grad_outputs())
    values, shape = context.get_inputs(), context["shape"]
    return any(isinstance(value, (list, tuple)) or shape(value) is not None for value in values)
