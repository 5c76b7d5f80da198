"""A routine may differentiate what it computes, in every mode, and leaves the tapes around it alone."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from acting import inserting

import amanda


def slope_of_square(value: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(value)
        square = value * value
    return tape.gradient(square, value)


def in_a_session() -> float:
    with tf.Graph().as_default() as graph:
        result = tf.nn.relu(tf.constant(3.0))
    with tf.compat.v1.Session(graph=graph) as session:
        return float(session.run(result))


def in_a_function() -> float:
    return float(tf.function(tf.nn.relu, autograph=False)(tf.constant(3.0)))


def eagerly() -> float:
    return float(tf.nn.relu(tf.constant(3.0)))


def under_a_tape() -> float:
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = tf.nn.relu(x)
    assert float(tape.gradient(result, x)) == 1.0  # straight through
    return float(result)


@pytest.mark.parametrize("program", [in_a_session, in_a_function, eagerly, under_a_tape])
@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.observer], ids=["plain", "observer"])
def test_a_routine_differentiates_what_it_computes(program: Any, mark: Any) -> None:
    slopes: list[float] = []

    def routine(value: Any) -> Any:
        slopes.append(float(slope_of_square(value)))
        return None if mark is amanda.observer else slope_of_square(value)

    with amanda.apply(inserting("insert_after_op", "Relu", mark(routine))):
        result = program()
    assert slopes == [6.0]
    assert result == (3.0 if mark is amanda.observer else 6.0)


def test_recording_that_the_user_stopped_stays_stopped() -> None:
    x = tf.constant(3.0)
    with amanda.apply(inserting("insert_after_op", "Relu", slope_of_square)), tf.GradientTape() as tape:
        tape.watch(x)
        with tape.stop_recording():
            result = tf.nn.relu(x)
        doubled = x * 2
    assert tape.gradient(result, x) is None
    with tf.GradientTape() as tape:
        tape.watch(x)
        doubled = x * 2
    assert float(tape.gradient(doubled, x)) == 2.0
