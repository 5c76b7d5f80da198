"""The tool of a watched step: norms of what ops give, hashes, and ops that are run again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import wraps
from threading import get_ident
from time import perf_counter
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import MappingTool, StandardMapping, rerun
from amanda.tools.sentinel import _again, _pytorch
from amanda.tools.sentinel._alarms import Alarm
from amanda.tools.sentinel._judged import Norm
from amanda.tools.sentinel._result import VARIES, Watched

_FLOATING = ("float", "bfloat", "complex", "half")
Compute = Callable[..., Any]


def _timed(routine: Compute) -> Compute:
    """Add the time in a method of a Watch to its `seconds`."""

    @wraps(routine)
    def timed(self: Watch, *values: Any, **kwargs: Any) -> None:
        begun = perf_counter()
        routine(self, *values, **kwargs)
        self.seconds += perf_counter() - begun

    return timed


class Watch(amanda.Tool):
    """Watches ops of PyTorch while its scope is open; `end_step` gives the norms, in order.

    share: of the executions, of which norms are taken, and which are hashed and run again where they can be.
    on_alarm: is given alarms at once.
    on_exhausted: is called where a forward op is to be analysed beyond the allowance.
    """

    def __init__(
        self, share: float, seed: int, on_alarm: Callable[[Alarm], None], on_exhausted: Callable[[], None]
    ) -> None:
        super().__init__("pytorch")
        self.step = 0
        self.paths: dict[int, str] = {}
        """Paths of parameters, by the numbers that `identity_of` gives."""
        self.share, self._random = share, random.Random(seed)
        self._on_alarm, self._on_exhausted = on_alarm, on_exhausted
        self.ops: dict[tuple[int, int | None], Watched] = {}
        self._norms: list[Norm] = []
        self._given: dict[tuple[int, int], tuple[Sequence[Any], Sequence[Any]]] = {}
        self.overflowed = False
        self._drawn = self._random.random()
        self.seconds = 0.0
        """Time in the analysis of ops and in looking at them since the step began."""
        self.allowance = math.inf
        """The seconds after which one more forward op is analysed, and no further one."""
        self.depends_on(StandardMapping(), MappingTool([["pytorch/*/eager", rerun]]))
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def end_step(self) -> list[Norm]:
        """Return the norms of the step so far, and begin another."""
        norms, self._norms = self._norms, []
        self._given.clear()
        self._drawn = self._random.random()
        return norms

    def _analysed(self, context: amanda.OpContext, phase: str, kind: str, left: str) -> Watched:
        key = context.get_op_id(), context.get_backward_op_id()
        if key not in self.ops:
            self.ops[key] = Watched(phase, kind, context.get_scope(), context.get_source(), left=left)
        return self.ops[key]

    @_timed
    def _forward(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "_amp_foreach_non_finite_check_and_unscale_":
            context.insert_after_op(self._unscaled, outputs=[], flag=context.get_inputs()[1])
        if context["phase"] in ("optimizer", "construction"):
            return
        if self.seconds > self.allowance:
            self._on_exhausted()
        given = {}
        for position in range(len(context.get_inputs())):
            variable = context.get_variable(position)
            path = None if variable is None else context.get_variable_path(variable)
            if path is not None:
                self.paths[self.identity_of(variable)] = path
                given[position] = f"parameter {path}"
        left, compute = _again.reason_to_leave(context), None
        try:
            compute = context.get_computation()
        except AmandaError:
            left = left or "not a native op of PyTorch"
        op = self._analysed(context, context["phase"], context["type"], left)
        context.insert_before_op(self._begin, op=op, given=given, dtype=context["dtype"])
        context.insert_after_op(self._end, op=op, compute=compute, dtype=context["dtype"])

    @_timed
    def _backward(self, context: amanda.OpContext) -> None:
        kind, node = context["backward_type"], context.get_backward_op()
        if kind == "accumulate_grad":
            return
        gradients = [one for one in context.get_grad_outputs() or () if one is not None]
        left = _again.reason_to_leave_node(node, gradients[0].device.type if gradients else "cpu")
        op = self._analysed(context, "backward", kind, left)
        context.insert_before_backward_op(self._begin_backward, op=op)
        context.insert_after_backward_op(self._end_backward, op=op, dtype=context["dtype"])

    def _is_sampled(self, op: Watched) -> bool:
        """Return True for the share of executions, which in a step lie evenly apart from a random start."""
        op.executions += 1
        before, self._drawn = self._drawn, self._drawn + self.share
        if int(self._drawn) > int(before):
            return True
        self._given.pop((get_ident(), id(op)), None)  # of an execution that raised
        return False

    @amanda.observer
    def _begin(self, *inputs: Any, op: Watched, given: dict[int, str], dtype: Any) -> None:
        if self._is_sampled(op):
            self._look_at_inputs(op, inputs, given, dtype)

    @amanda.observer
    def _end(self, *outputs: Any, op: Watched, compute: Compute, dtype: Any) -> None:
        given = self._given.pop((get_ident(), id(op)), None)
        if given is not None:
            self._look_at_outputs(op, outputs, *given, compute, dtype)

    @amanda.observer
    def _begin_backward(self, *gradients: Any, op: Watched) -> None:
        if self._is_sampled(op):
            self._given[get_ident(), id(op)] = gradients, _pytorch.tensors(gradients)

    @amanda.observer
    def _end_backward(self, *gradients: Any, op: Watched, dtype: Any) -> None:
        given = self._given.pop((get_ident(), id(op)), None)
        if given is not None:
            self._look_at_gradients(op, gradients, *given, dtype)

    @_timed
    def _look_at_inputs(self, op: Watched, inputs: Sequence[Any], names: dict[int, str], dtype: Any) -> None:
        for position, value in enumerate(inputs):
            if _is_floating(value, dtype) and value.is_leaf:
                self._note(op, names.get(position, f"input {position}"), value, is_given=True)
        self._given[get_ident(), id(op)] = inputs, _pytorch.tensors(inputs)

    @_timed
    def _look_at_outputs(
        self, op: Watched, outputs: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any],
        compute: Compute, dtype: Any,
    ) -> None:  # fmt: skip
        own, made = _pytorch.tensors(outputs), False
        for i, one in enumerate(own):
            if not _pytorch.is_view_of(one, given):
                made = True
                if _is_floating(one, dtype):
                    self._note(op, f"output {i}", one)
        drops = op.type == "scaled_dot_product_attention" and len(inputs) > 4 and inputs[4]
        if not (op.left or drops) and made and given and all(map(_pytorch.is_plain, [*given, *own])):
            records = any(one.requires_grad for one in own)
            self._run_again(op, own, lambda: _again.forward_again(compute, op.type, inputs, records))

    @_timed
    def _look_at_gradients(
        self, op: Watched, left: Sequence[Any], entered: Sequence[Any], given: Sequence[Any], dtype: Any
    ) -> None:
        own = _pytorch.tensors(left)
        for i, one in enumerate(left):
            if _is_floating(one, dtype):
                self._note(op, f"gradient {i}", one)
        if not op.left and own and all(map(_pytorch.is_plain, [*given, *own])):
            again = _again.node_again(entered, own)
            if again is None:
                op.left = "not a native op of PyTorch"
            else:
                self._run_again(op, own, again)

    @amanda.observer
    def _unscaled(self, flag: Any) -> None:
        self.overflowed = self.overflowed or bool(flag)

    def _note(self, op: Watched, what: str, value: Any, is_given: bool = False) -> None:
        if value.numel() and _pytorch.is_plain(value):
            self._norms.append(Norm(op, what, is_given, _pytorch.norm(value)))

    def _run_again(self, op: Watched, own: list[Any], again: Callable[[], list[Any]]) -> None:
        try:
            verdict, detail = _again.compared(own, again)
        except RuntimeError as error:  # what the op saved was freed, or memory is short
            op.left = f"raised {type(error).__name__} when run again"
            return
        if verdict == "varies":
            op.left = VARIES
            return
        op.recomputed += 1
        op.hash = f"{int(_pytorch.digest(own[0])) % (1 << 64):08x} in step {self.step}"
        if verdict == "corruption":
            op.corrupt += 1
            self._on_alarm(Alarm("corruption", self.step, op.phase, op.type, op.module, op.source, detail))


def _is_floating(value: Any, dtype: Any) -> bool:
    name = dtype(value)
    return name is not None and name.startswith(_FLOATING)
