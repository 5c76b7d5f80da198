"""The tool of a watched step: norms of what ops give, hashes, and ops that are run again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import wraps
from threading import get_ident
from time import perf_counter
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import rerun
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.sentinel import _again, _pytorch
from amanda.tools.sentinel._alarms import Alarm
from amanda.tools.sentinel._judged import Norm
from amanda.tools.sentinel._result import Watched

_FLOATING = ("float", "bfloat", "complex", "half")
Compute = Callable[..., Any]


def _timed(routine: Compute) -> Compute:
    """Add the time in a routine of a Watch to its `seconds`."""

    @wraps(routine)
    def timed(self: Watch, *values: Any, **kwargs: Any) -> None:
        begun = perf_counter()
        routine(self, *values, **kwargs)
        self.seconds += perf_counter() - begun

    return timed


class Watch(amanda.Tool):
    """Watches every op of PyTorch while its scope is open; `end_step` gives the norms, in order.

    share: of the executions that can be, are hashed and run again.  on_alarm: is given alarms at once.
    """

    def __init__(self, share: float, seed: int, on_alarm: Callable[[Alarm], None]) -> None:
        super().__init__("pytorch")
        self.step = 0
        self.paths: dict[int, str] = {}
        """Paths of parameters, by the numbers that `identity_of` gives."""
        self._share, self._random, self._on_alarm = share, random.Random(seed), on_alarm
        self.ops: dict[tuple[int, int | None], Watched] = {}
        self._norms: list[Norm] = []
        self._given: dict[tuple[int, int], tuple[Sequence[Any], Sequence[Any], bool]] = {}
        self.overflowed = False
        self._drawn = self._random.random()
        self.seconds = 0.0
        """Time in routines since the step began."""
        self.depends_on(StandardMapping(), MappingTool([["pytorch/*/eager", rerun]]))
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def end_step(self) -> list[Norm]:
        """Return the norms of the step so far, and begin another."""
        norms, self._norms = self._norms, []
        self._given.clear()
        self._drawn = self._random.random()
        return norms

    def _record(self, context: amanda.OpContext, phase: str, kind: str, left: str) -> Watched:
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
        op = self._record(context, context["phase"], context["type"], left)
        context.insert_before_op(self._begin, op=op, given=given, dtype=context["dtype"])
        context.insert_after_op(self._end, op=op, compute=compute, dtype=context["dtype"])

    @_timed
    def _backward(self, context: amanda.OpContext) -> None:
        kind, node = context["backward_type"], context.get_backward_op()
        if kind == "accumulate_grad":
            return
        gradients = [one for one in context.get_grad_outputs() or () if one is not None]
        left = _again.reason_to_leave_node(node, gradients[0].device.type if gradients else "cpu")
        op = self._record(context, "backward", kind, left)
        context.insert_before_backward_op(self._begin_backward, op=op)
        context.insert_after_backward_op(self._end_backward, op=op, dtype=context["dtype"])

    def _is_sampled(self, op: Watched) -> bool:
        """Return True for the share of executions, which in a step lie evenly apart from a random start."""
        op.executions += 1
        if op.left:
            return False
        before, self._drawn = self._drawn, self._drawn + self._share
        return int(self._drawn) > int(before)

    @amanda.observer
    @_timed
    def _begin(self, *inputs: Any, op: Watched, given: dict[int, str], dtype: Any) -> None:
        tensors = _pytorch.tensors(inputs)
        for position, value in enumerate(inputs):
            if _is_floating(value, dtype) and value.is_leaf:
                self._note(op, given.get(position, f"input {position}"), value, is_given=True)
        drops = op.type == "scaled_dot_product_attention" and len(inputs) > 4 and inputs[4]
        again = self._is_sampled(op) and tensors and not drops and all(map(_pytorch.is_plain, tensors))
        self._given[get_ident(), id(op)] = inputs, tensors, bool(again)

    @amanda.observer
    @_timed
    def _end(self, *outputs: Any, op: Watched, compute: Compute, dtype: Any) -> None:
        inputs, given, again = self._given.pop((get_ident(), id(op)), ((), (), False))
        own, made = _pytorch.tensors(outputs), False
        for i, one in enumerate(own):
            if not _pytorch.is_view_of(one, given):
                made = True
                if _is_floating(one, dtype):
                    self._note(op, f"output {i}", one)
        if again and made and all(map(_pytorch.is_plain, own)):
            records = any(one.requires_grad for one in own)
            self._run_again(op, own, lambda: _again.forward_again(compute, op.type, inputs, records))

    @amanda.observer
    @_timed
    def _begin_backward(self, *gradients: Any, op: Watched) -> None:
        tensors = _pytorch.tensors(gradients)
        if self._is_sampled(op) and all(map(_pytorch.is_plain, tensors)):
            self._given[get_ident(), id(op)] = gradients, tensors, True

    @amanda.observer
    @_timed
    def _end_backward(self, *gradients: Any, op: Watched, dtype: Any) -> None:
        entered, _, sampled = self._given.pop((get_ident(), id(op)), ((), (), False))
        own = _pytorch.tensors(gradients)
        for i, one in enumerate(gradients):
            if _is_floating(one, dtype):
                self._note(op, f"gradient {i}", one)
        if sampled and own and all(map(_pytorch.is_plain, own)):
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
            op.left = "not deterministic"
            return
        op.recomputed += 1
        op.hash = f"{int(_pytorch.digest(own[0])) % (1 << 64):08x} in step {self.step}"
        if verdict == "corruption":
            op.corrupt += 1
            self._on_alarm(Alarm("corruption", self.step, op.phase, op.type, op.module, op.source, detail))


def _is_floating(value: Any, dtype: Any) -> bool:
    name = dtype(value)
    return name is not None and name.startswith(_FLOATING)
