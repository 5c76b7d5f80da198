"""The tools: stages of the ops that scopes execute, or protected ops in another process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import amanda
from amanda.errors import ArtefactError, OptionError, ToolError
from amanda.options import Name, PositiveInt, Range, Share, checked, deprecated
from amanda.tools.flops import FlopsTool
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.partition import _pytorch_protection, _pytorch_stand_ins
from amanda.tools.partition._cut import CutRequest, Schedule
from amanda.tools.partition._enclave import ProtectError
from amanda.tools.partition._result import PartitionResult, PartsResult
from amanda.tools.partition._step_work import StepWork, work_in_flops, work_in_seconds
from amanda.tools.profile import ProfileTool
from amanda.tools.results import Column, Result, amount, shortened
from amanda.tools.select import Selection, as_remarks
from amanda.tools.steps import Steps
from amanda.tools.trace import TraceTool

if TYPE_CHECKING:
    from amanda.tools.partition._pytorch_protection import Protection


class ProtectedResult(Result):
    """A row for each op in the protected process, with the tensors and bytes that crossed for it.

    model: after `finalize`, the model that has its parameters back.
    """

    name: ClassVar[str] = "partition_protected"
    model: Any = None
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=32)),
        Column("source", show=partial(shortened, width=32)),
        Column("calls", show="{:,}".format, total=True, merge="sum"),
        Column("crossed", show=partial(amount, unit="B"), total=True, unit="B", merge="sum"),
        Column("sent > received", show=partial(shortened, width=60)),
    )  # fmt: skip

    def __init__(self, protection: Protection | None, text: str, remarks: Sequence[str]) -> None:
        # Copies, which later calls and `clear` do not change.
        records = [] if protection is None else list(protection.traffic.values())
        self.traffic = [replace(record, headers=dict(record.headers)) for record in records]
        self.pid = None if protection is None else protection.pid
        self._selection_text, self.remarks = text, remarks

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return how many parameters are protected, and how many bytes crossed."""
        parameter_records = [record for record in self.traffic if record.phase == "hold"]
        size = amount(sum(record.bytes for record in self.traffic), unit="B")
        if not parameter_records:
            return f"No parameter is protected by {self._selection_text}"
        return (
            f"{len(parameter_records)} parameters and buffers of {self._selection_text} are in process "
            f"{self.pid} alone; {size} crossed"
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, and for each parameter and optimizer."""
        return [
            (record.phase, record.type, record.module, record.source, record.calls, record.bytes,
             "; ".join(record.headers))
            for record in self.traffic
        ]  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        """Return the selection, and each op with the tensors that were declared."""
        return {
            "protect": self._selection_text,
            "declared": [
                {"phase": record.phase, "type": record.type, "module": record.module,
                 "forms": list(record.headers)}
                for record in self.traffic
            ],
        }  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return which values cross, and what the process does not defend against."""
        return [
            "Inputs, outputs and gradients of each selected op cross; values of parameters cross once, "
            "to the process. The program sees NaN in their place. This separates processes; it is no defence "
            "against programs of the same user."
        ]


Microbatches: TypeAlias = Annotated[int, Range(1, 1 << 14)]
ByteCost: TypeAlias = Annotated[float, Range(0, 1e18)]

ResultT = TypeVar("ResultT", PartitionResult, ProtectedResult)


class PartitionTool(amanda.Tool, Generic[ResultT]):
    """Plan pipeline stages of a model for several devices, with balanced loads and few bytes between stages.

    `clear` forgets what was executed.

    Args:
        stages: Number of stages, 2 if None.
        cost: The cost of an op: its FLOPs, or its measured "time".
        method: "order" cuts the order of execution to make the slowest stage as fast as possible; "min_cut"
            cuts into two sides with the fewest bytes between them.
        microbatches: The pipeline, which determines its bubble and the memory of activations.
        schedule: See `microbatches`.
        memory: Bytes of each device, None for no limit.
        copies: Device memory of a parameter, as a multiple of its bytes; None for 4 in training (value,
            gradient, two moments of Adam) and 1 otherwise.
        byte_cost: FLOPs, or seconds, to send a byte between stages; a link can then be the slowest part.
        tolerance: Allowed slowdown of the slowest stage, as a share, to send fewer bytes; with "min_cut" the
            allowed difference of a side from half.
        protect: Ops that another process runs, which alone holds their parameters; there are no stages then,
            and `result` is a `ProtectedResult`.  Select them by "module=classifier|layer4.*" or "type=...".
            This separates processes; it is no defence against programs of the same user, which can read
            their memory.

    `amanda.instrument` of an ONNX file with this tool writes `partition.json` and a file for each stage, or
    for the ops before, in and after the protected part; `StageChain` runs these files, and `result` is then
    a `PartsResult`.  The first read of a result's stages computes them, and raises PartitionError if no cut
    meets the options.

    Raises:
        OptionError: For invalid options.
        ToolError: For method="min_cut" with options of "order", and for a `protect` of another form.
    """

    purpose = "change"
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
            self.request = CutRequest(
                2 if stages is None else stages, method, microbatches, schedule, memory, copies, byte_cost,
                tolerance,
            )  # fmt: skip
            self._delegate = StagesTool(self.request, cost)
        else:
            # Every option of a cut, as protect takes none of them.
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

        Once files were written, the parts that they have.
        """
        return cast("ResultT", self._delegate.result if self._parts_result is None else self._parts_result)

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Write the parts of an ONNX file; called by `amanda.instrument`.

        Costs are those of the sessions of the model that ran in scopes of the tool, if there were some, else
        FLOPs by the shapes in the file.  Raises ArtefactError for another kind of file, or sessions of
        another model; ToolError for cost="time" without sessions; PartitionError and ProtectError for what
        cannot be cut so.
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

        The state of their optimizers ends with it.

        Args:
            model: The model that ran in a scope of the tool.

        Returns:
            `result`, whose `model` is the model.

        Raises:
            ProtectError: For a model without protected parameters, and if the process has died.
            ToolError: Without `protect`, as stages are a plan that changes no parameter.
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

    def __init__(self, request: CutRequest, cost: Literal["flops", "time"]) -> None:
        super().__init__()
        _check_method(request)
        self._request = request
        # A cut reads shapes and producers, no arguments.
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
        """Write a file for each stage of an ONNX file; see `PartitionTool.write_parts`.

        Costs are those of sessions that ran in the tool's scope; without any, FLOPs by shapes of the file.
        Raises ToolError without sessions for cost='time'.
        """
        from amanda.tools.partition._onnx_files import write_stages

        # Sessions that ran in the scope know shapes that a file leaves open.
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


def _check_method(request: CutRequest) -> None:
    """Raise ToolError for other than 2 stages, and for options that it ignores, with method="min_cut"."""
    if request.method == "min_cut" and (
        request.stages != 2 or request.memory is not None or request.byte_cost
    ):
        raise ToolError(
            "method='min_cut' makes 2 stages and knows neither memory nor byte_cost; it was given "
            f"stages={request.stages}, memory={request.memory}, byte_cost={request.byte_cost}: use "
            "method='order' for these"
        )


logger = logging.getLogger("amanda")


class ProtectTool(amanda.Tool):
    """Runs selected ops in a process of their own, which alone holds the parameters that they read.

    This separates processes; it is no defence against programs of the same user, which can read their memory.

    protect: "module=a|b.*", "type=linear", "exclude=a.b" or several of them, apart by a space; see
    `amanda.tools.select.Selection`.
    `finalize` brings the parameters back.  Raises ToolError for another text; ProtectError where an op
    cannot run there.
    """

    def __init__(self, protect: str) -> None:
        super().__init__()
        self._selection_text = protect
        self._selection = _parse_selection(protect)
        self._protection: Protection | None = None
        self.depends_on(
            StandardMapping(), MappingTool([["pytorch/*/eager", _pytorch_protection.provide_protection]])
        )
        self.add_inst_for_op(self._replace_op)

    @property
    def result(self) -> ProtectedResult:
        """Return the protected parameters, and the traffic of each op."""
        return ProtectedResult(
            self._protection, self._selection_text, as_remarks(self._selection.unmatched())
        )

    def write_onnx(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> PartsResult:
        """Write files of protected and public ops of an ONNX file; see `PartitionTool.write_parts`."""
        from amanda.tools.partition._onnx_files import write_protected

        return write_protected(
            _parse_selection(self._selection_text), self._selection_text, source, folder, analyse, about
        )

    def clear(self) -> None:
        """Reset the counts of traffic; parameters stay in the process."""
        if self._protection is not None:
            for record in self._protection.traffic.values():
                record.calls = record.bytes = 0

    def finalize(self, model: Any) -> ProtectedResult:
        """Bring the parameters back into a model, and end the process; see `PartitionTool.finalize`."""
        if self._protection is not None and not self._protection.is_of(model):
            raise ProtectError(
                f"PartitionTool.finalize was given a {type(model).__name__} that has none of the protected "
                "parameters; give the model that ran in the scope"
            )
        # Read before the end, which drops the counts.
        result = self.result
        self.end()
        result.model = model
        return result

    def end(self) -> None:
        """Bring the parameters back into the program, and end the process, with its optimizers' state.

        No effect if nothing is protected.  Raises ProtectError if the process has died.
        """
        protection, self._protection = self._protection, None
        if protection is not None:
            self.load_state_dict({})  # drops the plans, which call the process
            protection.release()

    def _replace_op(self, context: amanda.OpContext) -> None:
        """Replace a selected op by its execution in the process; check that no other op reads a stand-in.

        Backward ops, and views of tensors of the program, stay as they are.  Raises ToolError for a selected
        op of another framework.
        """
        if context["phase"] != "forward":
            return
        is_pytorch_eager = "protection" in context  # by the rule of this tool
        if self._protection is None and is_pytorch_eager:
            # Made at the first op, once torch is there.
            self._protection = context["protection"]()
        protection = self._protection
        if not self._selection(context):
            if protection is not None and is_pytorch_eager:
                # An op outside the selection would compute with NaN.
                protection.stand_ins.record_open_reads(context)
            return
        op_text = f"{context['type']} at {context.get_source() or context.get_op_type()}"
        if protection is None or not is_pytorch_eager:
            raise ToolError(
                f"protect runs ops of PyTorch's eager mode in another process; {op_text} is of "
                f"{context.namespace}"
            )
        if _pytorch_stand_ins.shares_memory(context) and not protection.stand_ins.are_read_by(context):
            return  # a view of a tensor of the program is made in the program, where writes reach the tensor
        self._run_in_process(context, protection, op_text)

    def _run_in_process(self, context: amanda.OpContext, protection: Protection, op_text: str) -> None:
        """Move an op's parameters to the process, and replace the op by its execution there."""
        callable_path = _pytorch_stand_ins.find_callable_path(context)
        # Before the op runs: its parameters are not read in the program once more.
        protection.adopt(context)
        key, module = context.get_op_id(), context.get_scope()
        record = protection.traffic_record("forward", key, context["type"], module, context.get_source())
        logger.info("protect: %s in module %r runs in process %s", op_text, module, protection.pid)
        in_place, random = context["in_place"], _pytorch_stand_ins.is_random(context)
        # An op in place on a stand-in writes in the process, and the program's tensor stays NaN.
        tensor = context.get_inputs()[0] if in_place else None
        target = None if tensor is None or protection.stand_ins.find(tensor) is None else tensor
        context.replace_op(
            protection.run_in_process, record=record, op=callable_path, in_place=in_place, random=random,
            key=key, target=target,
        )  # fmt: skip


def _parse_selection(text: str) -> Selection:
    """Return the selection of text such as "module=NAME|NAME type=NAME"; raise ToolError for other text."""
    form = "module=NAME|NAME, type=NAME|NAME or exclude=NAME|NAME, or several, apart by a space"
    if not isinstance(text, str):
        raise ToolError(f"protect is {text!r}; it is a string such as 'module=NAME|NAME' or 'type=NAME|NAME'")
    patterns_by_name: dict[str, list[str]] = {}
    for part in text.split():
        name, _, patterns = part.partition("=")
        if name not in ("module", "type", "exclude") or not patterns:
            raise ToolError(f"protect is {text!r}; it is {form}")
        patterns_by_name.setdefault(name, []).extend(patterns.split("|"))
    if not patterns_by_name:
        raise ToolError("protect is empty; give module=NAME|NAME or type=NAME|NAME")
    types, modules = patterns_by_name.get("type"), patterns_by_name.get("module")
    return Selection(types, modules, exclude=patterns_by_name.get("exclude"))
