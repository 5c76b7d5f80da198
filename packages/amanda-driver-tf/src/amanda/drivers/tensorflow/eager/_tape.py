"""Backward passes of tapes: an op of a gradient function is a backward op of the marked forward op."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, Patches, State, recomputable
from amanda.interceptor import Suspension
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, forwardprop, imperative_grad, record
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import custom_gradient

from ._calls import EagerCall
from ._schema import flatten
from ._state import UNMARKED, ForwardContext, GradientCall, Marking, TapeMark, TapePass, local, tensors_of
from ._unseen_ops import EarlierTapes

# The place of a backward op is one number: its order, the place of the op that it is of, and a count. Sums of
# gradients are counted from _FIRST_SUM, apart from the ops of gradient functions.
_ORDER_STEP, _OP_STEP, _FIRST_SUM = 1 << 40, 1 << 20, 1 << 19


class Tape:
    """Patches of TensorFlow's tapes while the driver is attached."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._earlier_tapes = EarlierTapes()

    def patch(self, patches: Patches) -> None:
        """Patch the functions of tapes until `patches` are restored, and make native code call them.

        Resets the state of the thread's backward pass.
        """
        # An interrupt of an earlier scope may have left its op, gradient function or pass here.
        local.backward_pass = local.gradient_call = local.marking = None
        self._earlier_tapes.patch(patches)
        patches.set(backprop, "_gradient_function", self._stand_in_for_gradient_function())
        # Forward accumulators get the attributes of a record, too, and use them as a cache key.
        patches.set(forwardprop, "_jvp_dispatch", _stand_in_for_jvp_dispatch())
        self.register()
        patches.set(imperative_grad, "imperative_grad", self._stand_in_for_imperative_grad())
        patches.set(record, "record_operation", self._stand_in_for_record_operation())
        # `tf.recompute_grad` is a second reference to the function.
        for holder in (custom_gradient, tf):
            patches.set(holder, "recompute_grad", _stand_in_for_recompute_grad(holder.recompute_grad))

    @staticmethod
    def register() -> None:
        """Make native code call the present functions, unless the program has deleted them."""
        for register, module, name in (
            (pywrap_tfe.TFE_Py_RegisterGradientFunction, backprop, "_gradient_function"),
            (pywrap_tfe.TFE_Py_RegisterJVPFunction, forwardprop, "_jvp_dispatch"),
        ):
            if hasattr(module, name):
                register(getattr(module, name))

    def _stand_in_for_imperative_grad(self) -> Callable[..., Any]:
        """Stand-in for `imperative_grad`: runs a backward pass with the routines of its ops."""
        original = imperative_grad.imperative_grad

        @functools.wraps(original)
        def run_backward_pass(*args: Any, **kwargs: Any) -> Any:
            """Run the pass in a TapePass; as without tools if they have no routines at backward points.

            Resets the root of op ids; after a pass that no tape records, marks its traces as analysed.
            """
            activation = interceptor.active()
            if activation is None or not tf.executing_eagerly():
                interceptor.reset_root()
                return original(*args, **kwargs)
            # Without routines at backward points, a pass runs as without tools; its ops are not forward ops.
            if not any(stack.wants_backward for stack in activation.state.stack.chain):
                return _run_unmarked(original, *args, **kwargs)
            # With an outer tape the backward ops are recorded, and have backward ops themselves.
            is_nested = not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
            tape = args[0] if args else kwargs["tape"]
            may_have_earlier_ops = self._earlier_tapes.may_have_recorded_earlier(tape)
            outer_state = local.backward_pass, local.gradient_call, local.marking
            try:
                with TapePass(activation.state, is_nested, may_have_earlier_ops) as backward_pass:
                    result = original(*args, **kwargs)
            finally:
                # An interrupt may have come as a context was left, which then did not restore the state.
                local.backward_pass, local.gradient_call, local.marking = outer_state
                interceptor.reset_root()
            # A nested pass may be differentiated, which makes more backward ops of the same executions.
            if not is_nested:
                for trace in backward_pass.trace_by_id.values():
                    self._driver.mark_backward_analysed(trace)
            return result

        return run_backward_pass

    def _stand_in_for_gradient_function(self) -> Callable[..., Any]:
        """Stand-in for `_gradient_function`: its ops are backward ops of the op that the tape recorded."""
        original = backprop._gradient_function

        @functools.wraps(original)
        def gradient_function(
            type: str, attrs: Any, count: int, inputs: Any, outputs: Any, grads: Any, *positional: Any
        ) -> Any:
            """Compute the gradients of a recorded op, and claim them; report an op without a mark."""
            if local.backward_pass is None:  # no pass in a scope, with routines at backward points
                return original(type, attrs, count, inputs, outputs, grads, *positional)
            mark, attrs = _split_mark(attrs)
            if mark is None:
                self._earlier_tapes.report_op(type, (*(inputs or ()), *(outputs or ())))
            compute = functools.partial(original, type, attrs, count, inputs, outputs, grads, *positional)
            result = self._compute_gradients(mark, compute, grads)
            # The results for an op without a mark still belong to the ops that computed its inputs.
            if mark is None and local.gradient_call is not UNMARKED:
                input_ids = [getattr(tensor, "_id", 0) for tensor in inputs or ()]
                local.backward_pass.claim_returned(_as_list(result), input_ids, reader=None)
            return result

        return gradient_function

    def _stand_in_for_record_operation(self) -> Callable[..., Any]:
        """Stand-in for `record_operation`: its backward function belongs to the op that made the outputs."""
        original = record.record_operation

        @functools.wraps(original)
        def record_operation(
            op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any,
            forward_function: Any = None,
        ) -> Any:  # fmt: skip
            """Record an op with a backward function for the mark of the op that computed the first output."""
            if interceptor.active() is None or not _is_eager(output_tensors):
                return original(op_type, output_tensors, input_tensors, backward_function, forward_function)
            producer = TapeMark.by_output_id.get(output_tensors[0]._id)
            mark = None
            if producer is not None:
                # A mark of its own: this record has other inputs and outputs than the producer's.
                mark = TapeMark(producer.place, producer.order)
                mark.trace = producer.trace
                mark.record_tensors(tensors_of(input_tensors), tensors_of(output_tensors))

            def marked_backward(*grads: Any) -> Any:
                return self._compute_gradients(mark, functools.partial(backward_function, *grads), grads)

            return original(op_type, output_tensors, input_tensors, marked_backward, forward_function)

        return record_operation

    def _compute_gradients(
        self, mark: TapeMark | None, compute: Callable[[], Any], grads: Sequence[Any]
    ) -> Any:
        """Call a gradient function, bound to `grads`, for the marked op; without a mark as without tools.

        Claims the gradients that the function returns for a marked op.
        """
        activation, backward_pass = interceptor.active(), local.backward_pass
        if activation is None or backward_pass is None:
            return compute()
        if mark is None or mark.trace is None:
            outer_call, local.gradient_call = local.gradient_call, UNMARKED
            try:
                return compute()
            finally:
                local.gradient_call = outer_call
        backward_pass.trace_by_id[id(mark.trace)] = mark.trace
        with GradientCall(mark, activation.state, grads):
            result = compute()
        backward_pass.claim_returned(_as_list(result), mark.input_ids, reader=mark)
        return result

    def run_in_backward_pass(self, state: State, call: EagerCall) -> Any:
        """Run a call within a backward pass, as a backward op of the op whose gradient it computes.

        Outside of gradient functions the call is a sum of gradients by the tape itself. A sum that belongs to
        no op on record runs as without tools, with a report if it may be of an op before the scope.
        """
        if local.gradient_call is not None:
            return self._run_backward_op(local.gradient_call, state, call)
        backward_pass = local.backward_pass
        assert backward_pass is not None
        summands = flatten(call.inputs)
        mark = backward_pass.find_owner(summands)
        if mark is None:
            self._earlier_tapes.report_custom_gradient(call.schema.type)
            return call.run(call.inputs)
        gradient_call = GradientCall(mark, state, summands)
        # The place of a sum is its number among those of its op.
        sum_count = backward_pass.sum_count_by_mark_id.get(id(mark), 0)
        gradient_call.op_count = _FIRST_SUM + sum_count
        backward_pass.sum_count_by_mark_id[id(mark)] = sum_count + 1
        assert mark.trace is not None
        backward_pass.trace_by_id[id(mark.trace)] = mark.trace
        result = self._run_backward_op(gradient_call, state, call)
        for tensor in tensors_of(flatten([result])):
            backward_pass.claim(tensor, mark, is_maker=True)
        return result

    def _run_backward_op(self, gradient_call: GradientCall, state: State, call: EagerCall) -> Any:
        """Run an op of a gradient function with the routines of its backward points.

        Tools see those of its inputs that were computed from the gradients which the function received.  If
        there are some, its outputs count as such for later ops of the function.
        """
        mark = gradient_call.mark
        trace = mark.trace
        assert trace is not None
        place = mark.order * _ORDER_STEP + mark.place * _OP_STEP + gradient_call.op_count
        gradient_call.op_count += 1
        tensors = flatten(call.inputs)
        positions = [i for i, tensor in enumerate(tensors) if tensor._id in gradient_call.gradient_by_id]
        step = BackwardStep(self._driver, trace, call.backward_op(), place, state)
        # Most backward ops have no routines and no analysis, and run as they are.
        if not step.has_work:
            result = self._run_op(gradient_call, call, call.inputs)
            output_tensors = call.flatten_result(result)
        else:
            result, output_tensors = self._run_with_routines(gradient_call, call, step, tensors, positions)
        # What is computed from a gradient is a gradient, too.
        if positions:
            gradient_call.gradient_by_id.update(
                {tensor._id: tensor for tensor in output_tensors if hasattr(tensor, "_id")}
            )
        return result

    def _run_with_routines(
        self, gradient_call: GradientCall, call: EagerCall, step: BackwardStep, tensors: list[Any],
        gradient_positions: list[int],
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Run a backward op between its routines; return its result, also as tensors.

        gradient_positions: of the gradients among `tensors`, the op's flat inputs; tools see these alone.
        """
        old_grads = [tensors[i] for i in gradient_positions]
        with Suspension():
            grads = step.run_before(old_grads)
        inputs = call.inputs
        if any(new is not old for new, old in zip(grads, old_grads, strict=True)):
            for position, gradient in zip(gradient_positions, grads, strict=True):
                tensors[position] = gradient
            inputs = call.group_inputs(tensors)
        result = self._run_op(gradient_call, call, inputs)
        output_tensors = call.flatten_result(result)
        with Suspension():
            new_output_tensors = step.run_after(output_tensors, grads)
        if all(new is old for new, old in zip(new_output_tensors, output_tensors, strict=True)):
            return result, output_tensors
        return call.restore_result(result, new_output_tensors), new_output_tensors

    def _run_op(self, gradient_call: GradientCall, call: EagerCall, inputs: list[Any]) -> Any:
        """Run the op; if a tape records it, mark it, so that second gradients are backward ops of this op."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            return call.run(inputs)
        assert gradient_call.mark.trace is not None
        if gradient_call.backward_trace is None:
            gradient_call.backward_trace = gradient_call.mark.trace.copy_for_double_backward()
        with Marking(gradient_call.mark.order + 1) as marking:
            result = call.invoke(inputs)
        for mark in marking.marks:
            mark.place = gradient_call.op_count
            mark.trace = gradient_call.backward_trace
        return result


def _as_list(result: Any) -> Any:
    """Return a list or tuple as it is, and another result as a list of one."""
    return result if isinstance(result, (list, tuple)) else [result]


def _run_unmarked(run_pass: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass in which no tool has routines, so that its ops run as without tools.

    Resets the root of op ids.
    """
    outer_call, local.gradient_call = local.gradient_call, UNMARKED
    try:
        return run_pass(*args, **kwargs)
    finally:
        local.gradient_call = outer_call
        interceptor.reset_root()


def _stand_in_for_recompute_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for `recompute_grad`: the recomputed ops have the ids of the first computation."""

    @functools.wraps(original)
    def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `f` by `recompute_grad`, anew at each call."""

        @functools.wraps(f)
        def call_recomputed(*args: Any, **kwargs: Any) -> Any:
            """Call the function; in a scope, its backward pass calls it again with the same ids of ops."""
            # Decided at each call: a function may be wrapped long before a scope opens.
            if interceptor.active() is None:
                return original(f)(*args, **kwargs)
            recompute = recomputable(f)

            def compute_forward(*values: Any, **named: Any) -> Any:
                # Recomputed within a backward pass, the ops are forward ops all the same.
                with ForwardContext():
                    return recompute(*values, **named)

            return original(compute_forward)(*args, **kwargs)

        return call_recomputed

    return recompute_grad


def _stand_in_for_jvp_dispatch() -> Callable[..., Any]:
    """Stand-in for `_jvp_dispatch`, which caches functions by attributes: leaves the mark out of these."""
    original = forwardprop._jvp_dispatch

    @functools.wraps(original)
    def jvp_dispatch(type: str, attrs: Any, *positional: Any, **named: Any) -> Any:
        _, plain_attrs = _split_mark(attrs)
        return original(type, plain_attrs, *positional, **named)

    return jvp_dispatch


def _is_eager(tensors: Sequence[Any]) -> bool:
    return bool(tensors) and type(tensors[0]) is EagerTensor


def _split_mark(attrs: Any) -> tuple[TapeMark | None, Any]:
    """Return the mark at the end of a record's attributes, or None, and the attributes without it."""
    if attrs and type(attrs[-1]) is TapeMark:
        return attrs[-1], attrs[:-2]  # the mark stands behind its name
    return None, attrs
