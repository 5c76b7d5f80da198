"""Backward ops of tapes: mapped to the op whose gradient they compute, and changed."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import tensorflow as tf

import amanda


def test_gradient_ops_of_a_convolution_are_mapped(ops: Any) -> None:
    x, w = tf.ones([1, 4, 4, 1]), tf.Variable(tf.ones([2, 2, 1, 1]))
    with amanda.apply(ops), tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME")))
        tape.gradient(y, [x, w])
    assert ("Conv2D", "Conv2DBackpropInput") in ops.backward
    assert ("Conv2D", "Conv2DBackpropFilter") in ops.backward
    assert ("Relu", "ReluGrad") in ops.backward
    assert "Conv2DBackpropInput" not in ops.forward


def test_backward_ops_are_never_taken_for_forward_ops(ops: Any) -> None:
    x = tf.Variable([1.0, -2.0])

    def step() -> None:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.nn.relu(x) * x)
        tape.gradient(y, x)

    with amanda.apply(ops):
        for _ in range(3):
            step()
    third = len(ops.forward) // 3
    assert ops.forward == ops.forward[:third] * 3
    assert "ReluGrad" not in ops.forward
    assert ops.backward.count(("Relu", "ReluGrad")) == 3


@pytest.mark.parametrize("produced", [True, False])
def test_gradients_that_are_added_up_belong_to_the_op_that_made_the_tensor(ops: Any, produced: bool) -> None:
    x = tf.constant([1.0, -2.0])
    with amanda.apply(ops), tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.relu(x) if produced else x
        total = tf.reduce_sum(tf.exp(y) + tf.sin(y) + tf.square(y))
        tape.gradient(total, x)
    sums = [forward for forward, backward in ops.backward if backward == "AddN"]
    assert len(sums) == 1
    assert not produced or sums == ["Relu"]


@pytest.mark.parametrize(
    ("around", "owner"),
    [
        (lambda x: x + tf.exp(x), "Mul"),
        (lambda x: tf.exp(x) + x, "Mul"),
        (lambda x: x + x, "Mul"),
        (lambda x: tf.identity(x) + tf.exp(x), "Mul"),
        (lambda x: tf.sin(x) + (x + tf.exp(x)), "Mul"),
        (lambda x: (y := x + 1.0) + tf.exp(y), "AddV2"),
    ],
)
def test_a_sum_of_gradients_stays_with_its_op_where_ops_pass_gradients_as_they_are(
    ops: Any, around: Any, owner: str
) -> None:
    x, w = tf.constant([1.0, 2.0]), tf.Variable([3.0, 4.0])
    for steps in range(1, 4):
        with amanda.apply(ops):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(around(x * w))
            tape.gradient(total, w)
        sums = [forward for forward, backward in ops.backward if backward == "AddN"]
        assert sums == [owner] * steps


def test_a_custom_gradient_belongs_to_the_op_that_gave_its_result(ops: Any) -> None:
    @tf.custom_gradient
    def clipped(x: Any) -> Any:
        return tf.nn.relu(x), lambda grad: tf.clip_by_value(grad, -0.5, 0.5)

    x = tf.constant([1.0, 2.0])
    for _ in range(2):
        with amanda.apply(ops), tf.GradientTape() as tape:
            tape.watch(x)
            gradient = tape.gradient(tf.reduce_sum(clipped(x) * 3.0), x)
    assert gradient.numpy().tolist() == [0.5, 0.5]
    assert ("Identity", "Minimum") in ops.backward
    assert "Minimum" not in ops.forward


def test_a_persistent_tape_is_walked_twice(ops: Any) -> None:
    x = tf.constant([1.0, 2.0])
    with amanda.apply(ops), tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tf.nn.relu(x)
    with amanda.apply(ops):
        first, second = tape.gradient(y, x), tape.gradient(y, x)
    assert first.numpy().tolist() == second.numpy().tolist()
    assert ops.backward.count(("Relu", "ReluGrad")) == 2


def test_without_the_cache_each_walk_of_a_tape_is_analysed() -> None:
    x, inputs = tf.constant([1.0, 2.0]), []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: inputs.append(context.get_inputs()[0].numpy().tolist()), backward=True
    )
    with amanda.apply(tool) as scope, amanda.cache_disabled():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.nn.relu(x)
        tape.gradient(y, x)
        once = len(inputs)
        tape.gradient(y, x)
    assert inputs == [[1.0, 2.0]] * 2 * once
    assert scope.report == []


def test_backward_ops_of_backward_ops_belong_to_the_same_op(acting: Any, ops: Any) -> None:
    x = tf.constant([2.0])

    def second_order() -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = x**3.0
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    plain = second_order().numpy().tolist()
    with amanda.apply(ops):
        assert [second_order().numpy().tolist() for _ in range(3)] == [plain] * 3
    assert {forward for forward, _ in ops.backward} >= {"Pow"}
    assert plain == [12.0]


def test_nested_tapes_on_one_op_see_one_another() -> None:
    x = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    def gradients() -> list[bytes]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(tf.tanh(tf.matmul(x, x)))
            first = inner.gradient(y, x)
            penalty = tf.reduce_sum(first * first)
        return [first.numpy().tobytes(), outer.gradient(penalty, x).numpy().tobytes()]

    plain = gradients()
    looking = amanda.Tool()
    looking.add_inst_for_op(lambda context: context.insert_before_op(lambda *_: None))
    looking.add_inst_for_op(lambda context: context.insert_before_backward_op(lambda *_: None), backward=True)
    with amanda.apply(looking):
        assert [gradients() for _ in range(3)] == [plain] * 3


def test_forward_accumulators_give_what_they_gave(ops: Any) -> None:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    def jvp() -> list[bytes]:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator, tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(tf.matmul(x, x)))
        tangent = accumulator.jvp(y)
        return [tangent.numpy().tobytes(), tape.gradient(y, x).numpy().tobytes()]

    plain = jvp()
    with amanda.apply(ops):
        assert [jvp() for _ in range(3)] == [plain] * 3
    assert jvp() == plain


def test_a_jacobian_is_what_it_was(ops: Any) -> None:
    x = tf.constant([1.0, 2.0])

    def jacobian() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.tanh(x) * x
        return tape.jacobian(y, x, experimental_use_pfor=False).numpy().tolist()

    plain = jacobian()
    with amanda.apply(ops):
        assert jacobian() == plain


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("insert_before_backward_op", [0.0, 3.0]),
        ("insert_after_backward_op", [0.0, 3.0]),
        ("replace_backward_op", [3.0, 3.0]),
    ],
)
def test_gradients_are_changed_at_every_pass(acting: Any, action: str, expected: list[float]) -> None:
    x = tf.Variable([-1.0, 2.0])
    with amanda.apply(acting(action, "ReluGrad", lambda grad: grad * 3)):
        for _ in range(3):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(tf.nn.relu(x))
            assert tape.gradient(y, x).numpy().tolist() == expected


def test_a_weights_gradient_is_pruned() -> None:
    w = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    mask = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    prune = amanda.Tool()

    def forward(context: Any) -> None:
        if context.get_op().type == "MatMul":
            context.insert_before_op(lambda weight: weight * mask, inputs=["b"])

    def backward(context: Any) -> None:
        if context.get_op().type == "MatMul":
            context.insert_after_backward_op(lambda grad: grad * mask)

    prune.add_inst_for_op(forward)
    prune.add_inst_for_op(backward, backward=True)
    x = tf.constant([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.matmul(x, w * mask) ** 2)
    expected = tape.gradient(y, w).numpy().tolist()
    with amanda.apply(prune), tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.matmul(x, w) ** 2)
        assert tape.gradient(y, w).numpy().tolist() == expected


def test_the_backward_ops_of_a_replacement_belong_to_the_op(acting: Any, ops: Any) -> None:
    x = tf.Variable([1.0, 2.0])
    replace = acting("replace_op", "Relu", lambda value: tf.sin(value) * 2.0)
    for _ in range(2):
        with amanda.apply(replace, ops), tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.nn.relu(x))
            gradient = tape.gradient(y, x)
    assert gradient.numpy() == pytest.approx((2 * tf.cos([1.0, 2.0])).numpy())
    assert ("Relu", "Cos") in ops.backward


def test_an_op_given_one_tensor_twice_is_changed_on_one_edge(acting: Any) -> None:
    x = tf.Variable([2.0])
    with (
        amanda.apply(acting("insert_before_op", "Mul", lambda value: value * 5, inputs=[0])),
        tf.GradientTape() as tape,
    ):
        y = tf.convert_to_tensor(x)
        product = y * y
        gradient = tape.gradient(product, x)
    assert product.numpy().tolist() == [20.0]
    assert gradient.numpy().tolist() == [12.0]


def test_gradients_of_embeddings_keep_their_kind(ops: Any) -> None:
    table = tf.Variable(tf.ones([4, 2]))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.gather(table, [0, 2])) + tf.reduce_sum(tf.gather(table, [1, 2]))
        return tape.gradient(y, table)

    plain = gradient()
    with amanda.apply(ops):
        gradient_in_scope = gradient()
    assert type(gradient_in_scope) is type(plain)
    assert (
        tf.convert_to_tensor(gradient_in_scope).numpy().tolist()
        == tf.convert_to_tensor(plain).numpy().tolist()
    )


def test_traces_die_with_the_tape() -> None:
    class Value:
        pass

    references: list[weakref.ref[Value]] = []

    def routine(value: Any, run: dict[str, Any]) -> None:
        run["value"] = saved = Value()
        references.append(weakref.ref(saved))

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(routine, [0]))
    tool.add_inst_for_op(lambda context: context.insert_before_backward_op(lambda *_: None), backward=True)
    x = tf.Variable([1.0])
    with amanda.apply(tool):
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x)
        assert any(reference() is not None for reference in references)
        del tape, y
        gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


def test_ops_that_a_tape_recorded_before_the_scope_are_reported(ops: Any) -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.tanh(x) * x
    with amanda.apply(ops) as scope:
        tape.gradient(y, x)
    assert ("the backward ops of Tanh", "it was recorded on a tape before the scope") in [
        (entry.what, entry.reason) for entry in scope.report
    ]


@tf.custom_gradient
def doubled(x):
    """x, with twice its gradient."""
    return tf.identity(x), lambda gradient: gradient * 2.0


CALLED = tf.function(lambda x: tf.tanh(x))


@pytest.mark.parametrize(
    ("compute", "type"),
    [
        (tf.identity, "Identity"),
        (lambda x: x + x, "AddV2"),
        (doubled, "a custom gradient"),
        (CALLED, "<lambda>"),
    ],
    ids=["Identity", "AddV2", "custom gradient", "function"],
)
@pytest.mark.parametrize("before", [True, False])
def test_what_keeps_nothing_on_a_tape_is_reported_too(
    ops: Any, compute: Any, type: str, before: bool
) -> None:
    x = tf.Variable([1.0, 2.0])
    with amanda.apply(ops) if not before else nullcontext(), tf.GradientTape() as tape:
        y = compute(tf.convert_to_tensor(x))
    with amanda.apply(ops) as scope:
        tape.gradient(y, x)
    reported_types = {entry.what.removeprefix("the backward ops of ") for entry in scope.report}
    assert (type in reported_types) == before


@pytest.mark.parametrize("type", ["Tanh", "Exp"])
def test_ops_whose_backward_ops_no_tool_asks_for_are_not_reported(acting: Any, type: str) -> None:
    x = tf.Variable([1.0, 2.0])
    with amanda.apply(acting("insert_before_backward_op", type, lambda *gradients: None)) as scope:
        for _ in range(4):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(tf.exp(tf.tanh(x)) * x)
            tape.gradient(y, x)
    assert not scope.report


def test_a_python_function_on_a_tape_is_reported(ops: Any) -> None:
    x = tf.constant(2.0)
    with amanda.apply(ops) as scope, tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.py_function(tf.square, [x], tf.float32)
    assert not scope.report
    with amanda.apply(ops) as scope:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.py_function(tf.square, [x], tf.float32)
        assert tape.gradient(y, x) == 4.0
    assert [entry.what for entry in scope.report] == ["the backward ops of EagerPyFunc"]


class Converted:
    """A value that TensorFlow's fast path refuses: Python converts it, calls the op and records it."""

    def __init__(self, value: tf.Variable) -> None:
        self.value = value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value)


@pytest.mark.parametrize("convert", [lambda value: value, Converted], ids=["fast path", "slow path"])
def test_what_replaces_an_op_is_differentiated_alone(acting: Any, convert: Any) -> None:
    weight, x = tf.Variable([[2.0, 0.0], [0.0, 3.0]]), tf.constant([[1.0, 2.0]])
    operand = convert(weight)
    with amanda.apply(acting("replace_op", "MatMul", lambda a, b: tf.nn.relu(a) * 5.0)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.raw_ops.MatMul(a=x, b=operand)
        gradients = tape.gradient(y, [x, weight])
    assert gradients[0].numpy().tolist() == [[5.0, 5.0]]
    assert gradients[1] is None


@pytest.mark.parametrize("point", ["insert_before_op", "insert_after_op"])
@pytest.mark.parametrize("convert", [lambda value: value, Converted], ids=["fast path", "slow path"])
def test_ops_of_a_routine_leave_the_record_of_its_op_alone(acting: Any, convert: Any, point: str) -> None:
    weight, x = tf.Variable([[2.0, 0.0], [0.0, 3.0]]), tf.constant([[1.0, 2.0]])
    operand, routine_operand = convert(weight), Converted(tf.Variable([[1.0, 0.0], [0.0, 1.0]]))

    def routine(*values: Any) -> Any:
        return tf.raw_ops.MatMul(a=values[0], b=routine_operand)

    select = {"inputs": [0]} if point == "insert_before_op" else {"outputs": [0]}
    with amanda.apply(acting(point, "MatMul", routine, **select)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.raw_ops.MatMul(a=x, b=operand)
        gradients = tape.gradient(y, [x, weight])
    assert gradients[0].numpy().tolist() == [[2.0, 3.0]]
    assert gradients[1].numpy().tolist() == [[1.0, 1.0], [2.0, 2.0]]
