"""The tool: stages of the ops that its scopes execute, or protected ops in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

import amanda
from amanda.errors import ArtefactError, OptionError, ToolError
from amanda.options import Name, PositiveInt, Range, Share, checked, deprecated
from amanda.tools.flops import FlopsTool
from amanda.tools.partition._cut import Request, Schedule
from amanda.tools.partition._parts import PartsResult
from amanda.tools.partition._protect import ProtectedResult, ProtectTool
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._step_work import StepWork, work_in_flops, work_in_seconds
from amanda.tools.profile import ProfileTool
from amanda.tools.steps import Steps
from amanda.tools.trace import TraceTool

Microbatches: TypeAlias = Annotated[int, Range(1, 1 << 14)]
ByteCost: TypeAlias = Annotated[float, Range(0, 1e18)]

ResultT = TypeVar("ResultT", PartitionResult, ProtectedResult)


class PartitionTool(amanda.Tool, Generic[ResultT]):
    """Cuts a model into pipeline stages for several devices, with even loads and few bytes between them.

    stages: number of stages, 2 if None.  cost: of an op, its FLOPs, or the "time" that it took.
    method: "order" cuts the order of execution so that the slowest stage is as fast as can be; "min_cut"
    cuts into two sides with the fewest bytes between them.
    microbatches, schedule: of the pipeline, for its bubble and for the activations in flight.
    memory: bytes of each device, None for no limit.  copies: how often a device holds a parameter's bytes;
    None for 4 in training (value, gradient, two moments of Adam) and 1 otherwise.
    byte_cost: FLOPs, or seconds, to send a byte between stages; the slowest of all may then be a link.
    tolerance: share by which the slowest stage may be slower so that fewer bytes cross; with "min_cut" the
    share by which a side may differ from half.
    protect: ops to run in another process, which alone holds their parameters, instead of stages:
    "module=classifier|layer4.*", also with "type="; `result` is then a `ProtectedResult`.  This separates
    processes; it is no defence against programs of the same user, which can read their memory.
    `amanda.instrument` with an ONNX file and this tool writes a file for each stage, or for the protected ops
    and those before and after them, and `partition.json`; `StageChain` runs these files, and `result` is then
    a `PartsResult`.

    `clear` forgets what was executed.  Raises OptionError for invalid options; `result` raises PartitionError
    if no cut meets the options.
    """

    is_copied_when_used = False

    @overload
    def __init__(
        self: PartitionTool[PartitionResult],
        stages: PositiveInt | None = None,
        cost: Literal["flops", "time"] = "flops",
        method: Literal["order", "min_cut"] = "order",
        microbatches: Microbatches = 8,
        schedule: Schedule = "1f1b",
        memory: PositiveInt | None = None,
        copies: PositiveInt | None = None,
        byte_cost: ByteCost = 0.0,
        tolerance: Share = 0.05,
    ) -> None: ...

    @overload
    def __init__(self: PartitionTool[ProtectedResult], *, protect: str) -> None: ...

    @checked
    def __init__(
        self,
        stages: PositiveInt | None = None,
        cost: Literal["flops", "time"] = "flops",
        method: Literal["order", "min_cut"] = "order",
        microbatches: Microbatches = 8,
        schedule: Schedule = "1f1b",
        memory: PositiveInt | None = None,
        copies: PositiveInt | None = None,
        byte_cost: ByteCost = 0.0,
        tolerance: Share = 0.05,
        protect: Name | None = None,
    ) -> None:
        super().__init__()
        self._parts_result: PartsResult | None = None
        self._delegate: StagesTool | ProtectTool
        if protect is None:
            self.request = Request(
                2 if stages is None else stages, method, microbatches, schedule, memory, copies, byte_cost,
                tolerance,
            )  # fmt: skip
            self._delegate = StagesTool(self.request, cost)
        else:
            options = {
                "stages": stages, "cost": cost, "method": method, "microbatches": microbatches,
                "schedule": schedule, "memory": memory, "copies": copies, "byte_cost": byte_cost,
                "tolerance": tolerance,
            }  # fmt: skip
            defaults = signature(PartitionTool).parameters
            for name, value in options.items():
                if value != defaults[name].default:
                    raise OptionError(f"{name} is {value!r} and protect is {protect!r}; give one of them")
            self._delegate = ProtectTool(protect)
        self.depends_on(self._delegate)

    @property
    def result(self) -> ResultT:
        """Return the stages of what was executed so far, a step on the average, or what is protected.

        Once files were written, those that they have.
        """
        return cast("ResultT", self._delegate.result if self._parts_result is None else self._parts_result)

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Write the parts of an ONNX file; called by `amanda.instrument`.

        Costs are those of the sessions of the model that ran in scopes of the tool, if there were some, else
        FLOPs by the shapes in the file.  Raises ArtefactError for another kind of file, OptionError for
        cost="time" without sessions, PartitionError and ProtectError for what cannot be cut so.
        """
        if source.suffix != ".onnx":
            raise ArtefactError(f"{source} is no ONNX file; partition writes the parts of ONNX files alone")
        self._parts_result = self._delegate.write_onnx(source, folder, analyse, about)

    def clear(self) -> None:
        """Forget what was executed or written; protected parameters stay where they are."""
        self._parts_result = None
        self._delegate.clear()

    def finalize(self, model: Any) -> ProtectedResult:
        """Bring protected parameters back into a model, and end the process that holds them.

        The state of their optimizers ends with it.  Returns `result`, whose `model` is the model.
        Raises ProtectError for a model without protected parameters, and ToolError without `protect`, as
        stages are a plan that changes no parameter.
        """
        if not isinstance(self._delegate, ProtectTool):
            raise ToolError(
                "PartitionTool.finalize brings protected parameters back, and this tool has no protect; "
                "result.pipeline, or amanda.instrument of an ONNX file, makes the stages"
            )
        return self._delegate.finalize(model)

    @deprecated(use="finalize(model)", since="amanda-labs 0.2", gone="0.4")
    def release(self) -> None:
        """Bring protected parameters back into the program.  Deprecated: use `finalize`."""
        if isinstance(self._delegate, ProtectTool):
            self._delegate.end()


class StagesTool(amanda.Tool):
    """Traces and measures the ops that its scopes execute, and cuts them into stages.

    cost: of an op, its FLOPs, or the "time" that it took.  Raises ToolError for options that exclude each
    other.
    """

    def __init__(self, request: Request, cost: Literal["flops", "time"]) -> None:
        super().__init__()
        _check_method(request)
        self._request = request
        self._trace, self._steps = TraceTool(attributes=False), Steps()
        self._measure: FlopsTool | ProfileTool = FlopsTool() if cost == "flops" else ProfileTool(memory=False)
        self.depends_on(self._trace, self._measure, self._steps)

    @property
    def result(self) -> PartitionResult:
        """Return the stages of the ops that were executed so far, with the costs of an average step."""
        return PartitionResult(self._current_work(), self._request)

    def _current_work(self) -> StepWork:
        """Return the work of the ops that were executed so far."""
        graph, steps = self._trace.graph, self._steps.number + 1
        if isinstance(self._measure, FlopsTool):
            return work_in_flops(graph, self._measure.result, steps)
        return work_in_seconds(graph, self._measure.result, steps)

    def write_onnx(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> PartsResult:
        """Write a file for each stage of an ONNX file; see `PartitionTool.write_parts`."""
        from amanda.tools.partition._onnx_files import write_stages

        measured = self._current_work() if self._trace.graph.ops else None
        if measured is None and not isinstance(self._measure, FlopsTool):
            raise ToolError(
                f"cost='time' is measured while a session runs, and none of {source} has: run one with "
                "amanda.apply(tool) before amanda.instrument, or take cost='flops'"
            )
        return write_stages(self._request, measured, source, folder, analyse, about)

    def clear(self) -> None:
        """Forget the ops that were executed."""
        self._trace.clear()
        self._measure.clear()
        self._steps.clear()


def _check_method(request: Request) -> None:
    """Raise ToolError for options that method="min_cut" ignores."""
    if request.method == "min_cut" and (
        request.stages != 2 or request.memory is not None or request.byte_cost
    ):
        raise ToolError(
            "method='min_cut' makes 2 stages and knows neither memory nor byte_cost; it was given "
            f"stages={request.stages}, memory={request.memory}, byte_cost={request.byte_cost}: use "
            "method='order' for these"
        )
