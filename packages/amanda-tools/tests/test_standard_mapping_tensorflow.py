"""StandardMapping on TensorFlow: the words of the vocabulary, indices that point at the weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from repository import repository_path
from seen_types import types_in

import amanda
from amanda.tools.mapping import StandardMapping, _tensorflow

A, B = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[0.5, 1.0], [1.5, 2.0]])
X, W = tf.ones([1, 6, 6, 2]), tf.ones([3, 3, 2, 4])
WORDS: list[tuple[str, Callable[[], Any]]] = [
    ("add", lambda: A + B),
    ("sub", lambda: 1.0 - A),
    ("mul", lambda: 2.0 * A),
    ("div", lambda: A / B),
    ("floor_divide", lambda: A // B),
    ("remainder", lambda: A % B),
    ("pow", lambda: A**2.0),
    ("neg", lambda: -A),
    ("abs", lambda: abs(A)),
    ("matmul", lambda: A @ B),
    ("matmul", lambda: A[None] @ B[None]),
    ("eq", lambda: tf.equal(A, B)),
    ("ge", lambda: A >= B),
    ("bitwise_not", lambda: ~(A > B)),
    ("reshape", lambda: tf.reshape(A, [4])),
    ("permute", lambda: tf.transpose(A)),
    ("getitem", lambda: A[0]),
    ("cat", lambda: tf.concat([A, B], 0)),
    ("conv2d", lambda: tf.nn.conv2d(X, W, 1, "SAME")),
    ("conv_transpose2d", lambda: tf.nn.conv2d_transpose(X, tf.ones([3, 3, 5, 2]), [1, 6, 6, 5], 1)),
    ("depthwise_conv2d", lambda: tf.nn.depthwise_conv2d(X, tf.ones([3, 3, 2, 1]), [1, 1, 1, 1], "SAME")),
    ("max_pool2d", lambda: tf.nn.max_pool2d(X, 2, 2, "SAME")),
    ("avg_pool2d", lambda: tf.nn.avg_pool2d(X, 2, 2, "SAME")),
    ("relu", lambda: tf.nn.relu(A)),
    ("sigmoid", lambda: tf.sigmoid(A)),
    ("softmax", lambda: tf.nn.softmax(A)),
    ("log_softmax", lambda: tf.nn.log_softmax(A)),
    ("to", lambda: tf.cast(A, tf.float64)),
    ("cumsum", lambda: tf.cumsum(A)),
]


@pytest.mark.parametrize(("word", "run"), WORDS)
def test_the_words_of_the_vocabulary_are_given(word: str, run: Callable[[], Any]) -> None:
    if word == "cumsum":
        assert types_in(run)[-1] == "Cumsum"  # no word: TensorFlow's own name
    else:
        assert word in types_in(run)


def test_the_documented_words_are_these() -> None:
    section = repository_path("docs/vocabulary.md").read_text().split("## TensorFlow")[1].split("## ")[0]
    rows = [re.findall(r"`(.+?)`", row) for row in section.splitlines() if row.startswith("| `")]
    assert {name: word for word, *names in rows for name in names} == _tensorflow.WORDS


class Weights(amanda.Tool):
    """What is said of the ops with weights, and the shapes of weights and of gradients found by index."""

    def __init__(self) -> None:
        self.layouts: dict[str, tuple[Any, Any]] = {}
        self.shapes: dict[str, Any] = {}
        self.gradients: dict[str, list[Any]] = {}
        self.backward_types: set[str] = set()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True, require_outputs=True)

    def _forward(self, context: amanda.OpContext) -> None:
        if context["weight_index"] is not None:
            self.layouts[context["type"]] = context["layout"], context["weight_layout"]
            self.shapes[context["type"]] = context["shape"](context.get_inputs()[context["weight_index"]])

    def _backward(self, context: amanda.OpContext) -> None:
        self.backward_types.add(context["backward_type"])
        index = context["weight_grad_index"]
        if index is not None:
            found = self.gradients.setdefault(context["type"], [])
            found.append(context["shape"]((context.get_grad_inputs() or [])[index]))


class Fused(tf.Module):
    """The fused kernel, which Keras 3 does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = tf.Variable(tf.ones([2])), tf.Variable(tf.zeros([2]))

    def __call__(self, x: Any, training: bool = True) -> Any:
        return tf.compat.v1.nn.fused_batch_norm(x, self.scale, self.offset, is_training=training)[0]


LAYERS: list[tuple[str, Callable[[], Any], tuple[int, ...], tuple[Any, Any], str]] = [
    ("conv2d", lambda: keras.layers.Conv2D(4, 3), (2, 6, 6, 2), ("NHWC", "HWIO"), "conv2d_backward"),
    (
        "depthwise_conv2d", lambda: keras.layers.DepthwiseConv2D(3), (2, 6, 6, 2), ("NHWC", "HWIM"),
        "depthwise_conv2d_backward",
    ),
    (
        "conv_transpose2d", lambda: keras.layers.Conv2DTranspose(5, 3), (2, 6, 6, 2), ("NHWC", "HWOI"),
        "conv_transpose2d_backward",
    ),
    ("matmul", lambda: keras.layers.Dense(2), (2, 2), (None, "IO"), "matmul_backward"),
    ("batch_norm", Fused, (2, 6, 6, 2), ("NHWC", None), "batch_norm_backward"),
]  # fmt: skip


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(("kind", "layer", "extents", "layouts", "backward"), LAYERS)
def test_indices_point_at_weights_and_their_gradients(
    kind: str,
    layer: Callable[[], Any],
    extents: tuple[int, ...],
    layouts: tuple[Any, Any],
    backward: str,
    in_function: bool,
) -> None:
    built, x, tool = layer(), tf.random.normal(extents), Weights()
    built(x)

    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(built(x, training=True) ** 2)
        return tape.gradient(y, [x, *built.trainable_variables])

    with amanda.apply(tool):
        (tf.function(step) if in_function else step)()
    assert tool.layouts[kind] == layouts
    assert tool.shapes[kind] in [tuple(variable.shape) for variable in built.trainable_variables]
    assert tool.gradients[kind] == [tool.shapes[kind]]
    assert backward in tool.backward_types


def test_a_product_of_two_values_has_no_weight() -> None:
    tool = Weights()
    with amanda.apply(tool):
        tf.matmul(A, B)
    assert tool.layouts == {}


@pytest.mark.parametrize("in_function", [False, True])
def test_weights_of_another_shape_than_their_variables_are_found(in_function: bool) -> None:
    layer, x = keras.layers.MultiHeadAttention(2, 4), tf.random.normal([2, 5, 6])
    layer(x, x)
    facts: list[tuple[str, tuple[int, ...], str]] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())

    def look(context: amanda.OpContext) -> None:
        index = context["weight_index"]
        if index is not None:
            value = context.get_value(index)
            assert isinstance(value.numpy(), np.ndarray)
            facts.append((context["type"], context["shape"](value), context["weight_layout"]))

    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        (tf.function(layer) if in_function else layer)(x, x)
    assert facts == [("matmul", (6, 8), "IO")] * 3 + [("matmul", (8, 6), "IO")]


def test_weights_of_another_shape_than_their_variables_are_found_in_a_session() -> None:
    tool, values = amanda.Tool(), []
    tool.depends_on(StandardMapping())

    def look(context: amanda.OpContext) -> None:
        if context["weight_index"] is not None:
            values.append(context.get_value(context["weight_index"]).numpy())

    tool.add_inst_for_op(look)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None, 2])
        kernel = tf.compat.v1.get_variable("kernel", initializer=tf.range(8.0))
        turned = tf.transpose(tf.reshape(kernel, [4, 2]))
        y = tf.matmul(x, turned) @ tf.matmul(x, tf.reshape(x, [2, -1]))
        session.run(tf.compat.v1.global_variables_initializer())
        with amanda.apply(tool):
            session.run(y, {x: np.ones([4, 2], np.float32)})
    assert [value.tolist() for value in values] == [[[0, 2, 4, 6], [1, 3, 5, 7]]]


def test_an_assignment_is_in_place() -> None:
    facts: list[tuple[str, bool]] = []
    tool, v = amanda.Tool(), tf.Variable([1.0])
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: facts.append((context["type"], context["in_place"])))
    with amanda.apply(tool):
        v.assign_add([2.0])
    assert facts == [("add", True)]


def test_dtype_and_shape_are_pythons_own() -> None:
    facts: list[Any] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())

    def look(context: amanda.OpContext) -> None:
        (x,) = context.get_inputs()
        facts.extend([context["dtype"](x), context["shape"](x), context["shape"](3)])

    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        tf.nn.relu(A)
    assert facts == ["float32", (2, 2), None]


def test_a_layout_that_a_call_leaves_out_is_the_default() -> None:
    layouts: list[Any] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: layouts.append((context["type"], context["layout"])))
    kernel = tf.ones([2, 2, 1, 1])
    with amanda.apply(tool):
        tf.raw_ops.DepthwiseConv2dNative(
            input=X[..., :1], filter=kernel, strides=[1, 1, 1, 1], padding="VALID"
        )
        tf.raw_ops.Conv3D(input=X[None, ..., :1], filter=kernel[None], strides=[1] * 5, padding="VALID")
    assert [pair for pair in layouts if pair[1]] == [("depthwise_conv2d", "NHWC"), ("conv3d", "NDHWC")]


@pytest.mark.parametrize("resource", [True, False])
def test_indices_point_at_weights_in_a_session(resource: bool) -> None:
    tool = Weights()
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2, 6, 6, 2])
        kernel = tf.compat.v1.get_variable("kernel", [3, 3, 2, 4], use_resource=resource)
        dense = tf.compat.v1.get_variable("dense", [64, 3], use_resource=resource)
        hidden = tf.reshape(tf.nn.conv2d(x, kernel, 1, "VALID"), [2, 64])
        y = tf.reduce_sum(tf.matmul(hidden, dense) ** 2)
        gradients = tf.gradients(y, [kernel, dense])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with amanda.apply(tool):
                session.run(gradients, {x: X.numpy().repeat(2, 0)})
    assert tool.layouts == {"conv2d": ("NHWC", "HWIO"), "matmul": (None, "IO")}
    assert tool.gradients == {"conv2d": [(3, 3, 2, 4)], "matmul": [(64, 3)]}
