"""Gradients through routines that take part in autodiff and hand on what they were given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1
X, Y = np.float32([1.0, 2.0]), np.float32([4.0, -3.0])

ROUTINES: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "nothing": (lambda a, b: None, lambda x, y: x / y),
    "all": (lambda a, b: (a, b), lambda x, y: x / y),
    "in another order": (lambda a, b: (b, a), lambda x, y: y / x),
    "one twice": (lambda a, b: (b, b), lambda x, y: y / y + 0.0 * x),
    "one of them and another": (lambda a, b: (a, 2.0 * b), lambda x, y: x / (2.0 * y)),
}


class Handing(amanda.Tool):
    """A routine before each division, and one after it that does nothing."""

    def __init__(self, routine: Callable[..., Any]) -> None:
        self.before = amanda.differentiable(lambda *values: routine(*values))
        self.after = amanda.differentiable(lambda value: None)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context) -> None:
        if context.get_op().type == "RealDiv":
            context.insert_before_op(self.before)
            context.insert_after_op(self.after)


def in_a_session(function: Callable[[Any, Any], Any], tool: amanda.Tool | None) -> Any:
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = (tf1.placeholder(tf.float32, [2]) for _ in range(2))
        z = function(x, y)
        fetched = [z, *tf1.gradients(z, [x, y])]
        with amanda.apply(*filter(None, [tool])):
            return session.run(fetched, {x: X, y: Y})


def in_a_function(function: Callable[[Any, Any], Any], tool: amanda.Tool | None) -> Any:
    inner = tf.function(function)

    def step() -> Any:
        x, y = tf.constant(X), tf.constant(Y)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            z = inner(x, y)
        return [z, *tape.gradient(z, [x, y])]

    with amanda.apply(*filter(None, [tool])):
        return step()


@pytest.mark.parametrize("run", [in_a_session, in_a_function])
@pytest.mark.parametrize("kind", ROUTINES)
def test_gradients_are_those_of_the_function_that_the_routine_makes_of_the_op(run: Any, kind: str) -> None:
    routine, function = ROUTINES[kind]
    results = run(lambda x, y: x / y, Handing(routine))
    for result, expected in zip(results, run(function, None), strict=True):
        np.testing.assert_array_equal(result, expected)


class Doubling(amanda.Tool):
    """What multiplications read is doubled, in a way that gradients take."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context) -> None:
        if context.get_op().type == "Mul":
            context.insert_before_op(self.double)

    @amanda.differentiable
    def double(self, *values) -> Any:
        return [2.0 * value for value in values]


@pytest.mark.parametrize("run", [in_a_session, in_a_function])
def test_gradients_of_what_several_ops_read_pass_the_routines_of_each(run: Any) -> None:
    results = run(lambda x, y: (x * y) * y, Doubling())
    for result, expected in zip(results, (16.0 * X * Y * Y, 16.0 * Y * Y, 32.0 * X * Y), strict=True):
        np.testing.assert_array_equal(result, expected)


class Held(amanda.Tool):
    """Which of the values that routines were given still live as gradients of the first operation arrive."""

    def __init__(self) -> None:
        self.references: dict[str, Any] = {}
        self.alive: list[str] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context) -> None:
        if context.get_op().type == "Mul":
            context.insert_before_op(self.double, name=context.get_op().name)

    def analyse_backward(self, context) -> None:
        if context.get_op().name == "first":
            context.insert_after_backward_op(self.look)

    @amanda.differentiable
    def double(self, *values, name) -> Any:
        self.references[name] = [weakref.ref(value) for value in values]
        return [2.0 * value for value in values]

    def look(self, *gradients) -> None:
        self.alive += [
            name
            for name, refs in self.references.items()
            if any(reference() is not None for reference in refs)
        ]


def test_values_are_let_go_as_soon_as_gradients_have_passed_them() -> None:
    tool = Held()
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = (tf1.placeholder(tf.float32, [2]) for _ in range(2))
        z = tf.multiply(tf.multiply(x, y, name="first"), 3.0, name="second")
        fetched = [z, *tf1.gradients(z, [x, y])]
        with amanda.apply(tool):
            results = session.run(fetched, {x: X, y: Y})
    for result, expected in zip(results, (48.0 * X * Y, 48.0 * Y, 48.0 * X), strict=True):
        np.testing.assert_array_equal(result, expected)
    assert set(tool.references) == {"first", "second"}
    assert set(tool.alive) == {"first"}
