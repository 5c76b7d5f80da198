"""The tool: stages of what its scopes execute, or protected parts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

import amanda
from amanda.errors import ArtefactError, OptionError, ToolError
from amanda.options import Name, PositiveInt, Range, Share, checked, deprecated
from amanda.tools.partition._cut import Request, Schedule
from amanda.tools.partition._parts import PartsResult
from amanda.tools.partition._protect import ProtectedResult, ProtectTool
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._stages import StagesTool

Microbatches: TypeAlias = Annotated[int, Range(1, 1 << 14)]
ByteCost: TypeAlias = Annotated[float, Range(0, 1e18)]

ResultT = TypeVar("ResultT", PartitionResult, ProtectedResult)


class PartitionTool(amanda.Tool, Generic[ResultT]):
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
    "module=classifier|layer4.*", also with "type="; `result` is a `ProtectedResult` then.  This separates
    processes; it is no defence against programs of the same user, which can read their memory.
    Given to `amanda.instrument` with an ONNX file, it writes a file for each stage, or for the protected ops
    and those before and after them, and `partition.json`; `StageChain` runs them, and `result` is a
    `PartsResult` then.

    Raises OptionError for options that are none of these; `result` raises PartitionError where no cut is
    what was asked for.
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
        self._written: PartsResult | None = None
        self._part: StagesTool | ProtectTool
        if protect is None:
            self.request = Request(
                2 if stages is None else stages, method, microbatches, schedule, memory, copies, byte_cost,
                tolerance,
            )  # fmt: skip
            self._part = StagesTool(self.request, cost)
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
            self._part = ProtectTool(protect)
        self.depends_on(self._part)

    @property
    def result(self) -> ResultT:
        """Return the stages of what was executed so far, a step on the average, or what is protected.

        Once files were written, those that they have.
        """
        return cast("ResultT", self._part.result if self._written is None else self._written)

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
        self._written = self._part.write_onnx(source, folder, analyse, about)

    def clear(self) -> None:
        """Forget what was executed or written; protected parameters stay where they are."""
        self._written = None
        self._part.clear()

    def finalize(self, model: Any) -> ProtectedResult:
        """Bring protected parameters back into a model, and end the process that holds them.

        The state of their optimizers ends with it.  Returns `result`, whose `model` is the model.
        Raises ProtectError for a model without protected parameters, and ToolError without `protect`, as
        stages are a plan that changes no parameter.
        """
        if not isinstance(self._part, ProtectTool):
            raise ToolError(
                "PartitionTool.finalize brings protected parameters back, and this tool has no protect; "
                "result.pipeline, or amanda.instrument of an ONNX file, makes the stages"
            )
        return self._part.finalize(model)

    @deprecated(use="finalize(model)", since="amanda-labs 0.2", gone="0.4")
    def release(self) -> None:
        """Bring protected parameters back into the program.  Deprecated: use `finalize`."""
        if isinstance(self._part, ProtectTool):
            self._part.end()
