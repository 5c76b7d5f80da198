"""Counting, FLOPs and pruning of one network: the same numbers on each framework of this environment.

Those of JAX and MindSpore are compared with the same file, in the tests of their drivers.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import pytest
import tensorflow as tf
import torch
from onnx import TensorProto, helper, numpy_helper
from portable import IMAGES, KERNEL, KERNEL_BIAS, MATRIX, MATRIX_BIAS, assert_numbers, measured

CHANNELS_FIRST, OIHW = IMAGES.transpose(0, 3, 1, 2).copy(), KERNEL.transpose(3, 2, 0, 1).copy()


def test_on_pytorch() -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Linear(64, 3)
            self.conv.weight.data, self.conv.bias.data = torch.tensor(OIHW), torch.tensor(KERNEL_BIAS)
            self.linear.weight.data, self.linear.bias.data = torch.tensor(MATRIX.T), torch.tensor(MATRIX_BIAS)

        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
            return self.linear(x.permute(0, 2, 3, 1).flatten(1))

    model = Network()
    with torch.no_grad():
        assert_numbers(measured(lambda: model(torch.tensor(CHANNELS_FIRST))))


class TensorFlowNetwork(tf.Module):
    """The network of variables, in eager mode, in a function and in a session's graph."""

    def __init__(self) -> None:
        super().__init__()
        make = tf.Variable if tf.executing_eagerly() else tf.compat.v1.get_variable
        named = {"kernel": KERNEL, "kernel_bias": KERNEL_BIAS, "matrix": MATRIX, "matrix_bias": MATRIX_BIAS}
        for name, value in named.items():
            given = (value,) if tf.executing_eagerly() else ()
            kwargs = {} if given else {"initializer": tf.constant(value), "use_resource": True}
            setattr(self, name, make(*given, name=name, **kwargs))

    def __call__(self, x: Any) -> Any:
        x = tf.nn.conv2d(x, self.kernel, 1, "SAME") + self.kernel_bias
        x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
        return tf.matmul(tf.reshape(x, (len(IMAGES), -1)), self.matrix) + self.matrix_bias


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_on_tensorflow(mode: str) -> None:
    if mode != "session":
        network = TensorFlowNetwork()
        run = tf.function(network) if mode == "function" else network
        assert_numbers(measured(lambda: run(tf.constant(IMAGES)).numpy()))
        return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        images = tf.compat.v1.placeholder(tf.float32, IMAGES.shape)
        scores = TensorFlowNetwork()(images)
        session.run(tf.compat.v1.global_variables_initializer())
        assert_numbers(measured(lambda: session.run(scores, {images: IMAGES})))


def test_on_onnx_runtime() -> None:
    nodes = [
        helper.make_node("Conv", ["images", "kernel", "kernel_bias"], ["made"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["made"], ["active"]),
        helper.make_node("MaxPool", ["active"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Transpose", ["pooled"], ["turned"], perm=[0, 2, 3, 1]),
        helper.make_node("Flatten", ["turned"], ["flat"]),
        helper.make_node("Gemm", ["flat", "matrix", "matrix_bias"], ["scores"], transB=1),
    ]
    weights = {
        "kernel": OIHW,
        "kernel_bias": KERNEL_BIAS,
        "matrix": MATRIX.T.copy(),
        "matrix_bias": MATRIX_BIAS,
    }
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, CHANNELS_FIRST.shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, (len(IMAGES), 3))],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    assert_numbers(measured(lambda: session.run(None, {"images": CHANNELS_FIRST})[0]))
