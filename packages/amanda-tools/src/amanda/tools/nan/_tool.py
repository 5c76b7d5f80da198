"""The tool: checks what each op reads and makes for NaN and Inf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import OpTensor, op_tensors, packed_inputs
from amanda.tools.mapping import UNINITIALISED, MappingTool, StandardMapping
from amanda.tools.nan import _pytorch
from amanda.tools.nan._result import Entered, Finding, NanResult
from amanda.tools.nan._scaled import Scaled
from amanda.tools.nan._summary import NAN, Summary, held

_FLOATING = ("float", "bfloat", "half", "complex")
_MOVES = frozenset(
    """
    Identity IdentityN StopGradient alias as_strided cat clone contiguous copy detach expand expand_as flip
    getitem identity index_select narrow permute repeat reshape select setitem slice split squeeze stack to
    transpose type type_as unbind unsqueeze
    """.split()
)
"""Words of ops that hand on what they are given, also memory that nobody has written yet."""


_READS = frozenset({"ReadVariableOp", "VariableV2", "Variable", "ResourceGather"})
"""Types of TensorFlow's operations that give what a variable holds."""


class NotFiniteError(AmandaError, ArithmeticError):
    """NaN or Inf begins here; `finding` tells at which op, or in which input or parameter."""

    def __init__(self, finding: Finding | Entered) -> None:
        super().__init__(f"the first NaN or Inf comes from {finding}")
        self.finding = finding


class _Op(NamedTuple):
    """An op and the paths of the parameters among its inputs, by position.

    moves: whether it only hands on.  reads: whether it gives what a variable holds.
    """

    phase: str
    type: str
    module: str
    source: str
    parameters: Mapping[int, str]
    moves: bool
    reads: bool = False

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.phase, self.type, self.module, self.source


class _Floats(NamedTuple):
    """The floating tensors that an execution read or made, by flat index.

    holds: flags of NaN and Inf, of the tensors that hold any.
    """

    tensors: Mapping[int, OpTensor] = {}
    holds: Mapping[int, int] = {}

    @property
    def flags(self) -> int:
        return reduce(or_, self.holds.values(), 0)

    def summaries(self, chosen: Iterable[int]) -> dict[int, Summary]:
        return {i: Summary.of(self.tensors[i].tensor, self.tensors[i].dtype) for i in chosen}


class NanTool(amanda.Tool):
    """Finds the ops at which NaN begins: nothing that they were given is NaN, something that they give is.

    stop: raise NotFiniteError at the first.  inf: look for the ops at which Inf begins, too; it is often
    meant, as in the masks of attention.  backward: look at backward ops too.  limit: so many ops are kept.
    `result` tells, `clear` starts anew.
    """

    def __init__(self, stop: bool = False, inf: bool = False, backward: bool = True, limit: int = 20) -> None:
        super().__init__()
        self._stop, self._inf, self._limit = stop, inf, limit
        self.clear()
        self._packed: dict[str, None] = {}  # what is not read
        self.depends_on(StandardMapping(), MappingTool([["pytorch", _pytorch.roles]]))
        self.add_inst_for_op(self._forward)
        if backward:
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> NanResult:
        """The ops that made NaN or Inf so far."""
        pending = self._scaled.pending
        findings = [*self._findings, *(one for one in pending if isinstance(one, Finding))]
        dropped = self._dropped + max(len(findings) - self._limit, 0)
        counts = self._executions, self._passed_on, dropped
        entered = [*self._entered.values(), *(one for one in pending if isinstance(one, Entered))]
        result = NanResult(findings[: self._limit], *counts, entered, self._scaled.skipped, self._inf)
        result.remarks = list(self._packed)
        return result

    def clear(self) -> None:
        """Forget what was found; what was analysed stays."""
        self._findings: list[Finding] = []
        self._entered: dict[tuple[str, ...], Entered] = {}
        self._executions = self._passed_on = self._dropped = 0
        self._is_known = False  # an op gave NaN, which later ones are given
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
        kind, dtype = context["type"], context["dtype"]
        self._packed.update(dict.fromkeys(packed_inputs(context)))
        place = (context["phase"], kind, context.get_scope(), context.get_source())
        op = _Op(*place, _parameters(context), kind in _MOVES, context.get_op_type() in _READS)
        in_place = context["in_place"]
        context.insert_before_op(self._entering, dtype=dtype, side="forward", in_place=in_place)
        context.insert_after_op(self._leaving, dtype=dtype, side="forward", op=op)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind == "accumulate_grad":
            return
        op = _Op("backward", kind, context.get_scope(), context.get_source(), {}, False)
        side, dtype = str(context.get_backward_op_id()), context["dtype"]
        context.insert_before_backward_op(self._entering, dtype=dtype, side=side, in_place=False)
        context.insert_after_backward_op(self._leaving, dtype=dtype, side=side, op=op)

    @amanda.observer
    def _entering(self, *values: Any, dtype: Any, side: str, in_place: bool, run: dict[str, Any]) -> None:
        given = self._floats(values, dtype)
        if in_place:  # the op is about to write into the first
            tensors = {i: _copied(one) if one.position == 0 else one for i, one in given.tensors.items()}
            given = given._replace(tensors=tensors)
        run[side] = given

    @amanda.observer
    def _leaving(self, *values: Any, dtype: Any, side: str, op: _Op, run: dict[str, Any]) -> None:
        given: _Floats = run.pop(side, None) or _Floats()
        execution, self._executions = self._executions, self._executions + 1
        made = self._floats(values, dtype)
        if not made.holds:
            return
        if made.flags & NAN and not given.tensors and op.reads:
            given = made
        before, after = given.flags, made.flags
        if (after & NAN and not before & NAN) or not before:
            inputs, outputs = given.summaries(given.tensors), made.summaries(made.holds)
            self._keep(Finding(*op.place, execution, inputs, outputs))
        else:
            self._passed_on += 1
        if after & NAN and not op.moves:
            self._name(op, execution, given)
            self._is_known = True

    def _floats(self, values: Any, dtype: Any) -> _Floats:
        tensors = {one.flat_index: one for one in op_tensors(values, dtype, kinds=_FLOATING)}
        found = {i: held(one.tensor, self._inf) for i, one in tensors.items()}
        return _Floats(tensors, {i: what for i, what in found.items() if what})

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

    def _name(self, op: _Op, execution: int, given: _Floats) -> None:
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


def _parameters(context: amanda.OpContext) -> dict[int, str]:
    """Paths of the parameters among an op's inputs, by position."""
    found = {}
    for i in range(len(context.get_inputs())):
        variable = context.get_variable(i)
        path = None if variable is None else context.get_variable_path(variable)
        if path is not None:
            found[i] = path
    return found


def _copied(one: OpTensor) -> OpTensor:
    """Return a tensor that stays when an op writes into this one."""
    return one._replace(tensor=one.tensor.clone()) if hasattr(one.tensor, "clone") else one
