"""The tool: traces and measures what its scopes execute, and cuts it into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import amanda
from amanda.errors import ArtefactError, ToolError
from amanda.tools.flops import FlopsTool
from amanda.tools.kit import check_one_of
from amanda.tools.partition._cut import Request, Schedule
from amanda.tools.partition._protect import ProtectedResult, ProtectTool
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._work import Work, of_flops, of_time
from amanda.tools.profile import ProfileTool
from amanda.tools.steps import Steps
from amanda.tools.trace import TraceTool


class PartitionTool(amanda.Tool):
    """Cuts what its scopes execute into stages for several devices; `result` tells, `clear` starts anew.

    stages: how many, 2 if None.  cost: of an op, its FLOPs, or the "time" that it took.
    method: "order" cuts the order of execution so that the slowest stage is as fast as can be; "min_cut"
    cuts into two sides with the fewest bytes between them.
    microbatches, schedule: how the stages are to be run, for the bubble and for the activations in flight.
    memory: most bytes of a device, None for no bound.  copies: how often a parameter's bytes are held; None
    for 4 in training (value, gradient, two moments of Adam) and 1 otherwise.
    byte_cost: FLOPs, or seconds, that a byte takes between stages; a link may be the slowest then.
    tolerance: by how much the slowest stage may be slower so that fewer bytes cross; with "min_cut" by how
    much a side may be off half.
    protect: ops that run in another process, which alone holds their parameters, instead of stages:
    "module=classifier|layer4.*", also with "type="; see `ProtectedResult`.
    Given to `amanda.instrument` with an ONNX file, it writes a file for each stage, or for the protected ops
    and those before and after them, and `partition.json`; `StageChain` runs them.

    Raises ToolError for options that are none of these; `result` raises PartitionError where no cut is
    what was asked for.
    """

    def __init__(
        self,
        stages: int | None = None,
        cost: Literal["flops", "time"] = "flops",
        method: Literal["order", "min_cut"] = "order",
        microbatches: int = 8,
        schedule: Schedule = "1f1b",
        memory: int | None = None,
        copies: int | None = None,
        byte_cost: float = 0.0,
        tolerance: float = 0.05,
        protect: str | None = None,
    ) -> None:
        super().__init__()
        self._protected: ProtectTool | None = None
        self._protect = protect
        self._parts: PartitionResult | None = None
        if protect is not None:
            options = {
                "stages": stages, "cost": cost, "method": method, "microbatches": microbatches,
                "schedule": schedule, "memory": memory, "copies": copies, "byte_cost": byte_cost,
                "tolerance": tolerance,
            }  # fmt: skip
            defaults = signature(PartitionTool).parameters
            for name, value in options.items():
                if value != defaults[name].default:
                    raise ToolError(f"{name} is {value!r} and protect is {protect!r}; give one of them")
            self._protected = ProtectTool(protect)
            self.depends_on(self._protected)
            return
        stages = 2 if stages is None else stages
        check_one_of("cost", cost, ("flops", "time"), ToolError)
        check_one_of("method", method, ("order", "min_cut"), ToolError)
        check_one_of("schedule", schedule, ("1f1b", "gpipe"), ToolError)
        counts = {"stages": stages, "microbatches": microbatches, "memory": memory, "copies": copies}
        for name, given in counts.items():
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                raise ToolError(f"{name} is {given!r}; it is a whole number from 1")
        for name, number, most in (("byte_cost", byte_cost, float("inf")), ("tolerance", tolerance, 1.0)):
            if not isinstance(number, (int, float)) or not 0 <= number <= most:
                raise ToolError(f"{name} is {number!r}; it is a number from 0 to {most:g}")
        if method == "min_cut" and (stages != 2 or memory is not None or byte_cost):
            raise ToolError(
                f"method='min_cut' makes 2 stages and knows neither memory nor byte_cost; it was given "
                f"stages={stages}, memory={memory}, byte_cost={byte_cost}: use method='order' for these"
            )
        self.request = Request(stages, method, microbatches, schedule, memory, copies, byte_cost, tolerance)
        self._trace, self._steps = TraceTool(attributes=False), Steps()
        self._measure: FlopsTool | ProfileTool = FlopsTool() if cost == "flops" else ProfileTool(memory=False)
        self.depends_on(self._trace, self._measure, self._steps)

    @property
    def result(self) -> PartitionResult | ProtectedResult:
        """Return the stages of what was executed so far, a step on the average, or what is protected.

        Once files were written, those that they have.
        """
        if self._parts is not None:
            return self._parts
        if self._protected is not None:
            return self._protected.result
        return PartitionResult(self._work(), self.request)

    def _work(self) -> Work:
        graph, steps = self._trace.graph, self._steps.number + 1
        if isinstance(self._measure, FlopsTool):
            return of_flops(graph, self._measure.result, steps)
        return of_time(graph, self._measure.result, steps)

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Write the parts of an ONNX file; called by `amanda.instrument`.

        Costs are those of the sessions of the model that ran in scopes of the tool, if there were some, else
        FLOPs by the shapes in the file.  Raises ArtefactError for another kind of file, ToolError for
        cost="time" without sessions, PartitionError and ProtectError for what cannot be cut so.
        """
        if source.suffix != ".onnx":
            raise ArtefactError(f"{source} is no ONNX file; partition writes the parts of ONNX files alone")
        from amanda.tools.partition import _onnx

        if self._protect is not None:
            self._parts = _onnx.write_protected(self._protect, source, folder, analyse, about)
            return
        measured = self._work() if self._trace.graph.ops else None
        if measured is None and not isinstance(self._measure, FlopsTool):
            raise ToolError(
                f"cost='time' is measured while a session runs, and none of {source} has: run one with "
                "amanda.apply(tool) before amanda.instrument, or take cost='flops'"
            )
        self._parts = _onnx.write_stages(self.request, measured, source, folder, analyse, about)

    def clear(self) -> None:
        """Forget what was executed or written; protected parameters stay where they are."""
        self._parts = None
        if self._protected is not None:
            self._protected.clear()
            return
        self._trace.clear()
        self._measure.clear()
        self._steps.restart()

    def release(self) -> None:
        """Bring protected parameters back into the program, and end the process that holds them.

        The state of their optimizers ends with it.
        """
        if self._protected is not None:
            self._protected.release()
