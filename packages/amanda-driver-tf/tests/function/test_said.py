"""What cannot be instrumented in a function is in the report."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda


def reasons(scope) -> list[str]:
    return [entry.reason for entry in scope.report]


def test_a_traceable_routine_whose_value_a_backward_function_needs_runs_as_python(layer) -> None:
    tool = inserting("insert_before_op", "MatMul", amanda.traceable(lambda w: w * 2.0), [1])
    with amanda.apply(tool) as scope:
        layer.trained(True)
        assert not scope.report
        layer.trained(False)
        layer.trained(False)
    assert reasons(scope) == [
        "what it gives is kept for a backward function in another graph, so it runs as Python"
    ]


@pytest.mark.parametrize(
    ("action", "type", "routine"),
    [
        ("replace_op", "Relu", amanda.traceable(lambda x: x)),
        ("replace_backward_op", "ReluGrad", amanda.traceable(lambda gradient: gradient)),
    ],
)
def test_a_traceable_routine_that_replaces_runs_as_python(layer, action, type, routine) -> None:
    with amanda.apply(inserting(action, type, routine)) as scope:
        layer.trained(True)
    reason = f"it replaces {type}, and files alone inline replacements, so it runs as Python"
    assert reasons(scope) == [reason]


def test_a_traceable_routine_that_takes_part_in_autodiff_runs_as_python(layer) -> None:
    tool = inserting("insert_before_op", "Relu", amanda.traceable(lambda x: x * 2.0))
    with amanda.apply(tool) as scope, amanda.autodiff_enabled():
        layer.trained(True)
    assert reasons(scope) == ["it takes part in autodiff, so it runs as Python"]


def test_a_differentiable_routine_runs_as_python_without_a_word(layer) -> None:
    routine = amanda.differentiable(amanda.traceable(lambda x: x * 2.0))
    with amanda.apply(inserting("insert_before_op", "Relu", routine)) as scope:
        layer.trained(True)
    assert not scope.report


def test_a_traceable_routine_that_takes_a_run_runs_as_python(layer) -> None:
    @amanda.traceable
    def noting(x, run):
        run["x"] = x

    with amanda.apply(inserting("insert_before_op", "Relu", noting)) as scope:
        layer.loss(layer.x)
    assert reasons(scope) == ["it takes `run`, which belongs to one execution, so it runs as Python"]


@tf.custom_gradient
def squared(x):
    """x^2, whose gradient is a hundred times what comes in."""
    return x * x, lambda gradient: gradient * 100.0


def differentiated(inside: bool):
    """The gradient of exp(squared(tanh(x))) at 0.3, by a function made now."""

    def gradient(compute, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = compute(x)
        return tape.gradient(y, x)

    def compute(x):
        return tf.exp(squared(tf.tanh(x)))

    x = tf.constant(0.3)
    if not inside:
        function = tf.function(compute)
        return lambda: gradient(function, x).numpy()
    function = tf.function(lambda x: gradient(compute, x))
    return lambda: function(x).numpy()


@pytest.mark.parametrize("inside", [True, False], ids=["tape inside", "tape outside"])
def test_the_ops_of_a_custom_gradient_are_backward_ops_of_its_identity(inside) -> None:
    expected = differentiated(inside)()
    pairs: list[tuple[str, str]] = []

    def analysis(context) -> None:
        pairs.append((context.get_op().type, context.get_backward_op().type))
        if context.get_op().type == "IdentityN":
            context.insert_after_backward_op(lambda gradient: gradient * 2.0)

    forward: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(analysis, backward=True, require_outputs=True)
    tool.add_inst_for_op(lambda context: forward.append(context.get_op().type))
    with amanda.apply(tool) as scope:
        gradient = differentiated(inside)()
    np.testing.assert_allclose(gradient, 2 * expected, rtol=1e-6)
    assert ("IdentityN", "Mul") in pairs
    assert forward.count("Mul") == 1
    assert not scope.report


def test_a_custom_gradient_that_was_traced_before_the_scope_is_reported() -> None:
    gradient = differentiated(inside=True)
    expected = gradient()
    with amanda.apply(inserting("insert_after_backward_op", "TanhGrad", lambda gradient: gradient)) as scope:
        result = gradient()
    assert result == expected
    assert [entry for entry in scope.report if entry.what.startswith("the custom gradient at IdentityN")]


def test_a_routine_where_gradients_pass_unseen_is_reported() -> None:
    """The gradient of what a function returns comes from outside, past the Identity that returns it."""
    function = tf.function(lambda x: tf.exp(x))
    x = tf.constant(0.3)
    routine = amanda.differentiable(lambda value: value * value)
    with amanda.apply(inserting("insert_after_op", "Identity", routine)) as scope:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        tape.gradient(y, x)
    assert [entry.what for entry in scope.report] == ["the gradient of the routines at Identity"]


def test_a_called_function_that_runs_without_xla_is_reported() -> None:
    inner = tf.function(lambda x: tf.nn.relu(x) * 2.0, jit_compile=True)
    outer = tf.function(lambda x: inner(x) + 1.0)
    with amanda.apply(inserting("insert_before_op", "Relu", lambda x: x * 2.0)) as scope:
        assert outer(tf.constant(1.0)) == 5.0
    assert [entry.what.split()[0] for entry in scope.report] == ["jit_compile"]
