"""A model of PyTorch against its twin of Keras: no divergence, and a planted bug at its layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import Tensor, nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.diff import diff
from amanda.tools.dump import DumpTool

layers = keras.layers


def numpy(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding="same")
        self.norm = nn.BatchNorm2d(6, eps=1e-3)
        self.spatial = nn.Conv2d(6, 6, 3, groups=6, padding="same", bias=False)
        self.point = nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.point(self.spatial(x)).relu()
        return self.head(x.mean((2, 3)))


class Twin(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.entry = layers.Conv2D(6, 3, padding="same", name="entry")
        self.normed = layers.BatchNormalization()
        self.depthwise = layers.DepthwiseConv2D(3, padding="same", use_bias=False)
        self.pointwise = layers.Conv2D(8, 1, activation="relu", name="pointwise")
        self.classes = layers.Dense(5, name="classes")

    def call(self, x: Any, training: bool = False) -> Any:
        x = keras.ops.relu(self.normed(self.entry(x), training=training))
        return self.classes(keras.ops.mean(self.pointwise(self.depthwise(x)), (1, 2)))


NAMES = {
    "stem": "entry", "norm": "normed", "spatial": "depthwise", "point": "pointwise", "head": "classes",
}  # fmt: skip


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def networks(images: Tensor) -> tuple[Network, Twin]:
    torch.manual_seed(0)
    network, twin = Network().eval(), Twin()
    network.norm.running_mean.normal_()
    network.norm.running_var.uniform_(0.5, 2.0)
    twin(numpy(images.permute(0, 2, 3, 1)))
    twin.entry.set_weights([numpy(network.stem.weight.permute(2, 3, 1, 0)), numpy(network.stem.bias)])
    norm = network.norm
    twin.normed.set_weights([numpy(x) for x in (norm.weight, norm.bias, norm.running_mean, norm.running_var)])
    twin.depthwise.set_weights([numpy(network.spatial.weight.permute(2, 3, 0, 1))])
    twin.pointwise.set_weights([numpy(network.point.weight.permute(2, 3, 1, 0)), numpy(network.point.bias)])
    twin.classes.set_weights([numpy(network.head.weight.t()), numpy(network.head.bias)])
    return network, twin


def of_torch(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def program() -> None:
        made = model(x)
        (made * torch.linspace(-1, 1, made.shape[-1])).sum().backward()

    return program


def of_keras(model: keras.Model, x: Any) -> Callable[[], None]:
    def program() -> None:
        with tf.GradientTape() as tape:
            made = model(x)
            loss = tf.reduce_sum(made * tf.linspace(-1.0, 1.0, made.shape[-1]))
        tape.gradient(loss, model.trainable_variables)

    return program


@pytest.mark.parametrize("mapping", [NAMES, None], ids=["mapped", "in order"])
def test_twins_with_the_same_weights_diverge_nowhere(networks: Any, images: Tensor, mapping: Any) -> None:
    network, twin = networks
    nhwc = numpy(images.permute(0, 2, 3, 1))
    result = diff(of_torch(network, images), of_keras(twin, nhwc), mapping=mapping)
    assert not result, str(result)
    assert {"stem", "spatial", "point", "head"} <= set(result.modules)
    forward = [one for one in result.comparisons if one.phase == "forward"]
    assert [one.weight for one in forward if one.module == "stem"] == [0.0]
    backward = {one.module for one in result.comparisons if one.phase == "backward"}
    assert {"stem", "spatial", "point", "head"} <= backward
    assert "outputs of modules and gradients of weights compared" in str(result)


def test_a_function_of_tensorflow_is_compared_too(networks: Any, images: Tensor) -> None:
    network, twin = networks
    nhwc = numpy(images.permute(0, 2, 3, 1))
    call = tf.function(lambda x: twin(x), autograph=False)
    names = {name: NAMES[name] for name in ("stem", "point", "head")}  # the layers' own, which scopes have
    assert not diff(lambda: network(images), lambda: call(nhwc), mapping=names)
    twin.pointwise.bias.assign_add(np.full(8, 0.1))
    first = diff(lambda: network(images), lambda: call(nhwc), mapping=names).first
    assert first is not None
    assert first.module == "point"


def test_eager_mode_and_a_function_are_compared_by_module(networks: Any, images: Tensor) -> None:
    twin, x = networks[1], numpy(images.permute(0, 2, 3, 1))
    call = tf.function(lambda x: twin(x), autograph=False)
    result = diff(lambda: twin(x), lambda: call(x))
    assert not result
    assert {"entry", "pointwise", "classes"} <= set(result.modules)
    assert str(result).splitlines()[1] == (
        'Modules were compared, not ops: a ran as tensorflow, b as tensorflow/graph; by="op" compares ops.'
    )


@pytest.mark.parametrize(
    ("layer", "spoil"),
    [
        ("stem", lambda twin: twin.entry.kernel.assign(tf.reverse(twin.entry.kernel, [0]))),
        ("norm", lambda twin: setattr(twin.normed, "epsilon", 0.1)),
        ("spatial", lambda twin: twin.depthwise.kernel.assign(twin.depthwise.kernel * 1.01)),
        ("head", lambda twin: twin.classes.bias.assign_add(np.full(5, 0.01))),
    ],
)
def test_a_planted_bug_is_found_at_its_layer(networks: Any, images: Tensor, layer: str, spoil: Any) -> None:
    network, twin = networks
    spoil(twin)
    nhwc = numpy(images.permute(0, 2, 3, 1))
    first = diff(of_torch(network, images), of_keras(twin, nhwc), mapping=NAMES).first
    assert first is not None
    assert (first.phase, first.module, first.other_module) == ("forward", layer, NAMES[layer])
    assert first.source.startswith(f"{__file__}:")


def test_either_framework_may_come_first(networks: Any, images: Tensor, tmp_path: Path) -> None:
    network, twin = networks
    nhwc, folders = numpy(images.permute(0, 2, 3, 1)), []
    for program in (of_keras(twin, nhwc), of_torch(network, images)):
        tool = DumpTool(tmp_path / str(len(folders)), outputs="full", weights="full", gradients="full")
        with amanda.apply(tool):
            program()
        folders.append(tool.result.folder)
    assert not diff(*folders, mapping={name: other for other, name in NAMES.items()})


def test_a_module_that_ran_nothing_is_told(networks: Any, images: Tensor) -> None:
    network, twin = networks
    nhwc = numpy(images.permute(0, 2, 3, 1))
    with pytest.raises(
        AmandaError, match=r"module 'entri' of the mapping executed nothing in .*; did you mean 'entry'"
    ):
        diff(lambda: network(images), lambda: twin(nhwc), mapping={"stem": "entri"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.output = nn.Linear(16, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16, eps=1e-3), nn.LayerNorm(16, eps=1e-3)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (4, 4)).transpose(1, 2) for one in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.output(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


class TwinBlock(keras.Model):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.q, self.k, self.v = (layers.Dense(16) for _ in range(3))
        self.o = layers.Dense(16)
        self.n1, self.n2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.up, self.down = layers.Dense(32, activation=keras.activations.gelu), layers.Dense(16)
        self.scale = scale

    def call(self, x: Any) -> Any:
        q, k, v = (
            tf.transpose(tf.reshape(one(x), (*x.shape[:-1], 4, 4)), (0, 2, 1, 3))
            for one in (self.q, self.k, self.v)
        )
        attended = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * self.scale), v)
        x = self.n1(x + self.o(tf.reshape(tf.transpose(attended, (0, 2, 1, 3)), x.shape)))
        return self.n2(x + self.down(self.up(x)))


BLOCK_NAMES = {
    "query": "q", "key": "k", "value": "v", "output": "o", "norm1": "n1", "up": "up", "down": "down",
    "norm2": "n2",
}  # fmt: skip


@pytest.mark.parametrize("mapping", [BLOCK_NAMES, None], ids=["mapped", "in order"])
def test_a_transformer_block_and_its_twin(mapping: Any) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 7, 16)

    def twin(scale: float) -> TwinBlock:
        made = TwinBlock(scale)
        made(numpy(x))
        for name, other in BLOCK_NAMES.items():
            weights = [numpy(weight.t()) for weight in getattr(block, name).parameters()]
            getattr(made, other).set_weights(weights)
        return made

    result = diff(of_torch(block, x), of_keras(twin(0.5), numpy(x)), mapping=mapping)
    assert not result, str(result)
    assert {"query", "output", "up", "down"} <= set(result.modules)
    first = diff(of_torch(block, x), of_keras(twin(1.0), numpy(x)), mapping=mapping).first
    assert first is not None
    assert (first.module, first.other_module) == ("output", "o")  # the first layer behind the attention
