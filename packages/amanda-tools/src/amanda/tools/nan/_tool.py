"""The tool: checks what each op reads and makes for NaN and Inf."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import amanda
from amanda.action import Executions, Observed
from amanda.errors import AmandaError
from amanda.options import PositiveInt, checked
from amanda.tools.kit import OpTensor, leaves, remarks_on_packed_inputs
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import UNINITIALISED, MappingTool, StandardMapping
from amanda.tools.nan import _pytorch
from amanda.tools.nan._given import Dtype, Floats, Given, Kept, floating
from amanda.tools.nan._result import Entered, Finding, NanResult
from amanda.tools.nan._scaled import Scaled
from amanda.tools.nan._summary import NAN, are_finite, held

_MOVES = frozenset(
    """
    Identity IdentityN StopGradient alias as_strided cat clone contiguous copy detach expand expand_as flip
    getitem identity index_select narrow permute repeat reshape select setitem slice split squeeze stack to
    transpose type type_as unbind unsqueeze
    """.split()
)
"""Words of ops that hand on what they are given, also memory that nobody has written yet."""


_READS = frozenset({"VariableV2", "Variable"})
"""Types of TensorFlow's operations that give what a variable holds, without being given its handle."""

_HANDLES = ("resource", "variant")
"""Element types of TensorFlow's handles of what variables, lists, iterators and optional values hold."""

_CALLS = frozenset(
    """
    Case For If Loop PartitionedCall RemoteCall Scan SequenceMap StatefulPartitionedCall StatelessCase
    StatelessIf StatelessWhile SymbolicGradient While closed_call cond core_call custom_jvp_call
    custom_vjp_call jit pjit remat scan shard_map while
    """.split()
)
"""Types of ops that compute nothing themselves: they run functions or bodies, whose ops are seen."""


class NotFiniteError(AmandaError, ArithmeticError):
    """NaN or Inf begins here; `finding` tells at which op, or in which input or parameter."""

    def __init__(self, finding: Finding | Entered) -> None:
        super().__init__(f"the first NaN or Inf comes from {finding}")
        self.finding = finding


def _read_all(values: Sequence[Any]) -> Collection[int]:
    """Return no position: an op reads all of its inputs, unless a mapping knows better."""
    return ()


@dataclass(frozen=True, eq=False, slots=True)
class _Op:
    """An op, what it is given, and the paths of the parameters among its inputs, by position.

    dtype: what StandardMapping writes.  moves: whether it only hands on.  reads: whether it gives what a
    handle holds.  calls: whether it only runs other ops.  are_finite: returns True only if all elements of
    some values are finite.
    op_id: of the forward op.  saved: returns what the backward op under way has saved, or None.
    unread: returns the positions of inputs that an execution does not read.
    """

    phase: str
    type: str
    module: str
    source: str
    dtype: Dtype
    given: Given
    are_finite: Callable[[Sequence[Any]], bool]
    parameters: Mapping[int, str] = field(default_factory=dict)
    moves: bool = False
    reads: bool = False
    calls: bool = False
    op_id: int = 0
    saved: Callable[[], Sequence[Any] | None] | None = None
    unread: Callable[[Sequence[Any]], Collection[int]] = _read_all

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.phase, self.type, self.module, self.source


class NanTool(amanda.Tool):
    """Finds the ops at which NaN begins: nothing that they were given is NaN, something that they give is.

    stop: raise NotFiniteError at the first.  inf: look for the ops at which Inf begins, too; it is often
    meant, as in the masks of attention.  backward: look at backward ops too.  limit: so many ops are kept.
    `result` tells, `clear` starts anew.
    """

    @checked
    def __init__(
        self, stop: bool = False, inf: bool = False, backward: bool = True, limit: PositiveInt = 20
    ) -> None:
        super().__init__()
        self._stop, self._inf, self._limit = stop, inf, limit
        self.clear()
        self._packed: dict[str, None] = {}  # what is not read
        self._kept: dict[tuple[int, _Op], Kept] = {}  # by thread and op, while the op runs
        self.depends_on(StandardMapping(), MappingTool([["pytorch", _pytorch.roles]]))
        self.add_inst_for_op(self._forward)
        if backward:
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> NanResult:
        """The ops that made NaN or Inf so far."""
        pending = self._scaled.pending
        findings = [*self._findings, *(one for one in pending if isinstance(one, Finding))]
        if not findings and not self._entered:
            findings = self._around
        dropped = self._dropped + max(len(findings) - self._limit, 0)
        counts = self._executions, self._passed_on, dropped
        entered = [*self._entered.values(), *(one for one in pending if isinstance(one, Entered))]
        result = NanResult(findings[: self._limit], *counts, entered, self._scaled.skipped, self._inf)
        result.remarks = list(self._packed)
        return result

    def clear(self) -> None:
        """Forget what was found; what was analysed stays."""
        self._findings: list[Finding] = []
        self._around: list[Finding] = []  # at ops that only run others
        self._entered: dict[tuple[str, ...], Entered] = {}
        self._executions = self._passed_on = self._dropped = 0
        self._is_known = False  # an op gave NaN, which later ones are given
        self._met: dict[int, int] = {}  # flags at forward ops that were not finite when they ran last, by id
        self._scaled = Scaled()

    def _forward(self, context: amanda.OpContext) -> None:
        if context["type"] in UNINITIALISED:
            return
        role = context.get("loss_scale")
        if role == "check":
            context.insert_before_op(self._note_flag, inputs=[1])
            context.insert_after_op(self._end_scaled, outputs=[])
            return
        if role == "scale":
            context.insert_after_op(self._begin_scaled, outputs=[])
        kind, dtype, is_eager = context["type"], context["dtype"], context.is_eager()
        self._packed.update(dict.fromkeys(remarks_on_packed_inputs(context)))
        op = _Op(
            context["phase"], kind, context.get_scope(), context.get_source(), dtype,
            Given(dtype, self._inf, context["in_place"], is_eager), context.get("are_finite", _unknown),
            _parameters(context),
            moves=kind in _MOVES, reads=_reads_handle(context, context.get_inputs()),
            calls=context.get_op_type() in _CALLS, op_id=context.get_op_id(),
            unread=context.get("unread", _read_all),
        )  # fmt: skip
        if is_eager:
            context.insert_before_op(self._begin, op=op)
            context.insert_after_op(self._end, op=op)
        else:
            context.insert_before_op(self._begin_in_graph, op=op, begins=True)
            context.insert_after_op(self._end_in_graph, op=op)

    def _backward(self, context: amanda.OpContext) -> None:
        kind, dtype, is_eager = context["backward_type"], context["dtype"], context.is_eager()
        if kind == "accumulate_grad":
            return
        given = Given(dtype, self._inf, in_place=False, is_eager=is_eager)
        are_finite = context.get("are_finite", _unknown)
        op = _Op(
            "backward", kind, context.get_scope(), context.get_source(), dtype, given, are_finite,
            reads=not is_eager and _reads_handle(context, context.get_grad_outputs() or ()),
            calls=not is_eager and context.get_backward_op().__name__ in _CALLS,
            op_id=context.get_op_id(), saved=context.get("saved", _unsaved) if is_eager else _unsaved,
        )  # fmt: skip
        if is_eager:
            context.insert_before_backward_op(self._begin, op=op)
            context.insert_after_backward_op(self._end, op=op)
        else:
            context.insert_before_backward_op(self._begin_in_graph, op=op, begins=True)
            context.insert_after_backward_op(self._end_in_graph, op=op)

    @amanda.observer
    def _begin(self, *values: Any, op: _Op) -> None:
        self._kept[get_ident(), op] = op.given.keep(values)  # an eager op ends on the thread it began on

    @amanda.observer
    def _end(self, *values: Any, op: _Op) -> None:
        self._look(values, self._kept.pop((get_ident(), op), None), op)

    @amanda.observer
    def _begin_in_graph(self, *values: Any, op: _Op, run: dict[Any, Any], begins: bool) -> None:
        run[op] = op.given.keep(values)

    @amanda.observer
    def _end_in_graph(self, *values: Any, op: _Op, run: dict[Any, Any]) -> None:
        self._look(values, run.pop(op, None), op)

    @amanda.gathered(_begin_in_graph, _end_in_graph)
    def _look_at_all(self, executions: Executions) -> None:
        pairs = executions.prepared(_Pairs)
        with np.errstate(all="ignore"):
            if are_finite(executions.tensors):
                self._executions += pairs.ends
                for one in executions if self._met else ():
                    self._met.pop(one.kwargs["op"].op_id, None)
                for i in pairs.ended:
                    executions[i].run.pop(executions[i].kwargs["op"], None)
            else:
                self._look_at_each(executions)
        for i in pairs.begun:
            op: _Op = executions[i].kwargs["op"]
            executions[i].run[op] = op.given.keep(executions[i].values)

    def _look_at_each(self, executions: Executions) -> None:
        begun: dict[_Op, Observed] = {}
        for one in executions:
            op: _Op = one.kwargs["op"]
            if "begins" in one.kwargs:
                begun[op] = one
                continue
            begin = begun.pop(op, None)
            kept = one.run.pop(op, None) if begin is None else None
            if are_finite(leaves(one.values)):
                self._executions += 1
                self._met.pop(op.op_id, None)
            else:
                self._look(one.values, kept if begin is None else op.given.keep(begin.values), op)

    def _look(self, values: Sequence[Any], kept: Kept | None, op: _Op) -> None:
        execution, self._executions = self._executions, self._executions + 1
        if kept is not None:
            op.given.settle(kept)
        if op.are_finite(values):
            if self._met and op.saved is None:
                self._met.pop(op.op_id, None)
            return
        leave = partial(self._leave, op)
        if not any(held(one.tensor, self._inf) for one in floating(values, op.dtype, leave)):
            return
        made = Floats.of(values, op.dtype, self._inf)
        read = Floats() if kept is None else op.given.floats(kept, op.unread)
        if made.flags & NAN and not read.flags & NAN and op.reads:
            read = made
        before, after = read.flags, made.flags
        if op.saved is None:
            self._met[op.op_id] = before | after
        elif after & ~before:
            before |= self._saved_flags(op)
        if (after & NAN and not before & NAN) or not before:
            inputs, outputs = read.summaries(read.tensors), made.summaries(made.holds)
            finding = Finding(*op.place, execution, inputs, outputs)
            if not op.calls:
                self._keep(finding)
            elif not self._findings and not self._entered:
                self._around = [*self._around, finding][: self._limit]
                if self._stop:
                    raise NotFiniteError(finding)
        else:
            self._passed_on += 1
        if after & NAN and not op.moves:
            self._name(op, execution, read)
            self._is_known = True

    def _saved_flags(self, op: _Op) -> int:
        """Return flags of what a backward op has saved, or of all that its forward op read and gave last."""
        assert op.saved is not None
        saved = op.saved()
        if saved is None:
            return self._met.get(op.op_id, 0)
        return Floats.of(saved, op.dtype, self._inf).flags

    def _leave(self, op: _Op, tensor: OpTensor, reason: str) -> None:
        role = "gradient" if op.phase == "backward" else "output"
        named = tensor._replace(role=role).unread(reason, op.type, op.module or op.source)
        self._packed[named] = None

    def _keep(self, finding: Finding | Entered) -> None:
        if self._scaled.takes(finding):
            return
        if isinstance(finding, Entered):
            self._entered[finding.what, finding.module, finding.source] = finding
        elif len(self._findings) >= self._limit:
            self._dropped += 1
            return
        else:
            self._findings.append(finding)
        if self._stop:
            raise NotFiniteError(finding)

    def _name(self, op: _Op, execution: int, given: Floats) -> None:
        """Name the parameters that hold NaN, and the inputs where no op that was seen gave it."""
        for i, what in given.holds.items():
            position = given.tensors[i].position
            path = op.parameters.get(position)
            if not what & NAN or (path is None and self._is_known):
                continue
            side = "gradient" if op.phase == "backward" else "input"
            name = f"{side} {position} of {op.type}" if path is None else f"parameter {path}"
            if (name, op.module, op.source) not in self._entered and len(self._entered) < self._limit:
                (summary,) = given.summaries([i]).values()
                self._keep(Entered(name, op.phase, op.module, op.source, execution, summary))

    @amanda.observer
    def _begin_scaled(self) -> None:
        self._scaled.is_open = True

    @staticmethod
    @amanda.observer
    def _note_flag(found: Any, run: dict[str, Any]) -> None:
        run["found_inf"] = found  # which the op writes

    @amanda.observer
    def _end_scaled(self, run: dict[str, Any]) -> None:
        is_skipped = bool(run.pop("found_inf"))
        for finding in self._scaled.end(is_skipped):
            self._keep(finding)
        if is_skipped and not self._findings:
            self._is_known = False


class _Pairs:
    """Which executions of a call are beginnings of ops, and which ends.

    ends: number of ends.  ended: indices of ends whose beginning is not in the call.  begun: the reverse.
    """

    def __init__(self, executions: Sequence[Observed]) -> None:
        self.ends = 0
        self.ended: list[int] = []
        begun: dict[_Op, int] = {}
        for i, one in enumerate(executions):
            if "begins" in one.kwargs:
                begun[one.kwargs["op"]] = i
                continue
            self.ends += 1
            if begun.pop(one.kwargs["op"], None) is None:
                self.ended.append(i)
        self.begun = list(begun.values())


def _unknown(values: Sequence[Any]) -> bool:
    return False


def _reads_handle(context: amanda.OpContext, given: Sequence[Any]) -> bool:
    """Return True for an op that gives what a handle among its inputs holds, or a variable of a graph."""
    dtype = context["dtype"]
    return context.get_op_type() in _READS or any(dtype(one) in _HANDLES for one in leaves(given))


def _unsaved() -> None:
    return None


def _parameters(context: amanda.OpContext) -> dict[int, str]:
    """Paths of the parameters among an op's inputs, by position."""
    found = {}
    for i in range(len(context.get_inputs())):
        variable = context.get_variable(i)
        path = None if variable is None else context.get_variable_path(variable)
        if path is not None:
            found[i] = path
    return found
