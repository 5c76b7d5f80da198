"""Backward routines run after those of their forward op, also where no value leads from one to the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1


class Handing(amanda.Tool):
    """Forward routines take their time; backward ones ask for what these hand on."""

    def __init__(self, change: bool) -> None:
        self.change = change
        self.took: list[str] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context) -> None:
        routine = self.keep if self.change else amanda.observer(self.keep)
        context.insert_before_op(routine, key="before")
        context.insert_after_op(routine, key="after")

    def analyse_backward(self, context) -> None:
        context.insert_before_backward_op(self.take, type=context.get_op().type)
        context.insert_after_backward_op(self.take, type=context.get_op().type)

    def keep(self, *values, key, run) -> Any:
        time.sleep(0.005)
        run[key] = True
        return values if self.change else None

    def take(self, *gradients, type, run) -> Any:
        if type not in ("Merge", "Switch"):  # of loops they and their gradients go round differently often
            assert run == {"before": True, "after": True}, type
        self.took.append(type)
        return gradients


called = tf.function(lambda x: x * 2.0 + 1.0)


def rounds(x: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 1.5 + 1.0), (0, x))[1]


def round_or_not(i: Any, x: Any) -> tuple[Any, Any]:
    return i + 1, tf.cond(i % 2 > 0, lambda: rounds(x) * 1.5, lambda: x * 2.0 + 1.0)


def descent(i: Any, x: Any) -> tuple[Any, Any]:
    """TensorFlow's optimizer drops what it thinks that another wait of the gradients' call stands for."""
    y = called(x) * 1.5
    return i + 1, y - tf.stop_gradient(tf1.gradients(y, x)[0])


LINEAR: dict[str, Callable[[Any], Any]] = {
    "ops": lambda x: x * 1.5 + 1.0,
    "call": lambda x: called(x) * 1.5,
    "branch": lambda x: tf.cond(x[0] > 0, lambda: called(x) * 1.5, lambda: x * 3.0),
    "loop": rounds,
}


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("kind", LINEAR)
def test_of_functions(kind: str, change: bool) -> None:
    x = tf.Variable([1.0, 2.0])
    inner = tf.function(LINEAR[kind])

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            y = inner(x) if change else LINEAR[kind](x)
        return y, tape.gradient(y, x)

    vanilla, tool = step(), Handing(change)
    with amanda.apply(tool):
        results = step()
    np.testing.assert_array_equal(results[0], vanilla[0])
    np.testing.assert_array_equal(results[1], vanilla[1])
    assert "Mul" in tool.took


@pytest.fixture(params=[1, 2])
def version(request: Any) -> Iterator[int]:
    """Of control flow."""
    before = tf1.control_flow_v2_enabled()
    (tf1.disable_control_flow_v2 if request.param == 1 else tf1.enable_control_flow_v2)()
    yield request.param
    (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()


OF_SESSIONS = LINEAR | {
    "gradients of a call": lambda x: descent(0, x)[1],
    "rounds or not": lambda x: tf.while_loop(lambda i, _: i < 3, round_or_not, (0, x))[1],
    "behind a branch": lambda x: tf.cond(x[0] > 0, lambda: x * 2.0, lambda: x) * 1.5 + 1.0,
    "rounds of calls": lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, called(x)), (0, x))[
        1
    ],
    "gradients of rounds": lambda x: tf.while_loop(lambda i, _: i < 2, descent, (0, x))[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("kind", OF_SESSIONS)
def test_of_sessions(kind: str, change: bool, version: int) -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [2])
        y = OF_SESSIONS[kind](x)
        fetched, feed = [y, *tf1.gradients(y, x)], {x: [1.0, 2.0]}
        vanilla, tool = session.run(fetched, feed), Handing(change)
        with amanda.apply(tool):
            results = session.run(fetched, feed)
    np.testing.assert_array_equal(results[0], vanilla[0])
    np.testing.assert_array_equal(results[1], vanilla[1])
    assert "Mul" in tool.took
