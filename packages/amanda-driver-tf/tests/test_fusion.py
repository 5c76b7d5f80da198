"""Without fusion a tool that changes nothing leaves every bit of a graph's results."""

from __future__ import annotations

import os
import sys

import children
import pytest
import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

import amanda
from amanda.drivers.tensorflow import session_config, without_fusion

PROGRAM = """
import numpy as np
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow import session_config, without_fusion

tf1 = tf.compat.v1
draw = np.random.default_rng(0).standard_normal
image, kernel, bias, other = (draw(shape, "f4") for shape in ((2, 16, 16, 8), (3, 3, 8, 32), (32,), (32, 16)))


def network(x):
    y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))
    return tf.tanh(tf.matmul(tf.reshape(y, [-1, 32]), other) + 0.1)


class Tapping(amanda.Tool):
    calls = 0

    def __init__(self):
        self.add_inst_for_op(lambda context: context.insert_after_op(self.same))

    def same(self, *values):
        self.calls += 1
        return values


function = tf.function(network)
fused = function(image)
before = tf.config.optimizer.get_experimental_options()
with without_fusion():
    vanilla, tool = function(image), Tapping()
    with amanda.apply(tool):
        assert (function(image) == vanilla).numpy().all()
    assert tool.calls > 4
assert tf.config.optimizer.get_experimental_options() == before

config = tf1.ConfigProto(intra_op_parallelism_threads=1)
with tf.Graph().as_default() as graph:
    x = tf1.placeholder(tf.float32, image.shape)
    y = network(x)
with tf1.Session(graph=graph, config=session_config(config)) as session:
    vanilla, tool = session.run(y, {x: image}), Tapping()
    with amanda.apply(tool):
        np.testing.assert_array_equal(session.run(y, {x: image}), vanilla)
    assert tool.calls > 4
assert session_config(config).intra_op_parallelism_threads == 1
assert not config.graph_options.rewrite_options.disable_meta_optimizer
"""


@pytest.mark.slow
def test_a_tool_that_changes_nothing_leaves_every_bit() -> None:
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = children.run([sys.executable, "-c", PROGRAM], env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not _pywrap_util_port.IsMklEnabled(), reason="oneDNN is off in this process")
def test_the_error_says_how_to_turn_onednn_off() -> None:
    for use in (lambda: without_fusion().__enter__(), session_config):
        with pytest.raises(amanda.AmandaError, match="TF_ENABLE_ONEDNN_OPTS=0"):
            use()
    assert not tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
