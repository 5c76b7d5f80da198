"""A tool that gives back what it is given changes no bit, where the runtime fuses no operations."""

from __future__ import annotations

import sys
import threading

import children
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

import amanda

tf1 = tf.compat.v1
CONFIG = tf1.ConfigProto()
CONFIG.graph_options.rewrite_options.disable_meta_optimizer = True
CONFIG.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF


def weight(name, shape):
    values = np.random.RandomState(len(name)).randn(*shape).astype(np.float32) * 0.1
    return tf1.get_variable(name, initializer=values, use_resource=len(name) % 2 == 0)


def convolutional():
    x = tf1.placeholder(tf.float32, [None, 12, 12, 3], name="x")
    training = tf1.placeholder_with_default(True, [])
    y = tf.nn.conv2d(x, weight("kernel", [3, 3, 3, 4]), 1, "SAME")
    scale, shift = tf.ones([4]), tf.zeros([4])
    normal = tf1.cond(
        training,
        lambda: tf1.nn.fused_batch_norm(y, scale, shift)[0],
        lambda: tf1.nn.fused_batch_norm(y, scale, shift, shift, scale, is_training=False)[0],
    )
    y = tf.nn.max_pool2d(tf.nn.relu(normal), 2, 2, "SAME")
    y = tf.nn.depthwise_conv2d(y, weight("depth", [3, 3, 4, 2]), [1, 1, 1, 1], "SAME")
    y = tf.nn.dropout(tf.nn.avg_pool2d(y, 2, 2, "SAME"), 0.3, seed=4)
    y = tf.reshape(y, [-1, 72])
    return tf.matmul(y, weight("dense", [72, 5])), {"x:0": np.random.RandomState(1).rand(4, 12, 12, 3)}


def recurrent():
    x = tf1.placeholder(tf.float32, [None, 6, 3], name="x")
    w, u = weight("inputs", [3, 4]), weight("state", [4, 4])
    steps = tf.transpose(x, [1, 0, 2])
    states = tf.scan(lambda h, v: tf.tanh(v @ w + h @ u), steps, tf.zeros([2, 4]))
    return states[-1], {"x:0": np.random.RandomState(2).rand(2, 6, 3)}


def attention():
    ids = tf1.placeholder(tf.int32, [None, 5], name="x")
    y = tf.gather(weight("embedding", [20, 8]), ids)
    q, k, v = tf.split(tf.einsum("bsd,de->bse", y, weight("qkv", [8, 24])), 3, axis=-1)
    scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 8**0.5)
    y = y + tf.matmul(scores, v)
    mean, variance = tf.nn.moments(y, [-1], keepdims=True)
    y = (y - mean) * tf1.rsqrt(variance + 1e-5)
    return tf.nn.gelu(y), {"x:0": np.random.RandomState(3).randint(0, 20, [2, 5])}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("model", [convolutional, recurrent, attention])
def test_training_is_bit_identical(model, version, everywhere) -> None:
    before = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if version == 2 else tf1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as graph:
            tf1.set_random_seed(5)
            y, feeds = model()
            loss = tf.reduce_mean(tf.square(y - 1.0))
            train = tf1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            init = tf1.global_variables_initializer()
    finally:
        (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()
    variables = graph.get_collection("variables")

    def run(*tools):
        with tf1.Session(graph=graph, config=CONFIG) as session:
            session.run(init)
            outputs = []
            for step in range(4):
                if tools and step in (1, 2):
                    with amanda.apply(*tools):
                        outputs.append(session.run([y, loss, train], feeds)[:2])
                else:
                    outputs.append(session.run([y, loss, train], feeds)[:2])
            return outputs, session.run(variables)

    np.testing.assert_equal(run(everywhere), run())
    assert sum(everywhere.ran.values()) > 100


def test_scopes_nest(graph) -> None:
    class Times(amanda.Tool):
        def __init__(self, factor):
            self.factor = factor
            self.add_inst_for_op(self.analyse)

        def analyse(self, context):
            if context.get_op_type() == "Exp":
                context.insert_before_op(lambda value: value * self.factor + 1.0)

    y = tf.exp(tf.constant(1.0))
    outer, inner = Times(2.0), Times(3.0)
    with tf1.Session(graph=graph) as session, amanda.apply(outer):
        assert session.run(y) == pytest.approx(np.exp(3.0))
        with amanda.apply(inner):
            assert session.run(y) == pytest.approx(np.exp(10.0))
            with amanda.disabled():
                assert session.run(y) == pytest.approx(np.exp(1.0))
        assert session.run(y) == pytest.approx(np.exp(3.0))


def test_threads_run_one_session(graph, everywhere) -> None:
    x = tf1.placeholder(tf.float32, [])
    y = tf.exp(x, name="y")
    results = {}
    with tf1.Session(graph=graph) as session:

        def work(value):
            for _ in range(20):
                results.setdefault(value, set()).add(float(session.run(y, {x: value})))

        opened = threading.Event()
        before = threading.Thread(target=lambda: opened.wait(60) and work(9.0))
        before.start()
        with amanda.apply(everywhere):
            threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
            for thread in threads:
                thread.start()
            opened.set()
            for thread in (*threads, before):
                thread.join()
    assert all(len(outputs) == 1 for outputs in results.values())
    assert everywhere.ran["y"] == 80


KERAS = """
import numpy as np, tensorflow as tf
tf.compat.v1.disable_eager_execution()
import tf_keras as keras
import amanda
from collections import Counter

ran = Counter()
tool = amanda.Tool()

def forward(context):
    kind = context.get_op_type()
    context.insert_before_op(lambda *values: ran.update([kind]) or values)

def backward(context):
    kind = "backward " + context.get_backward_op().type
    context.insert_before_backward_op(lambda *grads: ran.update([kind]) or grads)

tool.add_inst_for_op(forward)
tool.add_inst_for_op(backward, backward=True)
x, y = np.random.RandomState(0).rand(16, 8, 8, 1), np.ones((16, 2))

def train(*tools):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.layers.Conv2D(4, 3, input_shape=(8, 8, 1), activation="relu"), keras.layers.Flatten(),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.0), keras.layers.Dense(2),
    ])
    model.compile("adam", "mse")
    with amanda.apply(*tools) as scope:
        losses = model.fit(x, y, epochs=2, batch_size=8, verbose=0, shuffle=False).history["loss"]
        return losses, model.predict(x), model.get_weights(), list(scope.report)

vanilla, inside = train(), train(tool)
np.testing.assert_allclose(inside[0], vanilla[0], rtol=1e-5)
np.testing.assert_allclose(inside[1], vanilla[1], rtol=1e-4, atol=1e-5)
assert ran["Conv2D"] == 5 and ran["backward Conv2DBackpropFilter"] == 4, ran
assert [one.what for one in inside[3]] == ["routines before backward ops that no gradient enters"], inside[3]
"""


@pytest.mark.long
def test_keras_in_graph_mode() -> None:
    done = children.run([sys.executable, "-c", KERAS])
    assert done.returncode == 0, done.stderr[-3000:]
