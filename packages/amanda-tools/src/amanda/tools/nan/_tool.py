"""The tool: checks inputs and outputs of each op for NaN and Inf."""

from __future__ import annotations

import logging
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.action import Executions, Observed, all_samples
from amanda.errors import AmandaError
from amanda.options import PositiveInt, checked
from amanda.tools.kit import Dtype, OpTensor, folded_unread, leaves, parameter_paths, remarks_on_packed_inputs
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import (
    CALLING_OPS,
    TENSORFLOW_HANDLES,
    TENSORFLOW_READS,
    UNINITIALISED,
    MappingTool,
    StandardMapping,
)
from amanda.tools.nan._floats import (
    NAN,
    Floats,
    InputRecorder,
    RecordedInputs,
    are_finite,
    floating,
    nonfinite_flags,
    write_torch_roles,
)
from amanda.tools.nan._result import Entered, Finding, FindingKey, NanResult, ScaledBackward, fold
from amanda.tools.select import SelectOptions, select
from amanda.tools.steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("amanda")

# Types of ops that only copy or view their inputs, even memory that is not initialised.
_MOVING_OPS = frozenset(
    """
    Identity IdentityN StopGradient alias as_strided cat clone contiguous copy detach expand expand_as flip
    getitem identity index_select narrow permute repeat reshape select setitem slice split squeeze stack to
    transpose type type_as unbind unsqueeze
    """.split()
)


class NotFiniteError(AmandaError, ArithmeticError):
    """An op produced NaN or Inf; `finding` is the op, or the input or parameter that had it."""

    def __init__(self, finding: Finding | Entered) -> None:
        super().__init__(finding.sentence)
        self.finding = finding

    def __reduce__(self) -> tuple[type[NotFiniteError], tuple[Finding | Entered]]:
        # From the finding, not from the sentence, when it is unpickled.
        return type(self), (self.finding,)


@dataclass(frozen=True, eq=False, slots=True)
class _CheckedOp:
    """An op, the recorder of its inputs, and the paths of the parameters among its inputs, by position.

    dtype: `dtype` of StandardMapping.  moves: True if it only copies or views inputs.  reads: True if it
    reads a handle.  calls: True if it only runs other ops.  are_finite: returns True only if all elements of
    some values are finite.
    op_id: of the forward op.  saved: returns what the backward op under way has saved; None if unknown.
    unread: returns the positions of inputs that an execution does not read.
    """

    phase: str
    type: str
    module: str
    source: str
    dtype: Dtype
    recorder: InputRecorder
    are_finite: Callable[[Sequence[Any]], bool] = lambda values: False
    parameters: Mapping[int, str] = field(default_factory=dict)
    moves: bool = False
    reads: bool = False
    calls: bool = False
    op_id: int = 0
    saved: Callable[[], Sequence[Any] | None] = lambda: None
    unread: Callable[[Sequence[Any]], Collection[int]] = lambda values: ()

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.phase, self.type, self.module, self.source


class NanTool(amanda.Tool):
    """Find the ops that produce NaN from inputs without NaN.

    The first of these ops is logged as a warning when it runs.  `result` has the answer in its `sentence`,
    and all of the ops; `clear` starts again.

    Args:
        stop: Raise NotFiniteError at the first of these ops.
        inf: Find ops that produce Inf too, which is often intended, as in attention masks.
        backward: Check backward ops too.
        limit: Number of ops in the result.
        **selection: Options of `select`, such as module="encoder".
    """

    purpose = "debug"

    @checked
    def __init__(
        self,
        stop: bool = False,
        inf: bool = False,
        backward: bool = True,
        limit: PositiveInt = 20,
        **selection: Unpack[SelectOptions],
    ) -> None:
        super().__init__()
        self._stop, self._inf, self._limit = stop, inf, limit
        self._steps = Steps()
        self._unread: dict[str, None] = {}  # what is not read
        # By thread and op, while the op runs.
        self._running: dict[tuple[int, _CheckedOp], RecordedInputs] = {}
        self.clear()
        self.depends_on(self._steps, StandardMapping(), MappingTool([["pytorch", write_torch_roles]]))
        self.add_inst_for_op(self._instrument_forward)
        if backward:
            self.add_inst_for_op(self._instrument_backward, backward=True)
        select(self, **selection)

    @property
    def result(self) -> NanResult:
        """Return the ops that produced NaN or Inf so far."""
        # Lists at once, since threads may add to what is kept meanwhile.
        folded = {
            key: replace(finding, times=self._times[key]) for key, finding in list(self._findings.items())
        }
        entered = dict(self._entered)
        for finding in list(self._scaled.pending.values()):
            fold(entered if isinstance(finding, Entered) else folded, finding)
        findings = list(folded.values())
        # Ops that run bodies give NaN because an op in the body does, which is the better finding.
        if not findings and not entered:
            findings = self._findings_of_callers
        counts = self._executions, self._passed_on, len(self._dropped) + max(len(findings) - self._limit, 0)
        result = NanResult(
            findings[: self._limit], *counts, list(entered.values()), self._scaled.skipped, self._inf
        )
        result.remarks = folded_unread(list(self._unread))
        return result

    def clear(self) -> None:
        """Delete the findings; analysed ops stay analysed."""
        self._findings: dict[FindingKey, Finding] = {}
        self._times = Counter[FindingKey]()
        self._dropped: set[FindingKey] = set()  # beyond the limit
        self._findings_of_callers: list[Finding] = []  # at ops that only run others
        self._entered: dict[FindingKey, Entered] = {}
        self._executions = self._passed_on = 0
        self._first_nan_step: int | None = None  # step in which an op gave NaN first, which later ops read
        self._is_logged = self._is_updated = False  # NaN has been logged; an optimizer gave NaN
        # By id of forward op: flags of its inputs and outputs, if not finite at the last execution.
        self._flags_of_forward: dict[int, int] = {}
        self._scaled = ScaledBackward()
        self._steps.clear()
        self._running.clear()

    def _instrument_forward(self, context: amanda.OpContext) -> None:
        """Insert the routines that check a forward op, and those that follow the scale of a loss."""
        if context["type"] in UNINITIALISED:
            return
        role = context.get("loss_scale")
        # This op undoes the scale and looks for overflows, which the scaler expects.
        if role == "check":
            context.insert_before_op(self._note_flag, inputs=[1])
            context.insert_after_op(self._end_scaled, outputs=[])
            return
        if role == "scale":
            context.insert_after_op(self._begin_scaled, outputs=[])
        kind = context["type"]
        self._unread.update(dict.fromkeys(remarks_on_packed_inputs(context)))
        self._insert_checks(
            context, context["phase"], kind, in_place=context["in_place"],
            parameters=parameter_paths(context), moves=kind in _MOVING_OPS,
            reads=_reads_handle(context, context.get_inputs()),
            calls=context.get_op_type() in CALLING_OPS, **_facts_in(context, "unread"),
        )  # fmt: skip

    def _instrument_backward(self, context: amanda.OpContext) -> None:
        """Insert the routines that check a backward op."""
        kind = context["backward_type"]
        if kind == "accumulate_grad":
            return
        if context.is_eager():
            self._insert_checks(context, "backward", kind, **_facts_in(context, "saved"))
            return
        self._insert_checks(
            context, "backward", kind,
            reads=_reads_handle(context, context.get_grad_outputs() or ()),
            calls=context.get_backward_op().__name__ in CALLING_OPS,
        )  # fmt: skip

    def _insert_checks(
        self, context: amanda.OpContext, phase: str, kind: str, in_place: bool = False, **facts: Any
    ) -> None:
        """Insert the routines that check an op, forward or backward.  facts: fields of `_CheckedOp`."""
        dtype, is_eager = context["dtype"], context.is_eager()
        op = _CheckedOp(
            phase, type=kind, module=context.get_scope(), source=context.get_source(), dtype=dtype,
            recorder=InputRecorder(dtype, self._inf, in_place, is_eager),
            op_id=context.get_op_id(), **_facts_in(context, "are_finite"), **facts,
        )  # fmt: skip
        insert_before: Any = context.insert_before_op
        insert_after: Any = context.insert_after_op
        if context.is_backward():
            insert_before, insert_after = context.insert_before_backward_op, context.insert_after_backward_op
        if is_eager:
            insert_before(self._begin, op=op)
            insert_after(self._end, op=op)
        else:
            insert_before(self._begin_in_graph, op=op, begins=True)
            insert_after(self._end_in_graph, op=op)

    @amanda.observer
    @all_samples
    def _begin(self, *values: Any, op: _CheckedOp, batches: Sequence[int] = ()) -> None:
        # An eager op ends on the thread it began on.
        self._running[get_ident(), op] = op.recorder.record(values, batches)

    @amanda.observer
    @all_samples
    def _end(self, *values: Any, op: _CheckedOp, batches: Sequence[int] = ()) -> None:
        self._check_outputs(values, self._running.pop((get_ident(), op), None), op, batches)

    @amanda.observer
    def _begin_in_graph(self, *values: Any, op: _CheckedOp, run: dict[Any, Any], begins: bool) -> None:
        """Record the inputs of an op of a graph.  begins: tells this routine from the one at the end."""
        run[op] = op.recorder.record(values)

    @amanda.observer
    def _end_in_graph(self, *values: Any, op: _CheckedOp, run: dict[Any, Any]) -> None:
        self._check_outputs(values, run.pop(op, None), op)

    @amanda.gathered(_begin_in_graph, _end_in_graph)
    def _check_executions(self, executions: Executions) -> None:
        """Check a batch of executions at once; one by one if any of them is not finite."""
        ends, begun = executions.prepared(_pair_ends)
        # Sums of squares may overflow, which only means that elements are looked at.
        with np.errstate(all="ignore"):
            if are_finite(executions.tensors):
                self._executions += len(ends)
                for execution in executions if self._flags_of_forward else ():
                    self._flags_of_forward.pop(execution.kwargs["op"].op_id, None)
                # Their inputs, recorded in an earlier call, are not needed: the outputs are finite.
                for end in (end for begin, end in ends if begin is None):
                    executions[end].run.pop(executions[end].kwargs["op"], None)
            else:
                self._check_each(executions, ends)
        for i in begun:
            op: _CheckedOp = executions[i].kwargs["op"]
            executions[i].run[op] = op.recorder.record(executions[i].values)

    def _check_each(self, executions: Executions, ends: Sequence[tuple[int | None, int]]) -> None:
        """Check the executions of a batch one by one.  ends: as of `_pair_ends`."""
        for begin, end in ends:
            execution = executions[end]
            op: _CheckedOp = execution.kwargs["op"]
            inputs = execution.run.pop(op, None) if begin is None else None
            if are_finite(leaves(execution.values)):
                self._executions += 1
                self._flags_of_forward.pop(op.op_id, None)
            else:
                inputs = inputs if begin is None else op.recorder.record(executions[begin].values)
                self._check_outputs(execution.values, inputs, op)

    def _check_outputs(
        self, values: Sequence[Any], recorded: RecordedInputs | None, op: _CheckedOp,
        batches: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Add a finding if an execution gave NaN or Inf that it did not read; batches: of the values.

        Raises NotFiniteError for the first finding if the tool stops at one.
        """
        execution, self._executions = self._executions, self._executions + 1
        if recorded is not None:
            op.recorder.note_writes(recorded)
        if op.are_finite(values):
            if self._flags_of_forward and op.phase != "backward":
                self._flags_of_forward.pop(op.op_id, None)
            return
        floats = floating(values, op.dtype, leave=partial(self._note_unread, op))
        if not any(nonfinite_flags(op_tensor.tensor, self._inf) for op_tensor in floats):
            return
        output_floats = Floats.of(values, op.dtype, self._inf, batches=batches)
        input_floats = Floats() if recorded is None else op.recorder.floats(recorded, op.unread)
        # The NaN was in the variable before, whoever wrote it there.
        if output_floats.flags & NAN and not input_floats.flags & NAN and op.reads:
            input_floats = output_floats
        input_flags, output_flags = input_floats.flags, output_floats.flags
        if op.phase != "backward":
            self._flags_of_forward[op.op_id] = input_flags | output_flags
        # A backward op multiplies by what was saved, which is among its inputs too.
        elif output_flags & ~input_flags:
            input_flags |= self._saved_flags(op)
        if (output_flags & NAN and not input_flags & NAN) or not input_flags:
            self._note_finding(op, execution, input_floats, output_floats)
        else:
            self._passed_on += 1
        # An op that only moves elements names no source; the op that reads them will.
        if output_flags & NAN and not op.moves:
            self._note_sources(op, execution, input_floats)
            self._first_nan_step = (
                self._steps.number if self._first_nan_step is None else self._first_nan_step
            )
            self._is_updated = self._is_updated or op.phase == "optimizer"

    def _note_finding(self, op: _CheckedOp, execution: int, inputs: Floats, outputs: Floats) -> None:
        """Add the finding of an execution; count one that repeats an earlier finding."""
        key = *op.place, bool(outputs.flags & NAN)
        if key in self._findings and not self._scaled.is_open and not self._stop:
            self._times[key] += 1
            return
        summaries = inputs.summaries(inputs.tensors), outputs.summaries(outputs.holds)
        finding = Finding(*op.place, execution, *summaries, self._steps.number)
        if not op.calls:
            self._add_finding(finding)
        elif not self._findings and not self._entered:
            self._findings_of_callers = [*self._findings_of_callers, finding][: self._limit]
            if self._stop:
                raise NotFiniteError(finding)

    def _saved_flags(self, op: _CheckedOp) -> int:
        """Return flags of a backward op's saved tensors, or of its forward op's last inputs and outputs."""
        saved = op.saved()
        if saved is None:
            return self._flags_of_forward.get(op.op_id, 0)
        return Floats.of(saved, op.dtype, self._inf).flags

    def _note_unread(self, op: _CheckedOp, tensor: OpTensor, reason: str) -> None:
        """Add a remark on an output that cannot be read; each remark is made once."""
        role = "gradient" if op.phase == "backward" else "output"
        remark = tensor._replace(role=role).unread(reason, op.type, op.module or op.source)
        self._unread[remark] = None

    def _add_finding(self, finding: Finding | Entered) -> None:
        """Keep or defer a finding, and log the first; raise NotFiniteError if the tool stops."""
        if self._scaled.defer(finding, self._steps.number):
            return
        key = finding.key
        if isinstance(finding, Entered):
            self._entered.setdefault(key, finding)
        elif key in self._findings or len(self._findings) < self._limit:
            self._findings.setdefault(key, finding)
            self._times[key] += finding.times
        else:
            self._dropped.add(key)
        if self._stop:
            raise NotFiniteError(finding)
        # One line: what follows from the first NaN would fill the screen.
        if not self._is_logged:
            self._is_logged = isinstance(finding, Entered) or finding.makes_nan or self._inf
            logger.warning("%s", finding.sentence, extra={"live": True})

    def _note_sources(self, op: _CheckedOp, execution: int, inputs: Floats) -> None:
        """Report the parameters with NaN, and the inputs with NaN that no instrumented op produced."""
        for i, flags in inputs.holds.items():
            position = inputs.tensors[i].position
            path = op.parameters.get(position)
            # Once an op gave NaN, a NaN input is most likely its work, and not the program's.
            if not flags & NAN or (path is None and self._first_nan_step is not None):
                continue
            side = "gradient" if op.phase == "backward" else "input"
            name = f"{side} {position} of {op.type}" if path is None else f"parameter {path}"
            # Parameters get NaN by an update, which comes after the step in which an op gave it.
            step, first_nan_step = self._steps.number, self._first_nan_step
            follows = first_nan_step is not None and (self._is_updated or first_nan_step < step)
            is_known = (name, op.module, op.source) in self._entered
            if not self._stop and (is_known or (not follows and len(self._entered) >= self._limit)):
                continue
            summary = inputs.summaries([i])[i]
            self._add_finding(
                Entered(name, op.phase, op.module, op.source, execution, summary, step, follows)
            )

    @amanda.observer
    def _begin_scaled(self) -> None:
        """Begin to defer findings: a GradScaler has scaled a loss."""
        self._scaled.begin()

    @staticmethod
    @amanda.observer
    def _note_flag(found_inf: Any, run: dict[str, Any]) -> None:
        """Note the tensor into which the scaler's check writes whether it found Inf."""
        run["found_inf"] = found_inf

    @amanda.observer
    def _end_scaled(self, run: dict[str, Any]) -> None:
        """Keep or drop the findings of a scaled backward pass, which is over."""
        is_skipped = bool(run.pop("found_inf"))
        for finding in self._scaled.end(is_skipped, self._steps.number):
            self._add_finding(finding)
        # What the skipped step gave has been thrown away.
        if is_skipped and not self._findings:
            self._first_nan_step = None


def _pair_ends(executions: Sequence[Observed]) -> tuple[list[tuple[int | None, int]], list[int]]:
    """Return the ends of ops in a gathered call, each with its beginning, and the beginnings without an end.

    The beginning is None where it was in an earlier call.
    """
    begun: dict[_CheckedOp, int] = {}
    ends: list[tuple[int | None, int]] = []
    for i, execution in enumerate(executions):
        op: _CheckedOp = execution.kwargs["op"]
        if "begins" in execution.kwargs:
            begun[op] = i
        else:
            ends.append((begun.pop(op, None), i))
    return ends, list(begun.values())


def _facts_in(context: amanda.OpContext, name: str) -> dict[str, Any]:
    return {name: context[name]} if name in context else {}


def _reads_handle(context: amanda.OpContext, values: Sequence[Any]) -> bool:
    """Return True for an op that gives what a handle among its inputs holds, or a variable of a graph."""
    reads_variable = context.get_forward_op_type() in TENSORFLOW_READS
    return reads_variable or any(context["dtype"](x) in TENSORFLOW_HANDLES for x in leaves(values))
