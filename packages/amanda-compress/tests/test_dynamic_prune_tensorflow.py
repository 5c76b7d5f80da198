"""Dynamic pruning on TensorFlow: in every mode what it gives on PyTorch, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import amanda
from amanda.tools.dynamic_prune import (
    ActivationPruneTool,
    AttentionPruneTool,
    DynamicChannelPruneTool,
    DynamicPruneTool,
)

Arrays = dict[str, NDArray[np.float32]]
RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> NDArray[np.float32]:
    return RANDOM.normal(0, 0.5, shape).astype(np.float32)


IMAGES = drawn(3, 8, 8, 4)
CONVOLUTIONS: Arrays = {
    "stem": drawn(3, 3, 4, 6), "one": drawn(3, 3, 6, 6), "two": drawn(3, 3, 6, 6), "scale": 1 + drawn(6) ** 2,
    "offset": drawn(6), "mean": drawn(6), "variance": 1 + drawn(6) ** 2,
}  # fmt: skip


def convolutions_of_pytorch(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    def convolved(x: Tensor, name: str) -> Tensor:
        return nn.functional.conv2d(x, w[name].permute(3, 2, 0, 1), padding=1)

    x = convolved(x.permute(0, 3, 1, 2), "stem").relu()
    y = convolved(x, "one")
    y = nn.functional.batch_norm(y, w["mean"], w["variance"], w["scale"], w["offset"], eps=1e-3).relu()
    return (x + convolved(y, "two")).permute(0, 2, 3, 1).relu()


def convolutions_of_tensorflow(x: Any, w: dict[str, Any]) -> Any:
    x = tf.nn.relu(tf.nn.conv2d(x, w["stem"], 1, "SAME"))
    y = tf.nn.conv2d(x, w["one"], 1, "SAME")
    y, *_ = tf.compat.v1.nn.fused_batch_norm(
        y, w["scale"], w["offset"], w["mean"], w["variance"], is_training=False
    )
    return tf.nn.relu(x + tf.nn.conv2d(tf.nn.relu(y), w["two"], 1, "SAME"))


TOKENS = drawn(2, 9, 8)
ATTENTION: Arrays = {name: 2 * drawn(8, 8) for name in ("q1", "k1", "v1", "q2", "k2", "v2", "q3", "k3", "v3")}


def attention_of_pytorch(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    for i in "123":
        q, k, v = ((x @ w[name + i]).reshape(2, 9, 2, 4).permute(0, 2, 1, 3) for name in "qkv")
        made = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        x = made.permute(0, 2, 1, 3).reshape(2, 9, 8) + x
    return x


def attention_of_tensorflow(x: Any, w: dict[str, Any]) -> Any:
    for i in "123":
        q, k, v = (
            tf.transpose(tf.reshape(tf.matmul(x, w[name + i]), (2, 9, 2, 4)), (0, 2, 1, 3)) for name in "qkv"
        )
        made = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 2), v)
        x = tf.reshape(tf.transpose(made, (0, 2, 1, 3)), (2, 9, 8)) + x
    return x


class OfPyTorch(nn.Module):
    def __init__(self, program: Callable[[Tensor, dict[str, Tensor]], Tensor], arrays: Arrays) -> None:
        super().__init__()
        self.program = program
        self.weights = {name: torch.tensor(value) for name, value in arrays.items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x, self.weights)


Program = Callable[[Any, dict[str, Any]], Any]


class Model(tf.Module):
    def __init__(self, program: Program, arrays: Arrays) -> None:
        super().__init__()
        self.program = program
        self.weights = {name: tf.Variable(value) for name, value in arrays.items()}

    def __call__(self, x: Any) -> Any:
        return self.program(x, self.weights)


def eagerly(program: Program, x: Any, arrays: Arrays, tool: DynamicPruneTool) -> Any:
    model = Model(program, arrays)
    tool.prepare(model, tf.constant(x))  # which finds residual branches
    tool.clear()
    with amanda.apply(tool):
        return model(tf.constant(x)).numpy()


def in_a_function(program: Program, x: Any, arrays: Arrays, tool: DynamicPruneTool) -> Any:
    function = tf.function(Model(program, arrays), autograph=False)
    with amanda.apply(tool):
        return function(tf.constant(x)).numpy()


def in_a_session(program: Program, x: Any, arrays: Arrays, tool: DynamicPruneTool) -> Any:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        variables = {name: v1.get_variable(name, initializer=value) for name, value in arrays.items()}
        data = v1.placeholder(tf.float32, (None, *x.shape[1:]))
        result = program(data, variables)
        start = v1.global_variables_initializer()
    with v1.Session(graph=graph) as session:
        session.run(start)
        with amanda.apply(tool):
            return session.run(result, {data: x})


MODES = [eagerly, in_a_function, in_a_session]
CASES: dict[str, tuple[Callable[[], Any], Program, Program, NDArray[np.float32], Arrays]] = {
    "channels": (
        DynamicChannelPruneTool, convolutions_of_pytorch, convolutions_of_tensorflow, IMAGES, CONVOLUTIONS,
    ),
    "positions": (
        ActivationPruneTool, convolutions_of_pytorch, convolutions_of_tensorflow, IMAGES, CONVOLUTIONS,
    ),
    "tokens": (
        lambda: AttentionPruneTool(keep=0.5), attention_of_pytorch,
        attention_of_tensorflow, TOKENS, ATTENTION,
    ),
    "learned blocks": (
        lambda: AttentionPruneTool("block", "learned", block=2), attention_of_pytorch,
        attention_of_tensorflow, TOKENS, ATTENTION,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_mode_gives_what_pytorch_does(name: str) -> None:
    make, of_pytorch, of_tensorflow, x, arrays = CASES[name]
    tool = make()
    model = OfPyTorch(of_pytorch, arrays)
    tool.prepare(model, torch.tensor(x))
    for key, value in tool.state_dict().items():
        if key.endswith("skim.weight"):
            nn.init.normal_(value, std=2.0, generator=torch.Generator().manual_seed(3))
    tool.clear()
    with amanda.apply(tool), torch.no_grad():
        wanted = model(torch.tensor(x)).numpy()
    predictors = [value.detach().numpy() for value in tool.state_dict().values()]
    assert any(row[6] for row in tool.result.rows())
    for mode in MODES:
        other = make()
        mode(of_tensorflow, x, arrays, other)
        own = other.state_dict()
        assert len(own) == len(predictors)
        again = make()
        again.load_state_dict(dict(zip(own, predictors, strict=True)))
        found = mode(of_tensorflow, x, arrays, again)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        rows = zip(again.result.rows(), tool.result.rows(), strict=True)
        for ours, theirs in rows:
            assert ours[6] == pytest.approx(theirs[6], abs=1e-6)
            assert ours[7] == theirs[7]


@pytest.mark.parametrize("name", CASES)
def test_predictors_learn_in_eager_mode_as_on_pytorch(name: str) -> None:
    make, of_pytorch, of_tensorflow, x, arrays = CASES[name]
    tool, other = make(), make()
    model, twin = OfPyTorch(of_pytorch, arrays), Model(of_tensorflow, arrays)
    tool.prepare(model, torch.tensor(x))
    other.prepare(twin, tf.constant(x))
    for key, own in zip(tool.state_dict(), other.state_dict().values(), strict=True):
        value = tool.state_dict()[key]
        if key.endswith("skim.weight"):
            nn.init.normal_(value, std=2.0, generator=torch.Generator().manual_seed(3))
        own.assign(value.detach().numpy())
    for one in (tool, other):
        one.train()
    images = torch.tensor(x, requires_grad=True)
    with amanda.apply(tool):
        ((model(images) ** 2).mean() + tool.loss()).backward()
    with amanda.apply(other), tf.GradientTape() as tape:
        tape.watch(data := tf.constant(x))
        loss = tf.reduce_mean(twin(data) ** 2) + other.loss()
    sources = [data, *other.parameters()]
    found = tape.gradient(loss, sources)
    for theirs, ours in zip([images, *tool.parameters()], found, strict=True):
        if theirs.grad is None:
            assert ours is None
        else:
            np.testing.assert_allclose(ours, theirs.grad, rtol=1e-3, atol=1e-5)


def test_weights_learn_in_a_function_with_the_masks_of_their_predictors() -> None:
    model, tool = Model(attention_of_tensorflow, ATTENTION), AttentionPruneTool(keep=0.5)

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.weights)

    x = tf.constant(TOKENS)
    with amanda.apply(tool):
        wanted, found = gradients(x), tf.function(gradients, autograph=False)(x)
    assert tool.result.rows()[1][6] > 0
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_keras_model_is_pruned_as_it_is_in_every_call_of_it() -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    tokens = layers.Input((12,))
    x = layers.Embedding(20, 8)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(8, "relu")(x))
    model = keras.Model(tokens, layers.Dense(3)(x[:, 0]))
    model.compile("sgd", "mse")
    data, tool = np.arange(48).reshape(4, 12) % 19, AttentionPruneTool(keep=0.5)
    dropped = []
    with amanda.apply(tool):
        eager = model(data).numpy()
        for call in (
            lambda: model(data),
            lambda: np.testing.assert_allclose(model.predict(data, verbose=0), eager, rtol=1e-4, atol=1e-5),
            lambda: model.fit(data, np.ones((4, 3)), verbose=0),
        ):
            tool.clear()
            call()
            dropped.append([round(row[6], 6) for row in tool.result.rows()])
    assert dropped == [[0, 0.5]] * 3
