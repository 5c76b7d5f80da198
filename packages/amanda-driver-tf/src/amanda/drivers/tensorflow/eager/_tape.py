"""The backward pass: gradient functions find the execution that recorded them, and their ops are tools'."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from amanda import interceptor
from amanda.backend import Attributes, BackwardStep, EagerDriver, State, recomputed
from amanda.interceptor import Suspension
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, forwardprop, imperative_grad, record
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import custom_gradient

from ._calls import EagerCall
from ._earlier import Earlier
from ._schema import flattened
from ._state import NOBODY, Frame, Made, Mark, Outside, Pass, local, tensors_of

_OP_STEP, _SUMS, _ORDER_STEP = 1 << 20, 1 << 19, 1 << 40


class Tape:
    """Changes that the driver makes around tapes while it is attached."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._earlier = Earlier()

    def enter(self, attributes: Attributes) -> None:
        """Take the places until `attributes` are restored; call `register` then.

        What an interrupt left of an op in an earlier scope is forgotten.
        """
        local.under_way = local.frame = local.made = None
        self._earlier.enter(attributes)
        attributes.set(backprop, "_gradient_function", self._followed_gradient())
        attributes.set(forwardprop, "_jvp_dispatch", _unmarked_jvp())
        self.register()
        attributes.set(imperative_grad, "imperative_grad", self._followed_pass())
        attributes.set(record, "record_operation", self._mapped_record())
        for holder in (custom_gradient, tf):
            attributes.set(holder, "recompute_grad", _replayed(holder.recompute_grad))

    @staticmethod
    def register() -> None:
        """Make native code call the functions that are in place now, unless the program has deleted them."""
        for register, module, name in (
            (pywrap_tfe.TFE_Py_RegisterGradientFunction, backprop, "_gradient_function"),
            (pywrap_tfe.TFE_Py_RegisterJVPFunction, forwardprop, "_jvp_dispatch"),
        ):
            if hasattr(module, name):
                register(getattr(module, name))

    def _followed_pass(self) -> Callable[..., Any]:
        original = imperative_grad.imperative_grad

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            activation = interceptor.active()
            if activation is None or not tf.executing_eagerly():
                interceptor.reset_root()
                return original(*args, **kwargs)
            if not any(stack.wants_backward for stack in activation.state.stack.chain):
                return _nobodys(original, *args, **kwargs)
            nested = not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
            earlier = self._earlier.has(args[0] if args else kwargs["tape"])
            before = local.under_way, local.frame, local.made
            try:
                with Pass(activation.state, nested, earlier) as under_way:
                    result = original(*args, **kwargs)
            finally:  # also of contexts that an interrupt ended as their `__exit__` was called
                local.under_way, local.frame, local.made = before
                interceptor.reset_root()
            if not nested:  # a pass through this one would make more backward ops
                for trace in under_way.traces.values():
                    if not trace.pending:
                        self._driver.finish(trace)
            return result

        return run

    def _followed_gradient(self) -> Callable[..., Any]:
        """`_gradient_function`, whose ops are backward ops of what was recorded."""
        original = backprop._gradient_function

        @functools.wraps(original)
        def gradient_function(
            type: str, attrs: Any, count: int, inputs: Any, outputs: Any, grads: Any, *rest: Any
        ) -> Any:
            if local.under_way is None:
                return original(type, attrs, count, inputs, outputs, grads, *rest)
            mark = _mark_in(attrs)
            if mark is not None:
                attrs = attrs[:-2]
            else:
                self._earlier.tell_op(type, (*(inputs or ()), *(outputs or ())))
            call = functools.partial(original, type, attrs, count, inputs, outputs, grads, *rest)
            result = self._in_frame(mark, call, grads)
            if mark is None and local.frame is not NOBODY:
                given = [getattr(one, "_id", 0) for one in inputs or ()]
                local.under_way.returned(_listed(result), given, None)
            return result

        return gradient_function

    def _mapped_record(self) -> Callable[..., Any]:
        """`record_operation`, whose backward function belongs to the op that made the outputs."""
        original = record.record_operation

        @functools.wraps(original)
        def record_operation(
            op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any,
            forward_function: Any = None,
        ) -> Any:  # fmt: skip
            if interceptor.active() is None or not _is_eager(output_tensors):
                return original(op_type, output_tensors, input_tensors, backward_function, forward_function)
            maker = Mark.by_output.get(output_tensors[0]._id)
            mark = None
            if maker is not None:
                mark = Mark(maker.place, maker.order)
                mark.trace = maker.trace
                mark.know(tensors_of(input_tensors), tensors_of(output_tensors))

            def backward(*grads: Any) -> Any:
                return self._in_frame(mark, functools.partial(backward_function, *grads), grads)

            return original(op_type, output_tensors, input_tensors, backward, forward_function)

        return record_operation

    def _in_frame(self, mark: Mark | None, call: Callable[[], Any], grads: Sequence[Any]) -> Any:
        """Call what computes gradients; without a mark its ops are nobody's."""
        activation, under_way = interceptor.active(), local.under_way
        if activation is None or under_way is None:
            return call()
        if mark is None or mark.trace is None:
            before, local.frame = local.frame, NOBODY
            try:
                return call()
            finally:
                local.frame = before
        under_way.traces[id(mark.trace)] = mark.trace
        with Frame(mark, activation.state, grads):
            result = call()
        under_way.returned(_listed(result), mark.inputs, mark)
        return result

    def run(self, state: State, call: EagerCall) -> Any:
        """Run a call within a backward pass: as a backward op of the op whose gradient it computes."""
        if local.frame is not None:
            return self._run_in(local.frame, state, call)
        under_way = local.under_way
        assert under_way is not None
        tensors = flattened(call.inputs)
        mark = under_way.owner(tensors)
        if mark is None:
            self._earlier.tell_function(call.schema.type)
            return call.run(call.inputs)
        frame = Frame(mark, state, tensors)
        frame.count = _SUMS + under_way.counts.get(id(mark), 0)
        under_way.counts[id(mark)] = under_way.counts.get(id(mark), 0) + 1
        assert mark.trace is not None
        under_way.traces[id(mark.trace)] = mark.trace
        result = self._run_in(frame, state, call)
        for tensor in tensors_of(flattened([result])):
            under_way.claim(tensor, mark, True)
        return result

    def _run_in(self, frame: Frame, state: State, call: EagerCall) -> Any:
        trace = frame.mark.trace
        assert trace is not None
        place = frame.mark.place * _OP_STEP + frame.count + frame.mark.order * _ORDER_STEP
        frame.count += 1
        tensors = flattened(call.inputs)
        positions = [i for i, tensor in enumerate(tensors) if tensor._id in frame.gradients]
        step = BackwardStep(self._driver, trace, call.backward_op(), place, state)
        if not step.wanted:
            result = self._computed(frame, call, call.inputs)
            values = call.flat(result)
        else:
            result, values = self._instrumented(frame, call, step, tensors, positions)
        if positions:
            frame.gradients.update({tensor._id: tensor for tensor in values if hasattr(tensor, "_id")})
        return result

    def _instrumented(
        self, frame: Frame, call: EagerCall, step: BackwardStep, tensors: list[Any], positions: list[int]
    ) -> tuple[Any, list[Any]]:
        given = [tensors[i] for i in positions]
        with Suspension():
            grads = step.before(given)
        inputs = call.inputs
        if any(new is not old for new, old in zip(grads, given, strict=True)):
            for position, gradient in zip(positions, grads, strict=True):
                tensors[position] = gradient
            inputs = call.regrouped(tensors)
        result = self._computed(frame, call, inputs)
        values = call.flat(result)
        with Suspension():
            new_values = step.after(values, grads)
        if all(new is old for new, old in zip(new_values, values, strict=True)):
            return result, values
        return call.unflat(result, new_values), new_values

    def _computed(self, frame: Frame, call: EagerCall, inputs: list[Any]) -> Any:
        """Run the op; where a tape records it, its own backward ops are the same trace's."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            return call.run(inputs)
        assert frame.mark.trace is not None
        if frame.second is None:
            frame.second = frame.mark.trace.again()
        with Made(frame.mark.order + 1) as made:
            result = call.invoke(inputs)
        for mark in made.marks:
            mark.place = frame.count
            mark.trace = frame.second
        return result


def _listed(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else [result]


def _nobodys(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass whose ops no tool asks for."""
    before, local.frame = local.frame, NOBODY
    try:
        return run(*args, **kwargs)
    finally:
        local.frame = before
        interceptor.reset_root()


def _replayed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`recompute_grad`, whose function runs again at the place where it ran first."""

    @functools.wraps(original)
    def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def called(*args: Any, **kwargs: Any) -> Any:
            if interceptor.active() is None:
                return original(f)(*args, **kwargs)
            again = recomputed(f)

            def outside(*values: Any, **named: Any) -> Any:
                with Outside():
                    return again(*values, **named)

            return original(outside)(*args, **kwargs)

        return called

    return recompute_grad


def _unmarked_jvp() -> Callable[..., Any]:
    """`_jvp_dispatch`, which keeps functions by the attributes, without the mark among them."""
    original = forwardprop._jvp_dispatch

    @functools.wraps(original)
    def jvp_dispatch(type: str, attrs: Any, *rest: Any, **named: Any) -> Any:
        return original(type, attrs if _mark_in(attrs) is None else attrs[:-2], *rest, **named)

    return jvp_dispatch


def _is_eager(tensors: Sequence[Any]) -> bool:
    return bool(tensors) and type(tensors[0]) is EagerTensor


def _mark_in(attrs: Any) -> Mark | None:
    return attrs[-1] if attrs and type(attrs[-1]) is Mark else None
