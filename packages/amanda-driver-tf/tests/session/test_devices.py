"""Sessions with several devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda

tf1 = tf.compat.v1


class Everything(amanda.Tool):
    """Is given all values of each op; counts the handles among them."""

    def __init__(self, mark: Any) -> None:
        self.handles = 0
        routine = mark(self.look)
        self.add_inst_for_op(lambda context: context.insert_before_op(routine))
        self.add_inst_for_op(lambda context: context.insert_before_backward_op(routine), backward=True)

    def look(self, *values: Any) -> Any:
        self.handles += sum(getattr(value, "dtype", None) == tf.resource for value in values)
        return values


@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.observer], ids=["runtime", "observer"])
def test_routines_are_given_handles_of_several_devices(mark: Any) -> None:
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:0"):
            bias = tf1.get_variable("one", initializer=np.ones((2, 2), np.float32), use_resource=True)
        with tf.device("CPU:1"):
            weight = tf1.get_variable("other", initializer=np.ones((2, 2), np.float32), use_resource=True)
        y = tf1.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y @ weight + bias), [0, tf.ones((2, 2))])[
            1
        ]
        train = tf1.train.GradientDescentOptimizer(0.001).minimize(tf.reduce_sum(y))
        initialized = tf1.global_variables_initializer()

    def trained(*tools: amanda.Tool) -> list[Any]:
        with tf1.Session(graph=graph, config=tf1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(initialized)
            with amanda.apply(*tools) as scope:
                outputs = session.run([y, train])[:1]
            assert "a run of a session" not in [entry.what for entry in scope.report]
            return [*outputs, *session.run([bias, weight])]

    tool = Everything(mark)
    for expected, value in zip(trained(), trained(tool), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert tool.handles >= 8  # of two variables around and in a loop of three rounds
