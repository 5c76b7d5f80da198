"""Scopes and threads."""

import threading
from typing import Any

import tensorflow as tf

import amanda


def test_replicas_of_a_mirrored_strategy_are_in_the_scope(ops: Any) -> None:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        w = tf.Variable([1.0, -2.0])

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.nn.relu(w * 2.0))
        return tape.gradient(y, w)

    with amanda.apply(ops):
        gradient = strategy.run(step)
    assert strategy.experimental_local_results(gradient)[0].numpy().tolist() == [2.0, 0.0]
    assert ops.forward.count("Relu") == 1
    assert ("Relu", "ReluGrad") in ops.backward


def test_a_tape_is_walked_on_a_thread_of_the_scope(ops: Any) -> None:
    x = tf.Variable([1.0, -2.0])
    gradients: list[Any] = []

    def step() -> None:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.nn.relu(x))
        gradients.append(tape.gradient(y, x).numpy().tolist())

    with amanda.apply(ops):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert gradients == [[1.0, 0.0]]
    assert ops.forward.count("Relu") == 1
    assert ops.backward.count(("Relu", "ReluGrad")) == 1
