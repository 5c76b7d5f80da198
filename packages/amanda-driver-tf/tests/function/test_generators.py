"""What is said of random operations, whose state lies in the kernels of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from acting import inserting

import amanda


def drawn(seed: int) -> Any:
    return tf.sin(tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32, seed=seed, seed2=seed))


@tf.function(autograph=False)
def inner() -> Any:
    return tf.random.normal([2], seed=5)


def reported(program: Callable[[], Any], *inserted: Any) -> list[str]:
    """What the report says of states."""
    function = tf.function(program, autograph=False)
    function()
    with amanda.apply(inserting(*inserted)) as scope:
        function()
    return [entry.what for entry in scope.report if "state" in entry.what]


@pytest.mark.parametrize(
    "program",
    [
        lambda: drawn(5),
        lambda: tf.sin(inner()),
        lambda: tf.cond(tf.reduce_sum(drawn(5)) > 9, lambda: 1.0, lambda: 2.0),
    ],
)
def test_it_is_said_that_a_seeded_generator_begins_anew_in_a_copy(program: Any) -> None:
    inserted = "insert_before_op", "Sin", lambda value: value * 2
    (subject,) = reported(program, *inserted)
    assert "RandomStandardNormal" in subject


def test_nothing_is_said_of_a_generator_without_a_seed() -> None:
    assert reported(lambda: drawn(0), "insert_before_op", "Sin", lambda value: value * 2) == []


def test_nothing_is_said_where_nothing_is_inserted() -> None:
    assert reported(lambda: drawn(5), "insert_before_op", "Cos", lambda value: value * 2) == []
