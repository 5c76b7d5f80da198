"""The six actions in a function, with the tape inside and outside of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda
from amanda.drivers.tensorflow.function import FunctionDriver
from amanda.errors import RoutineError

MASK = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]], "f4")
inside = pytest.mark.parametrize("inside", [True, False], ids=["tape inside", "tape outside"])


def straight_through(routine):
    """A routine whose gradient is the identity."""
    return lambda value: value + tf.stop_gradient(routine(value) - value)


def run(layer, tool, inside):
    with amanda.apply(tool):
        first = layer.trained(inside)
        again = layer.trained(inside)
    np.testing.assert_equal(again, first)
    return first


def close(results, expected_results):
    for result, expected in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@inside
def test_an_input_is_changed_and_the_gradient_passes_straight_through(traced, inside) -> None:
    tool = inserting("insert_before_op", "MatMul", lambda w: w * MASK, [1])
    close(run(traced, tool, inside), traced.by_hand(weight=straight_through(lambda w: w * MASK)))


@inside
def test_the_backward_op_reads_the_changed_input(layer, inside) -> None:
    """relu's gradient is computed on the value that relu was given."""
    tool = inserting("insert_before_op", "Relu", lambda h: -h)
    close(run(layer, tool, inside), layer.by_hand(hidden=straight_through(lambda h: -h)))


@inside
def test_an_output_is_changed_for_all_but_its_own_backward_op(traced, inside) -> None:
    tool = inserting("insert_after_op", "Relu", lambda y: y * 3)
    close(run(traced, tool, inside), traced.by_hand(activated=straight_through(lambda y: y * 3)))


@inside
def test_gradients_are_changed_before_their_op(traced, inside) -> None:
    value, gradient = traced.by_hand()
    tool = inserting("insert_before_backward_op", "ReluGrad", lambda g: g * 2)
    close(run(traced, tool, inside), [value, gradient * 2])


@inside
def test_gradients_are_changed_after_their_op(traced, inside) -> None:
    value, gradient = traced.by_hand()
    masked = inserting(
        "insert_after_backward_op", "MatMul", lambda g: g * MASK if g.shape == MASK.shape else None
    )
    close(run(traced, masked, inside), [value, gradient * MASK])


@inside
def test_a_replaced_backward_op_gives_the_routines_gradients(traced, inside) -> None:
    tool = inserting("replace_backward_op", "ReluGrad", lambda g: g)
    relu = straight_through(tf.nn.relu)
    close(run(traced, tool, inside), traced.by_hand(relu=relu))


@inside
def test_a_replaced_op_takes_part_in_autodiff(traced, inside) -> None:
    tool = inserting("replace_op", "Relu", lambda h: h * 0.5)
    close(run(traced, tool, inside), traced.by_hand(relu=lambda h: h * 0.5))


@pytest.mark.parametrize(
    ("results", "message"),
    [(lambda h: None, "returned None where Relu gives a tensor"), (lambda h: (h, h), "returned 2 outputs")],
)
def test_a_replacement_that_gives_too_little_or_too_much_is_an_error(layer, results, message) -> None:
    tool = inserting("replace_op", "Relu", results)
    with amanda.apply(tool), pytest.raises(RoutineError, match=message) as caught:
        layer.loss(layer.x)
    assert "of Relu (op " in caught.value.__notes__[0]


def test_a_replacement_that_returns_no_tensor_is_an_error_that_names_the_tool(layer) -> None:
    with amanda.apply(inserting("replace_op", "Relu", lambda h: "text")), pytest.raises(TypeError) as caught:
        layer.loss(layer.x)
    assert "of Relu (op " in caught.value.__notes__[0]


def test_an_op_without_outputs_is_replaced_by_nothing() -> None:
    @tf.function
    def checked(x):
        tf.debugging.Assert(tf.reduce_all(x > 0), [x])
        return x * 2

    with amanda.apply(inserting("replace_op", "Assert", lambda *inputs: None)):
        assert checked(tf.constant([-1.0])).numpy() == -2


@inside
@pytest.mark.parametrize("marked", [True, False])
def test_a_differentiable_routine_takes_part_in_autodiff(traced, inside, marked) -> None:
    routine = amanda.differentiable(lambda w: tf.tanh(w)) if marked else tf.tanh
    tool = inserting("insert_before_op", "MatMul", routine, [1])
    with amanda.autodiff_enabled() if not marked else amanda.autodiff_disabled():
        results = run(traced, tool, inside)
    close(results, traced.by_hand(weight=tf.tanh))


@inside
def test_differentiable_routines_one_after_another(layer, inside) -> None:
    tool = inserting("insert_after_op", "Relu", amanda.differentiable(lambda y: tf.sin(y)))
    tool.add_inst_for_op(
        lambda context: (
            context.insert_after_op(amanda.differentiable(lambda y: y * y))
            if context.get_op().type == "Relu"
            else None
        ),
        require_outputs=True,
    )
    close(run(layer, tool, inside), layer.by_hand(activated=lambda y: tf.sin(y) ** 2))


@inside
def test_a_tool_that_gives_every_value_back_changes_nothing(traced, inside) -> None:
    vanilla = traced.trained(inside)
    tool = amanda.Tool()
    for action in ("insert_before_op", "insert_after_op"):
        after = "after" in action
        tool.add_inst_for_op(
            lambda context, action=action: getattr(context, action)(lambda *values: values),
            require_outputs=after,
        )
        backward = action.replace("_op", "_backward_op")
        tool.add_inst_for_op(
            lambda context, action=backward: getattr(context, action)(lambda *values: values),
            backward=True, require_outputs=after,
        )  # fmt: skip
    close(run(traced, tool, inside), vanilla)


@inside
def test_what_an_execution_hands_on_is_there_in_its_backward_routines(layer, inside) -> None:
    values = []

    def keep(value, run):
        run["value"] = value

    tool = inserting("insert_before_op", "Relu", keep)
    tool.depends_on(
        backward := inserting(
            "insert_before_backward_op", "ReluGrad", lambda g, run: values.append(run["value"].numpy())
        )
    )
    with amanda.apply(tool, backward):
        layer.trained(inside)
    np.testing.assert_allclose(values, [layer.x @ tf.convert_to_tensor(layer.weight)])


def test_an_observer_sees_each_execution(layer) -> None:
    outputs = []
    tool = inserting("insert_after_op", "Relu", amanda.observer(lambda y: outputs.append(y.numpy())))
    with amanda.apply(tool):
        vanilla = layer.loss(layer.x)
        layer.loss(layer.x)
    np.testing.assert_allclose((outputs[0] ** 2).sum(), vanilla, rtol=1e-5)
    assert len(outputs) == 2


def test_values_are_present_at_analysis(layer) -> None:
    values = []

    def analysis(context) -> None:
        if context.get_op().type == "MatMul":
            values.extend([context.get_value(0).numpy(), context.get_value("b").numpy()])
            assert context.get_attrs()["transpose_a"] is False
            assert context.get_source().startswith(__file__.replace("test_actions", "conftest"))

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    with amanda.apply(tool):
        layer.loss(layer.x)
    np.testing.assert_array_equal(values[0], layer.x)
    np.testing.assert_array_equal(values[1], layer.weight)


@inside
@pytest.mark.parametrize(
    ("select", "first", "second"),
    [([0], 10, 1), ([1], 1, 100), (None, 10, 100)],
    ids=["first", "second", "both"],
)
def test_one_tensor_twice_is_two_inputs(inside, select, first, second) -> None:
    x = tf.constant([2.0, 3.0])

    @tf.function
    def square(x):
        return tf.reduce_sum(tf.multiply(x, x))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = square(x)
        return y, tape.gradient(y, x)

    def routine(*values):
        factors = {(0,): [10.0], (1,): [100.0]}.get(tuple(select or ()), [10.0, 100.0])
        return [value * factor for value, factor in zip(values, factors, strict=True)]

    compute = tf.function(gradient) if inside else gradient
    with amanda.apply(inserting("insert_before_op", "Mul", routine, select)):
        y, slope = compute(x)
    assert y == first * second * 13
    np.testing.assert_allclose(slope, (first + second) * x)


def test_a_traceable_routine_is_traced_once_and_inlined(layer) -> None:
    calls = []
    mask = tf.constant(np.random.default_rng(0).random((3, 3)), tf.float32)

    @amanda.traceable
    def masked(weight):
        calls.append(weight)
        return weight * mask

    with amanda.apply(inserting("insert_before_op", "MatMul", masked, [1])) as scope:
        losses = [layer.loss(layer.x).numpy() for _ in range(3)]
    expected, _ = layer.by_hand(weight=lambda w: w * mask)
    np.testing.assert_allclose(losses, [expected] * 3, rtol=1e-5)
    assert len(calls) == 1
    assert [entry.reason for entry in scope.report] == ["they set calls; a graph does not"]


def test_a_routine_that_cannot_be_traced_runs_as_python_and_says_so(layer) -> None:
    routine = amanda.traceable(lambda weight: weight * weight.numpy().max())
    with amanda.apply(inserting("insert_before_op", "MatMul", routine, [1])) as scope:
        loss = layer.loss(layer.x).numpy()
    expected, _ = layer.by_hand(weight=lambda w: w * w.numpy().max())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert "runs as Python" in str(scope.report)


@tf.function
def looped(x):
    for _ in tf.range(3):
        x = tf.tanh(x) * 1.5
    return tf.reduce_sum(x)


@tf.function
def inner(x):
    return tf.tanh(x) * 1.5


@tf.function
def calling(x):
    return tf.reduce_sum(inner(x))


@inside
@pytest.mark.parametrize("differentiable", [False, True], ids=["isolated", "differentiable"])
@pytest.mark.parametrize(
    ("function", "after"),
    [
        (calling, False),
        (calling, True),
        (looped, False),
        (looped, True),
    ],
)
def test_gradients_in_called_functions_and_loops(inside, function, after, differentiable) -> None:
    x = tf.constant([0.3, 0.7])
    routine = amanda.differentiable(lambda v: v * v) if differentiable else (lambda v: v * v)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    def by_hand():
        through = (lambda v: v * v) if differentiable else straight_through(lambda v: v * v)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(3 if function is looped else 1):
                y = (through(tf.tanh(y)) if after else tf.tanh(through(y))) * 1.5
            y = tf.reduce_sum(y)
        return tape.gradient(y, x)

    compute = tf.function(gradient) if inside else gradient
    with amanda.apply(inserting("insert_after_op" if after else "insert_before_op", "Tanh", routine)):
        gradients = compute(x)
    np.testing.assert_allclose(gradients, by_hand(), rtol=1e-5)


def test_observers_run_in_the_order_of_their_ops_also_where_they_are_called_apart(monkeypatch) -> None:
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 0)
    calls: list[tuple[str, int]] = []
    tool = amanda.Tool()

    def watch(when: str, number: int):
        return amanda.observer(lambda *_: calls.append((when, number)))

    def before(context) -> None:
        if context.get_op().type == "Relu":
            context["number"] = len(numbers)
            numbers.append(len(numbers))
            context.insert_before_op(watch("before", context["number"]))

    def after(context) -> None:
        if context.get_op().type == "Relu":
            context.insert_after_op(watch("after", context["number"]))

    numbers: list[int] = []
    tool.add_inst_for_op(before)
    tool.add_inst_for_op(after, require_outputs=True)

    @tf.function
    def chain(x):
        for _ in range(20):
            x = tf.nn.relu(x)
        return x

    with amanda.apply(tool):
        for _ in range(5):
            chain(tf.ones((4, 4)))
    assert calls == [(when, number) for number in range(20) for when in ("before", "after")] * 5


def observing(observe):
    """Return a tool with `observe` after each op, called with the op's type and values."""
    tool = amanda.Tool()

    def analyse(context) -> None:
        kind = context.get_op().type
        context.insert_after_op(amanda.observer(lambda *values: observe(kind, *values)))

    tool.add_inst_for_op(analyse, require_outputs=True)
    return tool


def test_an_op_that_reads_an_observed_tensor_waits_for_the_observers(monkeypatch) -> None:
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 0)
    events: list[str] = []

    def observe(kind, *_) -> None:
        if kind == "Tanh":
            time.sleep(0.1)
            events.append("observed")

    def reach(value):
        events.append("reached")
        return value

    @tf.function
    def program(x):
        return tf.numpy_function(reach, [tf.exp(tf.tanh(x))], tf.float32)

    with amanda.apply(observing(observe)):
        for _ in range(3):
            program(tf.ones((4, 4)))
    assert events == ["observed", "reached"] * 3


@pytest.mark.parametrize("called", [False, True])
def test_no_op_waits_for_observers_of_what_may_wait_for_the_op(monkeypatch, called) -> None:
    size = 4 * 1000
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 3 * size)
    queue = tf.queue.FIFOQueue(1, [tf.float32], [[1000]])
    seen: list[str] = []

    def program(x):
        taken = tf.tanh(queue.dequeue())
        doubled = x + x
        with tf.control_dependencies([queue.enqueue(tf.exp(doubled))]):
            return taken + 0.0

    # Without the control dependencies that a tf.function would add between the two ops of the queue.
    function = tf.compat.v1.wrap_function(program, [tf.TensorSpec([1000], tf.float32)])
    if called:
        inner = function
        function = tf.function(lambda x: inner(x), input_signature=[tf.TensorSpec([1000], tf.float32)])
    results: list[Any] = []

    def run() -> None:
        with amanda.apply(observing(lambda kind, *_: seen.append(kind))):
            results.append(function(tf.ones([1000])).numpy())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        queue.close(cancel_pending_enqueues=True)
        pytest.fail("an op waits for an observer that waits for the op")
    np.testing.assert_allclose(results[0], np.tanh(np.exp(np.full(1000, 2.0))), rtol=1e-6)
    assert seen.index("QueueDequeueV2") < seen.index("Exp")


def test_an_op_that_a_dequeue_comes_before_waits_too(monkeypatch) -> None:
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 0)
    queue = tf.queue.FIFOQueue(1, [tf.float32], [[4]])
    events: list[str] = []

    def observe(kind, *_) -> None:
        if kind == "Tanh":
            time.sleep(0.1)
            events.append("observed")

    def reach(value):
        events.append("reached")
        return value

    @tf.function
    def program():
        return tf.numpy_function(reach, [tf.exp(tf.tanh(queue.dequeue()))], tf.float32)

    with amanda.apply(observing(observe)):
        queue.enqueue(tf.ones(4))
        program()
    assert events == ["observed", "reached"]


def test_no_op_waits_for_observers_of_python_that_may_wait_for_the_op(monkeypatch) -> None:
    """Python may wait for anything, also where the program says that it has no state."""
    size = 4 * 1000
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 3 * size)
    is_set = threading.Event()
    waited: list[bool] = []

    def wait(value):
        waited.append(is_set.wait(10))
        return value

    def end_wait(value):
        is_set.set()
        return value

    @tf.function
    def program(x):
        taken = tf.numpy_function(wait, [x], tf.float32, stateful=False)
        taken.set_shape([1000])
        ended = tf.numpy_function(end_wait, [tf.exp(x + x)], tf.float32, stateful=False)
        return tf.tanh(taken), ended

    with amanda.apply(observing(lambda *_: None)):
        program(tf.ones([1000]))
    assert waited == [True]
