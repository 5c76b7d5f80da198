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
from amanda.action import Executions, FiniteObserver
from amanda.errors import AmandaError
from amanda.options import PositiveInt, checked
from amanda.tools.kit import Dtype, OpTensor, folded_unread, leaves, parameter_paths, remarks_on_packed_inputs
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
    floating,
    nonfinite,
    nonfinite_flags,
    write_torch_facts,
)
from amanda.tools.nan._result import Entered, Finding, FindingKey, NanResult, ScaledBackward, fold
from amanda.tools.select import SelectOptions, select
from amanda.tools.steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("amanda")

# Types of ops that only copy or view their inputs, even memory that is not initialised.
_MOVING_OPS = frozenset("""
    Identity IdentityN StopGradient alias as_strided cat clone contiguous copy detach expand expand_as flip
    getitem identity index_select narrow permute repeat reshape select setitem slice split squeeze stack to
    transpose type type_as unbind unsqueeze""".split())  # fmt: skip


class NotFiniteError(AmandaError, ArithmeticError, module="amanda.tools.nan"):
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

    dtype: `dtype` of StandardMapping.  only_moves: it only copies or views inputs.  only_calls: it only runs
    other ops.  op_id: of the forward op.  saved_tensors: returns what the backward op under way has saved;
    None if unknown.  unread_positions: returns the positions of inputs that an execution does not read.
    """

    phase: str
    type: str
    module: str
    source: str
    dtype: Dtype
    recorder: InputRecorder
    parameter_paths: Mapping[int, str] = field(default_factory=dict)
    only_moves: bool = False
    reads_handle: bool = False
    only_calls: bool = False
    op_id: int = 0
    saved_tensors: Callable[[], Sequence[Any] | None] = lambda: None
    unread_positions: Callable[[Sequence[Any]], Collection[int]] = lambda values: ()

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.phase, self.type, self.module, self.source


@dataclass(eq=False, slots=True)
class _Batch:
    """Executions of a graph that are checked together, by their positions among these.

    begin_end_pairs: of each op that ends in the batch; a begin is None where it was in an earlier batch.
    carried_pairs: those with None.  open_begins: begins without an end.  float_positions: of floating outputs
    among the tensors of the batch; ends: of the op of each.
    """

    begin_end_pairs: list[tuple[int | None, int]] = field(default_factory=list)
    carried_pairs: list[tuple[int | None, int]] = field(default_factory=list)
    open_begins: list[int] = field(default_factory=list)
    float_positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def suspects(self, tensors: Sequence[Any]) -> frozenset[int]:
        """Return the ends of ops with an output that native code does not find finite; a hot path."""
        return frozenset([self.ends[i] for i in nonfinite([tensors[i] for i in self.float_positions])])


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
        self, stop: bool = False, inf: bool = False, backward: bool = True, limit: PositiveInt = 20,
        **selection: Unpack[SelectOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        self._stop, self._looks_for_inf, self._limit = stop, inf, limit
        self._steps = Steps()
        self._unread_remarks: dict[str, None] = {}  # what is not read
        # By thread and op, while the op runs.
        self._inputs_of_running: dict[tuple[int, _CheckedOp], RecordedInputs] = {}
        self._native_executions = amanda.Tally()  # in which native code found finite outputs
        self.clear()
        self.depends_on(self._steps, StandardMapping(), MappingTool([["pytorch", write_torch_facts]]))
        self.add_inst_for_op(self._instrument_forward)
        if backward:
            self.add_inst_for_op(self._instrument_backward, backward=True)
        select(self, **selection)

    @property
    def result(self) -> NanResult:
        """Return the ops that produced NaN or Inf so far."""
        # Copied by `list` at once, since threads may add findings meanwhile.
        findings_by_key = {
            key: replace(finding, times=self._times_by_key[key])
            for key, finding in list(self._findings_by_key.items())
        }
        entered_by_key = dict(self._entered_by_key)
        for finding in list(self._scaled_backward.pending.values()):
            fold(entered_by_key if isinstance(finding, Entered) else findings_by_key, finding)
        findings = list(findings_by_key.values())
        # Ops that run bodies give NaN because an op in the body does, which is the better finding.
        if not findings and not entered_by_key:
            findings = self._findings_of_callers
        result = NanResult(
            findings[: self._limit], self._python_execution_count + self._native_executions.calls,
            self._passed_on_count,
            dropped=len(self._dropped_keys) + max(len(findings) - self._limit, 0),
            entered=list(entered_by_key.values()), skipped=self._scaled_backward.skipped,
            inf=self._looks_for_inf,
        )  # fmt: skip
        result.remarks = folded_unread(list(self._unread_remarks))
        return result._of_tool(self)

    def clear(self) -> None:
        """Delete the findings; analysed ops stay analysed."""
        self._findings_by_key: dict[FindingKey, Finding] = {}
        self._times_by_key = Counter[FindingKey]()
        self._dropped_keys: set[FindingKey] = set()  # beyond the limit
        self._findings_of_callers: list[Finding] = []  # at ops that only run others
        self._entered_by_key: dict[FindingKey, Entered] = {}
        self._python_execution_count = self._passed_on_count = 0
        self._native_executions.clear()
        self._first_nan_step: int | None = None  # step in which an op gave NaN first, which later ops read
        self._is_logged = False  # the first finding has been logged
        self._has_nan_update = False  # an op of an optimizer gave NaN, which weights hold from then on
        # Of inputs and outputs together, by id of the forward op, if not finite at its last execution.
        self._flags_by_op_id: dict[int, int] = {}
        self._scaled_backward = ScaledBackward()
        self._steps.clear()
        self._inputs_of_running.clear()

    def _instrument_forward(self, context: amanda.OpContext) -> None:
        """Insert the routines that check a forward op, and those that follow the scale of a loss."""
        if context["type"] in UNINITIALISED:  # its output may be NaN by chance
            return
        scaler_role = context.get("loss_scale")
        # This op undoes the scale and looks for overflows, which the scaler expects.
        if scaler_role == "check":
            context.insert_before_op(self._note_found_inf, inputs=[1])
            context.insert_after_op(self._end_scaled_backward, outputs=[])
            return
        if scaler_role == "scale":
            context.insert_after_op(self._begin_scaled_backward, outputs=[])
        kind = context["type"]
        self._unread_remarks.update(dict.fromkeys(remarks_on_packed_inputs(context)))
        self._insert_checks(
            context, context["phase"], kind, in_place=context["in_place"],
            parameter_paths=parameter_paths(context), only_moves=kind in _MOVING_OPS,
            reads_handle=_reads_handle(context, context.get_inputs()),
            only_calls=context.get_op_type() in CALLING_OPS,
            unread_positions=context.get("unread_positions", lambda values: ()),
        )  # fmt: skip

    def _instrument_backward(self, context: amanda.OpContext) -> None:
        """Insert the routines that check a backward op; none where gradients of a leaf are added up."""
        kind = context["backward_type"]
        if kind == "accumulate_grad":
            return
        self._insert_checks(
            context, "backward", kind, only_calls=context.get_backward_op().__name__ in CALLING_OPS,
            reads_handle=not context.is_eager() and _reads_handle(context, context.get_grad_outputs() or ()),
            saved_tensors=context.get("saved_tensors", lambda: None),
        )  # fmt: skip

    def _insert_checks(
        self, context: amanda.OpContext, phase: str, kind: str, in_place: bool = False, **facts: Any
    ) -> None:
        """Insert the routines that record inputs and check outputs.  facts: fields of `_CheckedOp`."""
        dtype, is_eager = context["dtype"], context.is_eager()
        op = _CheckedOp(
            phase, type=kind, module=context.get_scope(), source=context.get_source(), dtype=dtype,
            recorder=InputRecorder(dtype, self._looks_for_inf, in_place, is_eager),
            op_id=context.get_op_id(), **facts,
        )  # fmt: skip
        insert_before: Any = context.insert_before_op
        insert_after: Any = context.insert_after_op
        if context.is_backward():
            insert_before, insert_after = context.insert_before_backward_op, context.insert_after_backward_op
        if is_eager:
            begin = FiniteObserver(partial(self._begin, op))
            insert_before(begin)
            insert_after(FiniteObserver(partial(self._end, op), begin, self._native_executions))
        else:
            insert_before(self._begin_in_graph, op=op, begins=True)
            insert_after(self._end_in_graph, op=op)

    def _begin(self, op: _CheckedOp, begin: FiniteObserver, values: Any, batches: Any) -> None:
        # An eager op ends on the thread it began on.
        self._inputs_of_running[get_ident(), op] = op.recorder.record(values, batches, begin.copy)

    def _end(self, op: _CheckedOp, end: FiniteObserver, values: Any, batches: Any) -> None:
        """Check the outputs of an op; let native code do so from then on."""
        recorded = self._inputs_of_running.pop((get_ident(), op), None)
        is_finite, begin = self._check_outputs(values, recorded, op, batches), end.before
        if begin is not None:
            begin.skips, begin.copies = op.recorder.may_record_after, op.recorder.is_in_place
            # After outputs with NaN Python is to see that the next ones have none.
            end.skips = begin.skips and is_finite

    @amanda.observer
    def _begin_in_graph(self, *values: Any, op: _CheckedOp, run: dict[Any, Any], begins: bool) -> None:
        """Record the inputs of an op of a graph.  begins: tells this routine from the one at the end."""
        run[op] = op.recorder.record(values)

    @amanda.observer
    def _end_in_graph(self, *values: Any, op: _CheckedOp, run: dict[Any, Any]) -> None:
        self._check_outputs(values, run.pop(op, None), op)

    @amanda.gathered(_begin_in_graph, _end_in_graph)
    def _check_executions(self, executions: Executions) -> None:
        """Check the calls of both routines in a batch at once; those alone whose outputs are not finite."""
        batch = executions.prepared(self._batch_of)
        suspects = batch.suspects(executions.tensors)
        pairs = batch.begin_end_pairs
        if not (suspects or self._flags_by_op_id):  # a hot path
            self._python_execution_count += len(pairs) - len(batch.carried_pairs)
            pairs = batch.carried_pairs
        for begin, end in pairs:
            execution = executions[end]
            op: _CheckedOp = execution.kwargs["op"]
            # Inputs of an execution that began in an earlier batch were recorded in its `run`.
            recorded = execution.run.pop(op, None) if begin is None else None
            if end not in suspects:
                self._python_execution_count += 1
                self._flags_by_op_id.pop(op.op_id, None)
                continue
            if begin is not None:
                recorded = op.recorder.record(executions[begin].values)
            self._check_outputs(execution.values, recorded, op)
        for begin in batch.open_begins:
            op = executions[begin].kwargs["op"]
            executions[begin].run[op] = op.recorder.record(executions[begin].values)

    def _batch_of(self, executions: Executions) -> _Batch:
        """Pair the begins and ends of a batch; find the floating outputs; note those that are not read."""
        batch, begin_by_op, positions = _Batch(), dict[_CheckedOp, int](), executions.positions()
        for i, execution in enumerate(executions):
            op: _CheckedOp = execution.kwargs["op"]
            if "begins" in execution.kwargs:
                begin_by_op[op] = i
                continue
            batch.begin_end_pairs.append((begin_by_op.pop(op, None), i))
            for leaf in floating(execution.values, op.dtype, leave=partial(self._note_unread, op)):
                batch.float_positions.append(positions[i][leaf.flat_index])
                batch.ends.append(i)
        batch.carried_pairs = [(begin, end) for begin, end in batch.begin_end_pairs if begin is None]
        batch.open_begins = list(begin_by_op.values())
        return batch

    def _check_outputs(
        self, values: Sequence[Any], recorded: RecordedInputs | None, op: _CheckedOp,
        batches: Sequence[int] = (),
    ) -> bool:  # fmt: skip
        """Count an execution, and judge the op if the outputs have NaN, or Inf if the tool looks for it.

        Returns True if the outputs have none.
        recorded: its inputs; None if not known.  batches: numbers of batches of a vmap, by flat index.
        Raises NotFiniteError for the first finding if the tool stops at one.
        """
        self._python_execution_count += 1
        if recorded is not None:
            op.recorder.note_writes(recorded)
        op_tensors = floating(values, op.dtype, leave=partial(self._note_unread, op))
        if not any(nonfinite_flags(op_tensor.tensor, self._looks_for_inf) for op_tensor in op_tensors):
            if op.phase != "backward":
                self._flags_by_op_id.pop(op.op_id, None)
            return True
        output_floats = Floats.of(values, op.dtype, self._looks_for_inf, batches=batches)
        input_floats = Floats() if recorded is None else op.recorder.floats(recorded, op.unread_positions)
        # An op that reads a handle gives what the variable held: the NaN was there before.
        if output_floats.flags & NAN and not input_floats.flags & NAN and op.reads_handle:
            input_floats = output_floats
        execution = self._python_execution_count + self._native_executions.calls - 1
        self._judge(op, execution, input_floats, output_floats)
        return False

    def _judge(self, op: _CheckedOp, execution: int, inputs: Floats, outputs: Floats) -> None:
        """Add a finding if the op made the NaN or Inf in its outputs, else count it as passed on."""
        input_flags, output_flags = inputs.flags, outputs.flags
        if op.phase != "backward":
            self._flags_by_op_id[op.op_id] = input_flags | output_flags
        # A backward op multiplies by what was saved, which is among its inputs too.
        elif output_flags & ~input_flags:
            input_flags |= self._flags_of_saved(op)
        makes_nan = output_flags & NAN and not input_flags & NAN
        if makes_nan or not input_flags:
            self._count_or_add_finding(op, execution, inputs, outputs)
        else:
            self._passed_on_count += 1
        # An op that only moves elements names no source; the op that reads them will.
        if output_flags & NAN and not op.only_moves:
            self._add_entered(op, execution, inputs)
            if self._first_nan_step is None:
                self._first_nan_step = self._steps.number
            self._has_nan_update = self._has_nan_update or op.phase == "optimizer"

    def _count_or_add_finding(self, op: _CheckedOp, execution: int, inputs: Floats, outputs: Floats) -> None:
        """Add the finding of an execution, apart for an op that only runs other ops; count a repeated one."""
        key = *op.place, bool(outputs.flags & NAN)
        if key in self._findings_by_key and not self._scaled_backward.is_open and not self._stop:
            self._times_by_key[key] += 1
            return
        input_summaries = inputs.summaries(inputs.tensors)
        output_summaries = outputs.summaries(outputs.flags_by_index)
        finding = Finding(*op.place, execution, input_summaries, output_summaries, self._steps.number)
        if not op.only_calls:
            self._add_finding(finding)
        elif not self._findings_by_key and not self._entered_by_key:
            self._findings_of_callers = [*self._findings_of_callers, finding][: self._limit]
            if self._stop:
                raise NotFiniteError(finding)

    def _flags_of_saved(self, op: _CheckedOp) -> int:
        """Return flags of a backward op's saved tensors, or of its forward op's last inputs and outputs."""
        tensors = op.saved_tensors()
        if tensors is None:
            return self._flags_by_op_id.get(op.op_id, 0)
        return Floats.of(tensors, op.dtype, self._looks_for_inf).flags

    def _note_unread(self, op: _CheckedOp, tensor: OpTensor, reason: str) -> None:
        """Add a remark on an output that cannot be read; each remark is made once."""
        role = "gradient" if op.phase == "backward" else "output"
        remark = tensor._replace(role=role).unread(reason, op.type, op.module or op.source)
        self._unread_remarks[remark] = None

    def _add_finding(self, finding: Finding | Entered) -> None:
        """Keep a finding and log the first; or defer it.  Raises NotFiniteError if the tool stops at it."""
        if self._scaled_backward.defer(finding, self._steps.number):
            return
        key = finding.key
        if isinstance(finding, Entered):
            self._entered_by_key.setdefault(key, finding)
        elif key in self._findings_by_key or len(self._findings_by_key) < self._limit:
            self._findings_by_key.setdefault(key, finding)
            self._times_by_key[key] += finding.times
        else:
            self._dropped_keys.add(key)
        if self._stop:
            raise NotFiniteError(finding)
        # One line: what follows from the first NaN would fill the screen.
        if not self._is_logged:
            self._is_logged = isinstance(finding, Entered) or finding.makes_nan or self._looks_for_inf
            logger.warning("%s", finding.sentence, extra={"live": True})

    def _add_entered(self, op: _CheckedOp, execution: int, inputs: Floats) -> None:
        """Add an entry, once, for each parameter with NaN, and each input with NaN that no op produced."""
        for i, flags in inputs.flags_by_index.items():
            position = inputs.tensors[i].position
            path = op.parameter_paths.get(position)
            # Once an op gave NaN, a NaN input is most likely its work, and not the program's.
            if not flags & NAN or (path is None and self._first_nan_step is not None):
                continue
            side = "gradient" if op.phase == "backward" else "input"
            name = f"{side} {position} of {op.type}" if path is None else f"parameter {path}"
            # Parameters get NaN by an update, which comes after the step in which an op gave it.
            step, first_nan_step = self._steps.number, self._first_nan_step
            is_consequence = first_nan_step is not None and (self._has_nan_update or first_nan_step < step)
            is_known = (name, op.module, op.source) in self._entered_by_key
            is_beyond_limit = not is_consequence and len(self._entered_by_key) >= self._limit
            if not self._stop and (is_known or is_beyond_limit):
                continue
            summary = inputs.summaries([i])[i]
            self._add_finding(
                Entered(name, op.phase, op.module, op.source, execution, summary, step, is_consequence)
            )

    @amanda.observer
    def _begin_scaled_backward(self) -> None:
        """Begin to defer findings: a GradScaler has scaled a loss."""
        self._scaled_backward.begin()

    @staticmethod
    @amanda.observer
    def _note_found_inf(found_inf: Any, run: dict[str, Any]) -> None:
        """Note the tensor into which the scaler's check writes whether it found Inf."""
        run["found_inf"] = found_inf

    @amanda.observer
    def _end_scaled_backward(self, run: dict[str, Any]) -> None:
        """Keep or drop the findings of a scaled backward pass, which is over."""
        is_skipped = bool(run.pop("found_inf"))
        for finding in self._scaled_backward.end(is_skipped, self._steps.number):
            self._add_finding(finding)
        # What the skipped step gave has been thrown away.
        if is_skipped and not self._findings_by_key:
            self._first_nan_step = None


def _reads_handle(context: amanda.OpContext, values: Sequence[Any]) -> bool:
    """Return True for an op that gives what a handle among its inputs holds, or a variable of a graph."""
    reads_variable = context.get_forward_op_type() in TENSORFLOW_READS
    return reads_variable or any(context["dtype"](x) in TENSORFLOW_HANDLES for x in leaves(values))
