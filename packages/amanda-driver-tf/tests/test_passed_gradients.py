"""Routines that take part in autodiff at ops whose gradient is the incoming one: as in eager mode."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1
X, B = np.array([[0.3, -0.5, 0.7]], "f4"), np.array([0.1, 0.2, 0.3], "f4")


def passed(x):
    return tf.identity(x, name="pass")


def read_twice(x, b):
    y = passed(tf.exp(x))
    return tf.sin(y) * tf.exp(y)


def read_beside(x, b):
    y = tf.exp(x)
    return tf.sin(passed(y)) * tf.cos(y)


PROGRAMS = {
    "an Identity": ("Identity", lambda x, b: tf.sin(passed(tf.exp(x)))),
    "an Identity of what is differentiated by": ("Identity", lambda x, b: tf.sin(passed(x))),
    "an Identity of another": ("Identity", lambda x, b: tf.sin(passed(passed(tf.exp(x))))),
    "an Identity that is read twice": ("Identity", read_twice),
    "an Identity beside another reader": ("Identity", read_beside),
    "a bias": ("BiasAdd", lambda x, b: tf.sin(tf.nn.bias_add(tf.exp(x), b))),
    "a sum": ("AddV2", lambda x, b: tf.sin(tf.exp(x) + tf.tanh(x))),
    "a sum that broadcasts": ("AddV2", lambda x, b: tf.sin(tf.exp(x) + tf.tanh(b))),
}
ACTIONS = {
    "insert_before_op": amanda.differentiable(lambda value, *rest: [value * value, *rest]),
    "insert_after_op": amanda.differentiable(lambda value: value * value),
    "replace_op": lambda value, *rest: value * value + (rest[0] if rest else 0.0),
}


def tool(type, action):
    def analysis(context) -> None:
        op = context.get_op()
        symbol = getattr(op, "graph_op", None)
        if op.type == type and (type != "Identity" or symbol is None or op.name.startswith("pass")):
            getattr(context, action)(ACTIONS[action])

    created_tool = amanda.Tool()
    created_tool.add_inst_for_op(analysis, require_outputs=action == "insert_after_op")
    return created_tool


def gradients(program, x, b):
    with tf.GradientTape() as tape:
        tape.watch([x, b])
        y = program(x, b)
    return tape.gradient(y, [x, b], unconnected_gradients="zero")


def by_tape_inside(program, applied):
    function = tf.function(lambda x, b: gradients(program, x, b))
    with amanda.apply(applied) as scope:
        return function(X, B), scope


def by_tape_outside(program, applied):
    function = tf.function(program)
    with amanda.apply(applied) as scope:
        return gradients(function, tf.constant(X), tf.constant(B)), scope


def by_session(program, applied):
    with tf.Graph().as_default(), tf1.Session() as session:
        x, b = tf1.placeholder("float32", X.shape), tf1.placeholder("float32", B.shape)
        fetches = tf.gradients(program(x, b), [x, b], unconnected_gradients="zero")
        with amanda.apply(applied) as scope:
            return session.run(fetches, {x: X, b: B}), scope


@pytest.mark.parametrize("run", [by_tape_inside, by_tape_outside, by_session])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_its_gradient_is_pulled_back_through_the_routine(run, action, program) -> None:
    type, compute = PROGRAMS[program]
    with amanda.apply(tool(type, action)):
        expected_gradients = [
            gradient.numpy() for gradient in gradients(compute, tf.constant(X), tf.constant(B))
        ]
    gradients_found, scope = run(compute, tool(type, action))
    for gradient, expected in zip(gradients_found, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4)
    assert not scope.report


@pytest.mark.parametrize("before", [True, False])
def test_it_is_said_where_names_tell_whose_the_gradients_are(before) -> None:
    compute = tf.function(lambda x, b: gradients(read_twice, x, b))
    if before:
        compute(X, B)
    with amanda.apply(tool("Identity", "insert_after_op")) as scope:
        compute(X, B)
    subjects = [
        entry.what for entry in scope.report if entry.what.startswith("the gradient of the routines at pass")
    ]
    assert bool(subjects) == before
