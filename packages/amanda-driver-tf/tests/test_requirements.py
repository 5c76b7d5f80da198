"""A private name that a TensorFlow lacks takes out the mode that leans on it, by name, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from acting import inserting

import amanda
from amanda.backend import Driver
from amanda.drivers.tensorflow import FunctionDriver, GraphDriver, TensorFlowEagerDriver

tf1 = tf.compat.v1


def in_a_session() -> Any:
    with tf.Graph().as_default(), tf1.Session() as session:
        return session.run(tf.nn.relu(tf.constant([1.0])))


def in_a_function() -> Any:
    return tf.function(lambda x: tf.nn.relu(x))(tf.constant([1.0]))


def in_eager_mode() -> Any:
    return tf.nn.relu(tf.constant([1.0]))


RUNS: dict[str, Callable[[], Any]] = {
    "graph": in_a_session, "function": in_a_function, "eager": in_eager_mode,
}  # fmt: skip


DRIVERS: dict[str, type[Driver]] = {
    driver.modes[0]: driver for driver in (GraphDriver, FunctionDriver, TensorFlowEagerDriver)
}


@pytest.mark.parametrize("mode", RUNS)
def test_one_mode_is_off_and_says_what_is_missing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*DRIVERS[mode].private_names, "tensorflow.python.framework.ops:gone")
    monkeypatch.setattr(DRIVERS[mode], "private_names", names)
    modes: list[str] = []
    for name, run in RUNS.items():
        tool = inserting("insert_before_op", "Relu", lambda _, name=name: modes.append(name))
        with amanda.apply(tool) as scope:
            assert run() == [1.0]
    assert modes == [name for name in RUNS if name != mode]
    (entry,) = scope.report
    assert f"tensorflow {tf.__version__} lacks tensorflow.python.framework.ops.gone" in entry.reason
    assert f"{mode} mode" in entry.reason


@pytest.mark.parametrize("mode", RUNS)
def test_nothing_is_missing_here(mode: str) -> None:
    DRIVERS[mode]().check_private_names()
