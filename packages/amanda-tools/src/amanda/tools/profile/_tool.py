"""The tool: measures the time of ops, and the memory of the tensors that they make."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from typing import Any

import amanda
from amanda.options import NonNegativeInt, checked
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.profile._device import DeviceClock
from amanda.tools.profile._kernels import Kernels
from amanda.tools.profile._op import OpProfile
from amanda.tools.profile._recorder import Probe, Recorder, Schedule
from amanda.tools.profile._result import ProfileResult
from amanda.tools.profile._rules import RULES, Roles
from amanda.tools.steps import Steps


class ProfileTool(amanda.Tool):
    """A tool that measures the time and memory of ops; `result` has the profile, `clear` starts anew.

    wait, warmup, active, repeat: the schedule.  In each cycle `wait` and `warmup` steps are not recorded,
    then `active` steps are, or all steps if `active` is 0; there are `repeat` cycles, without end for 0.
    Steps are counted as `amanda.tools.steps.Steps` counts them, or begin at calls of `step()`.
    backward: measure backward ops too.  memory: follow the memory of tensors.
    kernels: in PyTorch, run torch.profiler in the recorded steps to find the kernels of each op.
    limit: number of executions that the timeline keeps; sums have all of them.

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
        self._kernels = Kernels()
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
        """Begin a step; from now on steps begin only at calls of this method."""
        self._steps.step()

    @property
    def result(self) -> ProfileResult:
        """Return the profile so far."""
        for clock in self._recorder.clocks.values():
            clock.settle()
        self._read_kernels()
        self._recorder.memory.drain()
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
        roles: Roles = context["profile"]
        if roles.untimed:
            own = context.get_op_id(), context.get_backward_op_id()
            self._untimed.setdefault(roles.untimed, set()).add(own)
        if roles.passes:
            return
        before: Callable[..., None] = context.insert_before_op
        after: Callable[..., None] = context.insert_after_op
        if context.is_backward():
            before, after = context.insert_before_backward_op, context.insert_after_backward_op
        place = self._place(context, roles)
        if self._follows_memory and roles.storages is not None:
            kept = (roles.sequence, roles.saved) if context.is_forward() else (None, None)
            before(self._given, storages=roles.storages, sequence=kept[0])
            after(self._made, place=place, storages=roles.storages, saved=kept[1])
        elif self._follows_memory and roles.nbytes is not None:
            after(self._sized, place=place, nbytes=roles.nbytes)
        if roles.parallel:
            is_fed = _is_fed(context)
            begin, end = self._recorder.in_parallel(place, is_fed)
            if is_fed:
                before(begin)
        else:
            begin, end = self._recorder.in_sequence(place, self._probes(roles))
            before(begin, [])
        after(end, [])

    def _probes(self, roles: Roles) -> list[Probe]:
        """Return the probes of an op besides the program's clock: torch.profiler, and the clock of a GPU."""
        probes: list[Probe] = [self._kernels] if self._tells_kernels and roles.ranges else []
        if roles.gpu is not None and roles.record is not None:
            probes.append(self._recorder.clocks.setdefault(roles.gpu, DeviceClock(roles.record)))
        return probes

    def _place(self, context: amanda.OpContext, roles: Roles) -> OpProfile:
        op, backward = context.get_op_id(), context.get_backward_op_id()
        places = self._recorder.places
        if (op, backward) not in places:
            phase, kind, name = context["phase"], context["type"], context.get_op_type()
            if context.is_backward():
                phase, kind = "backward", context["backward_type"]
                name = str(context.get_backward_op().__name__)
            places[op, backward] = OpProfile(
                phase, kind, context.get_scope(), context.get_source(), name, backward or op, op,
                runs_others=roles.runs_others, index=len(places),
            )  # fmt: skip
        return places[op, backward]

    @amanda.observer
    def _given(self, *values: Any, storages: Any, sequence: Any, recomputed: bool) -> None:
        if sequence is not None:
            self._sequences[get_ident()] = sequence()
        self._recorder.memory.meet(storages(values), None)

    @amanda.observer
    def _made(self, *values: Any, place: OpProfile, storages: Any, saved: Any, recomputed: bool) -> None:
        if recomputed:
            place = self._recorder.recomputation(place)
        self._recorder.memory.meet(storages(values), place)
        if saved is not None:
            self._recorder.memory.meet(saved(values, self._sequences[get_ident()]), place)

    @amanda.observer
    def _sized(self, *values: Any, place: OpProfile, nbytes: Any, recomputed: bool) -> None:
        if recomputed:
            place = self._recorder.recomputation(place)
        if self._recorder.recording:
            place.allocated = (place.allocated or 0) + nbytes(values)


def _is_fed(context: amanda.OpContext) -> bool:
    """Return True if the op has an input, at whose arrival the op begins."""
    if context.is_backward():
        return bool(context.get_grad_outputs())
    values, shape = context.get_inputs(), context["shape"]
    return any(isinstance(one, (list, tuple)) or shape(one) is not None for one in values)
