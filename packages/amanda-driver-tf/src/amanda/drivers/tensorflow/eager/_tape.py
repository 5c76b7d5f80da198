"""The backward pass of tapes: each op of a gradient function is a backward op of the execution it is from."""

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
        """Patch the functions of tapes until `patches` are restored, and make native code call them."""
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
            """Run the pass in a TapePass; unmarked without routines, and as it is outside of a scope."""
            activation = interceptor.active()
            if activation is None or not tf.executing_eagerly():
                interceptor.reset_root()
                return original(*args, **kwargs)
            # Without routines at backward points, a pass runs as without tools; its ops are not forward ops.
            if not any(stack.wants_backward for stack in activation.state.stack.chain):
                return _run_unmarked(original, *args, **kwargs)
            # With an outer tape the backward ops are recorded, and have backward ops themselves.
            nested = not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
            may_be_earlier = self._earlier_tapes.may_have_recorded_earlier(
                args[0] if args else kwargs["tape"]
            )
            outer_state = local.backward_pass, local.gradient_call, local.marking
            try:
                with TapePass(activation.state, nested, may_be_earlier) as backward_pass:
                    result = original(*args, **kwargs)
            finally:  # also of contexts that an interrupt ended as their `__exit__` was called
                local.backward_pass, local.gradient_call, local.marking = outer_state
                interceptor.reset_root()
            # A nested pass may be differentiated, which makes more backward ops of the same executions.
            if not nested:
                for trace in backward_pass.traces.values():
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
            if local.backward_pass is None:
                return original(type, attrs, count, inputs, outputs, grads, *positional)
            mark = _mark_in(attrs)
            if mark is not None:
                attrs = attrs[:-2]  # the mark and its key, which are not TensorFlow's
            else:
                self._earlier_tapes.report_op(type, (*(inputs or ()), *(outputs or ())))
            call = functools.partial(original, type, attrs, count, inputs, outputs, grads, *positional)
            result = self._compute_gradients(mark, call, grads)
            # The results of an unknown op still belong to the ops that computed its inputs.
            if mark is None and local.gradient_call is not UNMARKED:
                input_ids = [getattr(tensor, "_id", 0) for tensor in inputs or ()]
                local.backward_pass.claim_returned(_as_list(result), input_ids, None)
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
            if interceptor.active() is None or not _is_eager(output_tensors):
                return original(op_type, output_tensors, input_tensors, backward_function, forward_function)
            producer_mark = TapeMark.by_output.get(output_tensors[0]._id)
            mark = None
            if producer_mark is not None:
                # A mark of its own: this record has other inputs and outputs than the producer's.
                mark = TapeMark(producer_mark.place, producer_mark.order)
                mark.trace = producer_mark.trace
                mark.record_tensors(tensors_of(input_tensors), tensors_of(output_tensors))

            def backward(*grads: Any) -> Any:
                return self._compute_gradients(mark, functools.partial(backward_function, *grads), grads)

            return original(op_type, output_tensors, input_tensors, backward, forward_function)

        return record_operation

    def _compute_gradients(self, mark: TapeMark | None, call: Callable[[], Any], grads: Sequence[Any]) -> Any:
        """Call a gradient function for the marked op; without a mark its ops run as without tools."""
        activation, backward_pass = interceptor.active(), local.backward_pass
        if activation is None or backward_pass is None:
            return call()
        if mark is None or mark.trace is None:
            outer_call, local.gradient_call = local.gradient_call, UNMARKED
            try:
                return call()
            finally:
                local.gradient_call = outer_call
        backward_pass.traces[id(mark.trace)] = mark.trace
        with GradientCall(mark, activation.state, grads):
            result = call()
        backward_pass.claim_returned(_as_list(result), mark.inputs, mark)
        return result

    def run_in_pass(self, state: State, call: EagerCall) -> Any:
        """Run a call within a backward pass, as a backward op of the op whose gradient it computes.

        Outside of gradient functions, the tape itself adds gradients.
        """
        if local.gradient_call is not None:
            return self._run_backward_op(local.gradient_call, state, call)
        backward_pass = local.backward_pass
        assert backward_pass is not None
        tensors = flatten(call.inputs)
        mark = backward_pass.owner(tensors)
        if mark is None:
            self._earlier_tapes.report_custom_gradient(call.schema.type)
            return call.run(call.inputs)
        gradient_call = GradientCall(mark, state, tensors)
        # Ops outside of gradient functions are additions by the tape; their number per mark makes the place.
        sum_count = backward_pass.counts.get(id(mark), 0)
        gradient_call.count = _FIRST_SUM + sum_count
        backward_pass.counts[id(mark)] = sum_count + 1
        assert mark.trace is not None
        backward_pass.traces[id(mark.trace)] = mark.trace
        result = self._run_backward_op(gradient_call, state, call)
        for tensor in tensors_of(flatten([result])):
            backward_pass.claim(tensor, mark, True)
        return result

    def _run_backward_op(self, gradient_call: GradientCall, state: State, call: EagerCall) -> Any:
        """Run an op of a gradient function with the routines of its backward points.

        Tools see those of its inputs that were computed from the gradients which the function received.
        """
        mark = gradient_call.mark
        trace = mark.trace
        assert trace is not None
        place = mark.order * _ORDER_STEP + mark.place * _OP_STEP + gradient_call.count
        gradient_call.count += 1
        tensors = flatten(call.inputs)
        positions = [i for i, tensor in enumerate(tensors) if tensor._id in gradient_call.gradients]
        step = BackwardStep(self._driver, trace, call.backward_op(), place, state)
        # Most backward ops have no routines and no analysis, and run as they are.
        if not step.has_work:
            result = self._run_op(gradient_call, call, call.inputs)
            values = call.flatten_result(result)
        else:
            result, values = self._run_routines(gradient_call, call, step, tensors, positions)
        if positions:
            gradient_call.gradients.update(
                {tensor._id: tensor for tensor in values if hasattr(tensor, "_id")}
            )
        return result

    def _run_routines(
        self, gradient_call: GradientCall, call: EagerCall, step: BackwardStep, tensors: list[Any],
        positions: list[int],
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Run a backward op between its routines; return its result, and the result's tensors."""
        incoming = [tensors[i] for i in positions]
        with Suspension():
            grads = step.run_before(incoming)
        inputs = call.inputs
        if any(new is not old for new, old in zip(grads, incoming, strict=True)):
            for position, gradient in zip(positions, grads, strict=True):
                tensors[position] = gradient
            inputs = call.group_inputs(tensors)
        result = self._run_op(gradient_call, call, inputs)
        values = call.flatten_result(result)
        with Suspension():
            new_values = step.run_after(values, grads)
        if all(new is old for new, old in zip(new_values, values, strict=True)):
            return result, values
        return call.restore_result(result, new_values), new_values

    def _run_op(self, gradient_call: GradientCall, call: EagerCall, inputs: list[Any]) -> Any:
        """Run the op; where a tape records it, mark it so that its backward ops belong to the same trace."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            return call.run(inputs)
        assert gradient_call.mark.trace is not None
        if gradient_call.backward_trace is None:
            gradient_call.backward_trace = gradient_call.mark.trace.copy_for_double_backward()
        with Marking(gradient_call.mark.order + 1) as marking:
            result = call.invoke(inputs)
        for mark in marking.marks:
            mark.place = gradient_call.count
            mark.trace = gradient_call.backward_trace
        return result


def _as_list(result: Any) -> Any:
    """Return a list or tuple as it is, and another result as a list of one."""
    return result if isinstance(result, (list, tuple)) else [result]


def _run_unmarked(run_pass: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass in which no tool has routines, so that its ops run as without tools."""
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
        @functools.wraps(f)
        def call_recomputed(*args: Any, **kwargs: Any) -> Any:
            """Call the function, whose backward pass calls it again with the same ids of ops."""
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
        plain_attrs = attrs if _mark_in(attrs) is None else attrs[:-2]  # without the mark and its key
        return original(type, plain_attrs, *positional, **named)

    return jvp_dispatch


def _is_eager(tensors: Sequence[Any]) -> bool:
    return bool(tensors) and type(tensors[0]) is EagerTensor


def _mark_in(attrs: Any) -> TapeMark | None:
    return attrs[-1] if attrs and type(attrs[-1]) is TapeMark else None
