"""The tutorial's last counting tool: one source, which counts on PyTorch and in the modes of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
import torch

import amanda
from amanda.tools.mapping import MappingTool


def torch_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().__name__
    if context.is_backward():
        context["backward_op_name"] = context.get_backward_op().__name__


def tf_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().type.lower()
    if context.is_backward():
        context["backward_op_name"] = context.get_backward_op().type


class CountOPTool(amanda.Tool):
    def __init__(self, op_name: str, backward_op_names: set[str]) -> None:
        super().__init__()
        self.counter = self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_names = backward_op_names
        rules = [["pytorch", torch_op_name_rule], ["tensorflow", tf_op_name_rule]]
        self.depends_on(MappingTool(rules=rules))
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    def callback(self, context: amanda.OpContext) -> None:
        if context["op_name"] == self.op_name:
            context.insert_before_op(self.counter_op)

    def backward_callback(self, context: amanda.OpContext) -> None:
        if context["backward_op_name"] in self.backward_op_names:
            context.insert_after_backward_op(self.counter_backward_op)

    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    def counter_backward_op(self, *grads: Any) -> Any:
        self.backward_counter += 1
        return grads

    @property
    def counts(self) -> tuple[int, int]:
        return self.counter, self.backward_counter


@pytest.fixture
def tool() -> CountOPTool:
    return CountOPTool("conv2d", {"ConvolutionBackward0", "Conv2DBackpropFilter"})


@pytest.fixture(scope="module")
def model() -> Any:
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


IMAGES, LABELS = tf.ones([2, 32, 32, 3]), tf.constant([1, 2])


def gradients(model: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(IMAGES, training=True))
    return tape.gradient(loss, model.trainable_variables)


def test_on_pytorch(tool: CountOPTool, resnet50: Callable[[], torch.nn.Module]) -> None:
    with amanda.apply(tool):
        resnet50()(torch.rand((1, 3, 64, 64))).sum().backward()
    assert tool.counts == (53, 53)


@pytest.mark.slow
def test_in_eager_mode(tool: CountOPTool, model: Any) -> None:
    with amanda.apply(tool):
        gradients(model)
        assert tool.counts == (53, 53)
        gradients(model)
    assert tool.counts == (106, 106)


@pytest.mark.long
def test_in_a_function(tool: CountOPTool, model: Any) -> None:
    step = tf.function(gradients)
    with amanda.apply(tool):
        step(model)
    assert tool.counts == (53, 53)


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [True, pytest.param(False, marks=pytest.mark.long)])
def test_in_keras_fit(tool: CountOPTool, model: Any, eagerly: bool) -> None:
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=eagerly, jit_compile=False)
    with amanda.apply(tool):
        model.fit(IMAGES, LABELS, batch_size=2, epochs=1, verbose=0)
    assert tool.counts == (53, 53)
