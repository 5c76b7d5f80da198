"""What the six actions do to what a session computes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1


class At(amanda.Tool):
    """Records actions at ops of one type, or at their backward ops of a type."""

    def __init__(self, type, action, routine, backward=False, after=False, **options):
        self.contexts = []
        self.add_inst_for_op(self.analyse, backward=backward, require_outputs=after)
        self.type, self.action, self.routine, self.options = type, action, routine, options

    def analyse(self, context):
        op = context.get_backward_op() if context.is_backward() else context.get_op()
        if op.type == self.type:
            self.contexts.append(context)
            getattr(context, self.action)(self.routine, **self.options)


@pytest.fixture
def session(graph):
    with tf1.Session(graph=graph) as session:
        yield session


@pytest.fixture
def x(graph):
    return tf1.placeholder(tf.float32, [3], name="x")


X = {"x:0": [1.0, 2.0, 3.0]}


@pytest.fixture(params=["runtime", "traceable"])
def marked(request):
    return amanda.traceable if request.param == "traceable" else lambda routine: routine


def test_a_value_before_an_op(graph, x, session, marked) -> None:
    y = tf.add(tf.exp(x), tf.constant([1.0, 1.0, 1.0]))
    with amanda.apply(At("AddV2", "insert_before_op", marked(lambda value: value * 2.0), inputs=[0])):
        np.testing.assert_allclose(session.run(y, X), 2 * np.exp([1, 2, 3]) + 1, rtol=1e-6)
    np.testing.assert_allclose(session.run(y, X), np.exp([1, 2, 3]) + 1, rtol=1e-6)


def test_a_value_after_an_op_reaches_readers_and_fetches(graph, x, session, marked) -> None:
    y = tf.exp(x)
    z = y + 1.0
    with amanda.apply(At("Exp", "insert_after_op", marked(lambda value: value * 2.0), after=True)):
        inside = session.run([y, z], X)
    np.testing.assert_allclose(inside[0], 2 * np.exp([1, 2, 3]), rtol=1e-6)
    np.testing.assert_allclose(inside[1], 2 * np.exp([1, 2, 3]) + 1, rtol=1e-6)


def test_only_the_selected_input_is_given(graph, x, session) -> None:
    counts = []
    y = tf.subtract(x, tf.constant(1.0))
    with amanda.apply(At("Sub", "insert_before_op", lambda *values: counts.append(len(values)), inputs="y")):
        session.run(y, X)
    assert counts == [1]


def test_an_op_is_replaced(graph, x, session) -> None:
    y = tf.sin(tf.exp(x)) + 1.0
    with amanda.apply(At("Exp", "replace_op", lambda value: value * 2.0)):
        np.testing.assert_allclose(session.run(y, X), np.sin([2, 4, 6]) + 1, rtol=1e-6)


def test_the_gradient_of_a_replaced_op_is_the_routines(graph, x, session) -> None:
    (grad,) = tf.gradients(tf.exp(x), x)
    with amanda.apply(At("Exp", "replace_op", lambda value: value * value)):
        np.testing.assert_allclose(session.run(grad, X), [2, 4, 6], rtol=1e-6)


def test_a_changed_weight_is_what_its_gradients_are_computed_on(graph, session) -> None:
    x = tf1.placeholder(tf.float32, [1, 2])
    w = tf1.get_variable("w", initializer=[[1.0, 2.0], [3.0, 4.0]], use_resource=True)
    y = tf.matmul(x, w)
    dx, dw = tf.gradients(y, [x, w])
    session.run(w.initializer)
    second_reader = tf.linalg.matmul(x, w * 0.0)  # another reader of the same weight
    tool = At("MatMul", "insert_before_op", lambda value: value * 10.0, inputs=[1])
    with amanda.apply(tool):
        inside = session.run([y, dx, dw, second_reader], {x: [[1.0, 1.0]]})
    np.testing.assert_allclose(inside[0], [[40, 60]])
    np.testing.assert_allclose(inside[1], [[30, 70]])
    np.testing.assert_allclose(inside[2], [[1, 1], [1, 1]])  # straight through
    np.testing.assert_allclose(inside[3], [[0, 0]])


def test_an_after_routine_leaves_the_ops_own_gradient(graph, x, session) -> None:
    y = tf.exp(x)
    (grad,) = tf.gradients(y, x)
    with amanda.apply(At("Exp", "insert_after_op", lambda value: value * 0.0, after=True)):
        inside = session.run([y, grad], X)
    np.testing.assert_allclose(inside[0], [0, 0, 0])
    np.testing.assert_allclose(inside[1], np.exp([1, 2, 3]), rtol=1e-6)


def test_one_edge_of_a_square_is_changed(graph, x, session) -> None:
    y = x * x
    (grad,) = tf.gradients(y, x)
    with amanda.apply(At("Mul", "insert_before_op", lambda value: value * 10.0, inputs=[0])):
        inside = session.run([y, grad], X)
    np.testing.assert_allclose(inside[0], [10, 40, 90])
    np.testing.assert_allclose(inside[1], [11, 22, 33])  # x + 10 x


def test_a_differentiable_routine_takes_part(graph, x, session) -> None:
    (grad,) = tf.gradients(tf.exp(x), x)
    routine = amanda.differentiable(lambda value: value * 2.0)
    with amanda.apply(At("Exp", "insert_before_op", routine)):
        np.testing.assert_allclose(session.run(grad, X), 2 * np.exp([2, 4, 6]), rtol=1e-6)


def test_gradients_before_and_after_a_backward_op(graph, x, session) -> None:
    y = tf.sin(tf.exp(x))
    (grad,) = tf.gradients(y, x)
    vanilla = session.run(grad, X)
    for action, after in (("insert_before_backward_op", False), ("insert_after_backward_op", True)):
        tool = At("Cos", action, lambda *values: None, backward=True, after=after)
        with amanda.apply(tool):
            np.testing.assert_equal(session.run(grad, X), vanilla)
        tool = At("Mul", action, lambda *grads: [2.0 * value for value in grads], backward=True, after=after)
        with amanda.apply(tool):
            inside = session.run(grad, X)
        assert len(tool.contexts) == 2
        assert {context.get_op().type for context in tool.contexts} == {"Sin", "Exp"}
        np.testing.assert_allclose(inside, 4 * vanilla, rtol=1e-6)


def test_a_backward_op_is_replaced(graph, x, session) -> None:
    (grad,) = tf.gradients(tf.nn.relu(x - 2.0), x)
    tool = At("ReluGrad", "replace_backward_op", lambda grad: grad * 7.0, backward=True)
    with amanda.apply(tool):
        np.testing.assert_allclose(session.run(grad, X), [7, 7, 7])
    np.testing.assert_allclose(session.run(grad, X), [0, 0, 1])


def test_what_an_execution_hands_on(graph, x, session) -> None:
    class Handing(amanda.Tool):
        def __init__(self):
            self.values = []
            self.add_inst_for_op(self.forward)
            self.add_inst_for_op(self.backward, backward=True)

        def forward(self, context):
            if context.get_op_type() == "Sin":
                context["mark"] = "sine"
                context.insert_before_op(self.keep)

        def backward(self, context):
            if context.get("mark") == "sine" and context.get_backward_op().type == "Mul":
                context.insert_before_backward_op(self.take)

        def keep(self, value, run):
            run["value"] = value

        def take(self, *grads, run):
            self.values.append(run["value"].numpy().tolist())

    tool = Handing()
    y = tf.sin(x)
    (grad,) = tf.gradients(y, x)
    with amanda.apply(tool):
        session.run([y, grad], X)
        session.run([y, grad], {"x:0": [4.0, 5.0, 6.0]})
    assert tool.values == [[1, 2, 3], [4, 5, 6]]


def test_observers_see_what_runs(graph, x, session) -> None:
    values = []

    @amanda.observer
    def see(value, name):
        values.append((name, value.numpy().tolist()))

    class Observing(amanda.Tool):
        def __init__(self):
            self.add_inst_for_op(self.analyse, require_outputs=True)

        def analyse(self, context):
            if context.get_op_type() in ("Neg", "Abs"):
                context.insert_after_op(see, name=context.get_op_type())

    y, z = -x, tf.abs(x - 2.0)
    with amanda.apply(Observing()):
        session.run(y, X)
        assert values == [("Neg", [-1, -2, -3])]
        session.run([y.op, z.op], X)
    assert sorted(values[1:]) == [("Abs", [1, 0, 1]), ("Neg", [-1, -2, -3])]


def test_values_of_weights_and_constants_at_analysis(graph, session) -> None:
    values = {}

    class Reading(amanda.Tool):
        def __init__(self):
            self.add_inst_for_op(self.analyse)

        def analyse(self, context):
            if context.get_op_type() == "MatMul":
                values[context.get_op().name] = np.array(context.get_value(1))

    x = tf1.placeholder(tf.float32, [1, 2])
    for resource in (True, False):
        w = tf1.get_variable(f"w{resource}", initializer=[[1.0], [2.0]], use_resource=resource)
        tf.matmul(x, w, name=f"by_{resource}")
    tf.matmul(x, [[5.0], [6.0]], name="by_constant")
    session.run(tf1.global_variables_initializer())
    session.run(w.assign([[7.0], [8.0]]))
    with amanda.apply(Reading()):
        session.run([f"by_{name}:0" for name in ("True", "False", "constant")], {x: [[1, 1]]})
    np.testing.assert_equal(
        values, {"by_True": [[1], [2]], "by_False": [[7], [8]], "by_constant": [[5], [6]]}
    )


def test_facts_of_an_op(graph, session) -> None:
    x = tf1.placeholder(tf.float32, [1, 4, 4, 1])
    with tf1.name_scope("block"):
        y = tf.nn.conv2d(x, tf.ones([3, 3, 1, 2]), strides=[1, 1, 1, 1], padding="SAME", name="conv")
    tool = At("Conv2D", "insert_before_op", lambda *values: None)
    facts = {}

    class Facts(amanda.Tool):
        def __init__(self):
            self.add_inst_for_op(self.analyse, require_outputs=True)

        def analyse(self, context):
            if context.get_op_type() == "Conv2D":
                facts.update(
                    scope=context.get_scope(), source=context.get_source(), attrs=context.get_attrs(),
                    op=context.get_op(), inputs=context.get_inputs(), outputs=context.get_outputs(),
                    namespace=str(context.namespace),
                )  # fmt: skip

    with amanda.apply(Facts(), tool):
        session.run(y, {x: np.ones([1, 4, 4, 1])})
    assert facts["scope"] == "block"
    assert facts["source"].rpartition(":")[0] == __file__
    assert facts["attrs"]["padding"] == "SAME"
    assert facts["attrs"]["strides"] == [1, 1, 1, 1]
    assert (facts["op"].type, facts["op"].name, facts["op"].__name__) == ("Conv2D", "block/conv", "Conv2D")
    assert facts["op"].graph_op is y.op
    assert [value.name for value in facts["inputs"]] == [value.name for value in y.op.inputs]
    assert facts["outputs"][0].shape == (1, 4, 4, 2)
    assert facts["namespace"] == f"tensorflow/{tf.__version__}/graph"


def test_a_routine_keeps_shape_and_kind(graph, x, session) -> None:
    y = tf.exp(x)
    for routine, error in (
        (lambda value: value[:2], r"shape \(2,\) where shape \(3,\)"),
        (lambda value: tf.complex(value, value), "complex64 where float32"),
        (lambda value: (value, value), "returned 2 values"),
    ):
        with (
            amanda.apply(At("Exp", "insert_before_op", routine)),
            pytest.raises(amanda.AmandaError, match=error),
        ):
            session.run(y, X)
    with amanda.apply(At("Exp", "insert_before_op", lambda value: tf.cast(value, tf.float64) + 1)):
        np.testing.assert_allclose(session.run(y, X), np.exp([2, 3, 4]), rtol=1e-6)


def test_pruning_trains_as_by_hand(graph) -> None:
    x = np.random.RandomState(0).randn(8, 6).astype(np.float32)

    def build(mask):
        with tf.Graph().as_default() as graph:
            tf1.set_random_seed(1)
            x_in = tf1.placeholder(tf.float32, [None, 6])
            w = tf1.get_variable("w", [6, 4], initializer=tf1.ones_initializer(), use_resource=True)
            weight = w if mask is None else tf.stop_gradient(w * mask - w) + w
            loss = tf.reduce_mean(tf.square(tf.matmul(x_in, weight) - 1.0))
            (grad,) = tf.gradients(loss, w)
            if mask is not None:
                grad = grad * mask
            return graph, x_in, loss, w, tf1.train.GradientDescentOptimizer(0.1).apply_gradients([(grad, w)])

    mask = np.float32(np.arange(24).reshape(6, 4) % 2)

    class Pruning(amanda.Tool):
        def __init__(self):
            self.add_inst_for_op(self.forward)
            self.add_inst_for_op(self.backward, backward=True)

        def forward(self, context):
            if context.get_op_type() == "MatMul":
                context["mask"] = mask
                context.insert_before_op(lambda weight: weight * mask, inputs=[1])

        def backward(self, context):
            if "mask" in context and context.get_backward_op().name.endswith("MatMul_1"):
                context.insert_after_backward_op(lambda grad: grad * mask)

    def train(mask, *tools):
        graph, x_in, loss, w, step = build(mask)
        with tf1.Session(graph=graph) as session:
            session.run(w.initializer)
            with amanda.apply(*tools):
                return [session.run([loss, step], {x_in: x})[0] for _ in range(5)]

    np.testing.assert_allclose(train(None, Pruning()), train(mask), rtol=1e-6)
