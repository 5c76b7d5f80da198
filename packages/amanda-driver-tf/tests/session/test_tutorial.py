"""The tutorial's cells for TensorFlow's graph mode, in sessions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import amanda
import amanda.tools

tf1 = tf.compat.v1


class CountOPTool(amanda.Tool):
    def __init__(self, op_name: str, backward_op_name: str):
        super().__init__()
        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext):
        op = context.get_op()
        if self.op_name in op.name:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext):
        op = context.get_backward_op()
        if self.backward_op_name in op.name:
            context.insert_after_backward_op(self.counter_backward_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs):
        self.counter += 1
        return inputs

    def counter_backward_op(self, *inputs):
        self.backward_counter += 1
        return inputs


class CountByType(CountOPTool):
    def callback(self, context):
        if context.get_op().type == self.op_name:
            context.insert_before_op(self.counter_op)

    def backward_callback(self, context):
        if context.get_backward_op().type == self.backward_op_name:
            context.insert_after_backward_op(self.counter_backward_op)


def mapped_counter():
    mapping = amanda.tools.mapping

    def torch_op_name_rule(context):
        context["op_name"] = context.get_op().__name__
        backward = context.get_backward_op()
        context["backward_op_name"] = backward.__name__ if backward is not None else None

    def tf_op_name_rule(context):
        context["op_name"] = context.get_op().name if context.get_op() is not None else None
        backward = context.get_backward_op()
        context["backward_op_name"] = backward.name if backward is not None else None

    mapping_tool = mapping.MappingTool(
        rules=[["pytorch", torch_op_name_rule], ["tensorflow", tf_op_name_rule]]
    )

    class Counter(CountOPTool):
        def __init__(self, op_name, backward_op_name):
            self.depends_on(mapping_tool)
            super().__init__(op_name, backward_op_name)

        def callback(self, context):
            if self.op_name in context["op_name"]:
                context.insert_before_op(self.counter_op)

        def backward_callback(self, context):
            if self.backward_op_name in context["backward_op_name"]:
                context.insert_after_backward_op(self.counter_backward_op)

    return Counter


def resnet50(x):
    """ResNet-50 (He et al. 2015) of narrow layers: the operators are the same."""
    weights = []

    def conv(y, filters, size, stride, name):
        with tf1.variable_scope(name):
            kernel = tf1.get_variable("kernel", [size, size, y.shape[-1], filters], use_resource=True)
            scale = tf1.get_variable(
                "scale", [filters], initializer=tf1.ones_initializer(), use_resource=True
            )
            shift = tf1.get_variable(
                "shift", [filters], initializer=tf1.zeros_initializer(), use_resource=True
            )
            weights.extend([kernel, scale, shift])
            y = tf.raw_ops.Conv2D(
                input=y, filter=kernel, strides=[1, stride, stride, 1], padding="SAME", name="Conv2D"
            )
            return tf1.nn.fused_batch_norm(y, scale, shift)[0]

    y = tf.nn.relu(conv(x, 4, 7, 2, "conv1"))
    y = tf.nn.max_pool2d(y, 3, 2, "SAME")
    for stage, (blocks, filters) in enumerate([(3, 4), (4, 4), (6, 8), (3, 8)]):
        for block in range(blocks):
            name, stride = f"stage{stage}_{block}", 2 if block == 0 and stage else 1
            z = tf.nn.relu(conv(y, filters, 1, stride, f"{name}_a"))
            z = tf.nn.relu(conv(z, filters, 3, 1, f"{name}_b"))
            z = conv(z, 4 * filters, 1, 1, f"{name}_c")
            shortcut = conv(y, 4 * filters, 1, stride, f"{name}_s") if block == 0 else y
            y = tf.nn.relu(z + shortcut)
    dense = tf1.get_variable("dense", [y.shape[-1], 10], use_resource=True)
    return tf.matmul(tf.reduce_mean(y, [1, 2]), dense), weights


@pytest.fixture(scope="module")
def model():
    with tf.Graph().as_default() as graph:
        x = tf1.random_uniform([2, 32, 32, 3], seed=1)
        y, weights = resnet50(x)
        inputs, kernels = tf1.gradients(y, x), tf1.gradients(y, weights)
        with tf1.Session(graph=graph) as session:
            session.run(tf1.global_variables_initializer())
            yield session, x, inputs, kernels


def test_counting_by_name(model) -> None:
    """The reads of the kernels carry "Conv2D" in their names too."""
    session, _, inputs, kernels = model
    tool = CountOPTool("Conv2D", "Conv2DBackpropFilter")
    with amanda.tool.apply(tool):
        session.run(kernels)
    assert (tool.counter, tool.backward_counter) == (106, 53)
    tool = CountOPTool("Conv2D", "Conv2DBackpropInput")
    with amanda.tool.apply(tool):
        session.run(inputs)
    assert (tool.counter, tool.backward_counter) == (106, 53)


def test_counting_by_type(model) -> None:
    session, _, _, kernels = model
    tool = CountByType("Conv2D", "Conv2DBackpropFilter")
    with amanda.tool.apply(tool):
        session.run(kernels)
        session.run(kernels)
    assert (tool.counter, tool.backward_counter) == (106, 106)


def test_counting_through_a_mapping(model) -> None:
    session, _, _, kernels = model
    tool = mapped_counter()("Conv2D", "Conv2DBackpropFilter")
    with amanda.tool.apply(tool):
        session.run(kernels)
    assert (tool.counter, tool.backward_counter) == (106, 53)


def test_gradients_are_the_same_under_a_counting_tool(model) -> None:
    session, x, _, kernels = model
    tool = CountByType("Conv2D", "Conv2DBackpropFilter")
    fed = {x: np.random.RandomState(0).rand(2, 32, 32, 3)}
    vanilla = session.run(kernels, fed)
    with amanda.tool.apply(tool):
        inside = session.run(kernels, fed)
    for gradient, expected in zip(inside, vanilla, strict=True):  # fused kernels differ in rounding
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4 * max(1, np.abs(expected).max()))
