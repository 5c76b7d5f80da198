"""The tool: reads the clock next to each op and its backward ops, and follows the memory of tensors."""

from __future__ import annotations

from _thread import get_ident
from typing import Any

import amanda
from amanda.errors import ToolError
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.profile import _pytorch, _tensorflow
from amanda.tools.profile._kernels import Kernels
from amanda.tools.profile._memory import Memory
from amanda.tools.profile._place import Place
from amanda.tools.profile._recorder import Recorder, Routines
from amanda.tools.profile._recording import Recording
from amanda.tools.profile._result import ProfileResult
from amanda.tools.profile._schedule import Schedule
from amanda.tools.steps import Steps


class ProfileTool(amanda.Tool):
    """Measures what is executed in its scopes; `result` tells, `clear` starts anew.

    wait, warmup, active, repeat: which steps are recorded: in each cycle `wait` and `warmup` steps pass by
    and `active` are recorded, all that follow where it is 0; `repeat` cycles, 0 for no end.  Steps are
    counted as `amanda.tools.steps.Steps` does, or begin where `step()` says so.
    backward: measure backward ops too.  memory: follow the memory of tensors.
    kernels: in PyTorch, let torch.profiler run in the recorded steps and tell the kernels of each op.
    limit: executions that are kept for the timeline; sums go on beyond.

    Raises ToolError for numbers below 0, and for `repeat` without `active`.
    """

    def __init__(
        self,
        wait: int = 0,
        warmup: int = 0,
        active: int = 0,
        repeat: int = 0,
        backward: bool = True,
        memory: bool = True,
        kernels: bool = False,
        limit: int = 100_000,
    ) -> None:
        super().__init__()
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ToolError(f"limit is a number of executions, 0 or more, not {limit!r}")
        schedule = Schedule(wait, warmup, active, repeat)
        schedule.check()
        self._memory = Memory(limit) if memory else None
        self._kernels = Kernels() if kernels else None
        self._recorder = Recorder(schedule, limit, self._memory, self._read_kernels)
        self._sequences: dict[int, int] = {}
        self._steps = Steps()
        self._steps.on_step(self._recorder.on_step)
        rules = [["*", roles], ["pytorch", _pytorch.roles], ["tensorflow", _tensorflow.roles]]
        rules += [[f"tensorflow/*/{mode}", _tensorflow.in_graph] for mode in ("graph", "function")]
        self.depends_on(self._steps, StandardMapping(), MappingTool(rules))
        self.add_inst_for_op(self._forward)
        if backward:
            self.add_inst_for_op(self._backward, backward=True)

    def step(self) -> None:
        """Begin a step here; from now on none begins by itself."""
        self._steps.step()

    @property
    def result(self) -> ProfileResult:
        """The profile so far."""
        self._recorder.device_times.settle()
        self._read_kernels()
        if self._memory is not None:
            self._memory.drain()
        obstacle = self._kernels.obstacle if self._kernels is not None else ""
        return ProfileResult(Recording.of(self._recorder, obstacle))

    def clear(self) -> None:
        """Forget what was recorded; what was analysed stays, and the present step is step 0."""
        self._read_kernels()
        self._recorder.clear()

    def _read_kernels(self) -> None:
        if self._kernels is not None:
            self._kernels.stop(list(self._recorder.places.values()))

    def _forward(self, context: amanda.OpContext) -> None:
        if context["profile.passes"]:
            return
        place = self._place(context, context["phase"], context["type"])
        self._follow_memory(context, place)
        if context["profile.parallel"] and not _has_tensor(context):
            context.insert_after_op(self._recorder.counting(place), outputs=[])
            return
        begin, end = self._routines(context, place)
        context.insert_before_op(begin, inputs=None if context["profile.parallel"] else [])
        context.insert_after_op(end, outputs=[])

    def _backward(self, context: amanda.OpContext) -> None:
        if context["profile.passes"]:
            return
        place = self._place(context, "backward", context["backward_type"])
        self._follow_memory(context, place)
        if context["profile.parallel"] and not context.get_grad_outputs():
            context.insert_after_backward_op(self._recorder.counting(place), grad_inputs=[])
            return
        begin, end = self._routines(context, place)
        context.insert_before_backward_op(begin, grad_outputs=None if context["profile.parallel"] else [])
        context.insert_after_backward_op(end, grad_inputs=[])

    def _place(self, context: amanda.OpContext, phase: str, kind: str) -> Place:
        key = context.get_op_id(), context.get_backward_op_id()
        places = self._recorder.places
        if key not in places:
            backward = context.get_backward_op()
            name = context.get_op_type() if backward is None else str(backward.__name__)
            places[key] = Place(
                phase, kind, context.get_scope(), context.get_source(), name, key[1] or key[0], key[0],
                runs_others=context["profile.runs_others"], index=len(places),
            )  # fmt: skip
        return places[key]

    def _routines(self, context: amanda.OpContext, place: Place) -> Routines:
        if context["profile.parallel"]:
            return self._recorder.in_parallel(place)
        if context["profile.device"] is not None:
            routines = self._recorder.on_device(place, context["profile.device"])
        else:
            routines = self._recorder.in_sequence(place)
        if self._kernels is not None and context.namespace.matches("pytorch"):
            return self._kernels.around(routines, place, self._recorder)
        return routines

    def _follow_memory(self, context: amanda.OpContext, place: Place) -> None:
        if self._memory is None:
            return
        forward = context.is_forward()
        before = context.insert_before_op if forward else context.insert_before_backward_op
        after = context.insert_after_op if forward else context.insert_after_backward_op
        if context["profile.storages"] is not None:
            kwargs = {"storages": context["profile.storages"]}
            before(self._given, sequence=context["profile.sequence"] if forward else None, **kwargs)
            after(self._made, place=place, saved=context["profile.saved"] if forward else None, **kwargs)
        elif context["profile.bytes"] is not None:
            after(self._sized, place=place, nbytes=context["profile.bytes"])

    @amanda.observer
    def _given(self, *values: Any, storages: Any, sequence: Any) -> None:
        assert self._memory is not None
        if sequence is not None:
            self._sequences[get_ident()] = sequence()
        self._memory.meet(storages(values), None)

    @amanda.observer
    def _made(self, *values: Any, place: Place, storages: Any, saved: Any) -> None:
        assert self._memory is not None
        self._memory.meet(storages(values), place)
        if saved is not None:
            self._memory.meet(saved(values, self._sequences[get_ident()]), place)

    @amanda.observer
    def _sized(self, *values: Any, place: Place, nbytes: Any) -> None:
        if self._recorder.recording:
            place.allocated = (place.allocated or 0) + (nbytes(values) or 0)


def roles(context: amanda.OpContext) -> None:
    """Write what the tool asks for where no framework's rule does."""
    for key in ("passes", "parallel", "runs_others"):
        context.setdefault(f"profile.{key}", False)
    for key in ("storages", "saved", "sequence", "bytes", "device"):
        context.setdefault(f"profile.{key}", None)


def _has_tensor(context: amanda.OpContext) -> bool:
    values = context.get_inputs()
    return any(context["shape"](one) is not None or isinstance(one, (list, tuple)) for one in values)
