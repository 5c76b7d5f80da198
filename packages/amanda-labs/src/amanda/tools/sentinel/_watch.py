"""The tool of a watched step: norms and hashes of outputs, and ops that run again."""

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
from amanda.tools.kit import torch_tensors
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.rerun import rerun
from amanda.tools.sentinel import _reruns
from amanda.tools.sentinel._result import VARIES, Alarm, WatchedNorm, WatchedOp

_FLOATING = ("float", "bfloat", "complex", "half")
Compute = Callable[..., Any]


def _counts_time(routine: Compute) -> Compute:
    """Return a method of StepWatcher that also adds the time in it to `seconds` of the watcher."""

    @wraps(routine)
    def timed_method(self: StepWatcher, *values: Any, **kwargs: Any) -> None:
        start = perf_counter()
        routine(self, *values, **kwargs)
        self.seconds += perf_counter() - start

    return timed_method


class StepWatcher(amanda.Tool):
    """Take norms and hashes of a share of the executions of a step, and run these again.

    share: share of the executions.  on_alarm: called with each alarm of a corruption, at once.
    on_exhausted: called before a forward op is analysed after the allowance is spent.
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
        self.ops: dict[tuple[int, int | None], WatchedOp] = {}
        self._norms: list[WatchedNorm] = []
        self._inputs_of_running: dict[tuple[int, int], tuple[Sequence[Any], Sequence[Any]]] = {}
        self.overflowed = False
        """True if a GradScaler has found gradients that are not finite in the step."""
        self._sample_position = self._random.random()
        self.seconds = 0.0
        """Time in the analysis of ops and in looking at them since the step began."""
        self.allowance = math.inf
        """Seconds of analysis in a step after which the scope of the step closes."""
        self.depends_on(StandardMapping(), MappingTool([["pytorch/*/eager", rerun]]))
        self.add_inst_for_op(self._instrument_forward)
        self.add_inst_for_op(self._instrument_backward, backward=True)

    def end_step(self) -> list[WatchedNorm]:
        """Return the norms of the step in their order, and begin a step."""
        norms, self._norms = self._norms, []
        self._inputs_of_running.clear()
        self._sample_position = self._random.random()  # where the samples of the next step start
        return norms

    def _watched_op(self, context: amanda.OpContext, phase: str, kind: str, reason: str) -> WatchedOp:
        """Return the record of an op; the first analysis makes it, with a reason not to run the op again."""
        key = context.get_op_id(), context.get_backward_op_id()
        if key not in self.ops:
            self.ops[key] = WatchedOp(phase, kind, context.get_scope(), context.get_source(), left=reason)
        return self.ops[key]

    @_counts_time
    def _instrument_forward(self, context: amanda.OpContext) -> None:
        """Insert the routines that check a forward op, none of an optimizer; record its parameters' paths.

        Calls `on_exhausted` if the allowance is spent; also watches for gradients that overflow.
        """
        if context.get_forward_op_type() == "_amp_foreach_non_finite_check_and_unscale_":
            context.insert_after_op(self._note_overflow, outputs=[], flag=context.get_inputs()[1])
        # In-place updates cannot run again, and the next forward pass reads their results.
        if context["phase"] in ("optimizer", "construction"):
            return
        # New ops are analysed over several steps, each within its allowance.
        if self.seconds > self.allowance:
            self._on_exhausted()
        parameter_names = {}
        for position in range(len(context.get_inputs())):
            variable = context.get_variable(position)
            path = None if variable is None else context.get_variable_path(variable)
            if path is not None:
                self.paths[self.identity_of(variable)] = path
                parameter_names[position] = f"parameter {path}"
        reason, compute = _reruns.reason_not_to_rerun(context), None
        try:
            compute = context.get_computation()
        except AmandaError:
            reason = reason or "not a native op of PyTorch"
        op = self._watched_op(context, context["phase"], context["type"], reason)
        context.insert_before_op(
            self._before_op, op=op, parameter_names=parameter_names, dtype=context["dtype"]
        )
        context.insert_after_op(self._after_op, op=op, compute=compute, dtype=context["dtype"])

    @_counts_time
    def _instrument_backward(self, context: amanda.OpContext) -> None:
        """Insert the routines that check a backward op; none for the accumulation of a gradient."""
        kind, node = context["backward_type"], context.get_backward_op()
        if kind == "accumulate_grad":
            return
        gradients = [gradient for gradient in context.get_grad_outputs() or () if gradient is not None]
        reason = _reruns.reason_not_to_rerun_node(node, gradients[0].device.type if gradients else "cpu")
        op = self._watched_op(context, "backward", kind, reason)
        context.insert_before_backward_op(self._before_backward_op, op=op)
        context.insert_after_backward_op(self._after_backward_op, op=op, dtype=context["dtype"])

    def _is_sampled(self, op: WatchedOp) -> bool:
        """Count an execution; return True for a share of them, evenly spaced from a random start."""
        op.executions += 1
        # Evenly spaced ops cover a step better than ones that are drawn each by itself.
        previous, self._sample_position = self._sample_position, self._sample_position + self.share
        # Each whole number that is passed is a sample.
        if int(self._sample_position) > int(previous):
            return True
        self._inputs_of_running.pop((get_ident(), id(op)), None)  # of an execution that raised
        return False

    @amanda.observer
    def _before_op(self, *inputs: Any, op: WatchedOp, parameter_names: dict[int, str], dtype: Any) -> None:
        if self._is_sampled(op):
            self._check_inputs(op, inputs, parameter_names, dtype)

    @amanda.observer
    def _after_op(self, *outputs: Any, op: WatchedOp, compute: Compute, dtype: Any) -> None:
        open_inputs = self._inputs_of_running.pop((get_ident(), id(op)), None)
        if open_inputs is not None:
            self._check_outputs(op, outputs, *open_inputs, compute, dtype)

    @amanda.observer
    def _before_backward_op(self, *gradients: Any, op: WatchedOp) -> None:
        if self._is_sampled(op):
            self._inputs_of_running[get_ident(), id(op)] = gradients, torch_tensors(gradients)

    @amanda.observer
    def _after_backward_op(self, *gradients: Any, op: WatchedOp, dtype: Any) -> None:
        open_inputs = self._inputs_of_running.pop((get_ident(), id(op)), None)
        if open_inputs is not None:
            self._check_gradients(op, gradients, *open_inputs, dtype)

    @_counts_time
    def _check_inputs(
        self, op: WatchedOp, inputs: Sequence[Any], parameter_names: dict[int, str], dtype: Any
    ) -> None:
        """Record norms of leaves among the inputs, and hold the inputs until the op has run."""
        for position, value in enumerate(inputs):
            # Other inputs are outputs of ops, whose norms are taken there.
            if _is_floating(value, dtype) and value.is_leaf:
                name = parameter_names.get(position, f"input {position}")
                self._record_norm(op, name, value, is_input=True)
        self._inputs_of_running[get_ident(), id(op)] = inputs, torch_tensors(inputs)

    @_counts_time
    def _check_outputs(
        self, op: WatchedOp, outputs: Sequence[Any], inputs: Sequence[Any], input_tensors: Sequence[Any],
        compute: Compute, dtype: Any,
    ) -> None:  # fmt: skip
        """Record norms of the outputs, and run the op again if that is possible.

        An op whose outputs are all views of its inputs computes no numbers, and is not run again.
        """
        tensors, has_new_memory = torch_tensors(outputs), False
        for i, output in enumerate(tensors):
            # A view has no numbers of its own.
            if not _reruns.is_view_of(output, input_tensors):
                has_new_memory = True
                if _is_floating(output, dtype):
                    self._record_norm(op, f"output {i}", output)
        # Input 4 of attention is its dropout, a number that is known at each execution alone.
        is_random = op.type == "scaled_dot_product_attention" and len(inputs) > 4 and inputs[4]
        are_plain = all(map(_reruns.is_plain, [*input_tensors, *tensors]))
        # `op.left` is the reason not to run the op again.
        if not (op.left or is_random) and has_new_memory and input_tensors and are_plain:
            is_recorded = any(output.requires_grad for output in tensors)
            self._rerun(op, tensors, lambda: _reruns.rerun_op(compute, op.type, inputs, is_recorded))

    @_counts_time
    def _check_gradients(
        self,
        op: WatchedOp,
        outgoing: Sequence[Any],
        incoming: Sequence[Any],
        incoming_tensors: Sequence[Any],
        dtype: Any,
    ) -> None:
        """Record norms of the gradients; run the node again if that is possible, or note if Python cannot."""
        tensors = torch_tensors(outgoing)
        for i, gradient in enumerate(outgoing):
            if _is_floating(gradient, dtype):
                self._record_norm(op, f"gradient {i}", gradient)
        if not op.left and tensors and all(map(_reruns.is_plain, [*incoming_tensors, *tensors])):
            rerun = _reruns.node_rerunner(incoming, tensors)
            if rerun is None:
                op.left = "not a native op of PyTorch"
            else:
                self._rerun(op, tensors, rerun)

    @amanda.observer
    def _note_overflow(self, flag: Any) -> None:
        self.overflowed = self.overflowed or bool(flag)

    def _record_norm(self, op: WatchedOp, tensor_name: str, value: Any, is_input: bool = False) -> None:
        """Record the norm of a tensor; no effect for one that is empty or not plain."""
        if value.numel() and _reruns.is_plain(value):
            self._norms.append(WatchedNorm(op, tensor_name, is_input, _reruns.norm_of(value)))

    def _rerun(self, op: WatchedOp, outputs: list[Any], rerun: Callable[[], list[Any]]) -> None:
        """Run an op again; record its hash, an alarm for a corruption, or the reason not to run it again."""
        try:
            verdict, detail = _reruns.compare_reruns(outputs, rerun)
        except RuntimeError as error:  # saved tensors were freed, or memory is short
            op.left = f"raised {type(error).__name__} when run again"
            return
        if verdict == "varies":
            op.left = VARIES
            return
        op.recomputed += 1
        # Of the first output, in hexadecimal, to be compared by eye between two runs.
        op.hash = f"{int(_reruns.digest(outputs[0])) % (1 << 64):08x} in step {self.step}"
        if verdict == "corruption":
            op.corrupt += 1
            self._on_alarm(Alarm("corruption", self.step, op.phase, op.type, op.module, op.source, detail))


def _is_floating(value: Any, dtype: Any) -> bool:
    name = dtype(value)
    return name is not None and name.startswith(_FLOATING)
