"""Models of Flax and Equinox in small, each with an example of what it is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    """Two convolutions with normalisation, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(outputs, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(outputs, rngs=rngs)
        self.shortcut = nnx.Conv(inputs, outputs, (1, 1), strides=stride, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + self.shortcut(x))


class ResNet(nnx.Module):
    """A residual network of two blocks (He et al. 2016)."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(8, 8, 1, rngs), Block(8, 16, 2, rngs)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.stem(x)), (2, 2), (2, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Layer(nnx.Module):
    """Attention and a perceptron; normalised behind them as in BERT, or before them as in GPT-2."""

    def __init__(self, causal: bool, rngs: nnx.Rngs) -> None:
        self.causal = causal
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        if self.causal:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(nnx.gelu(self.up(x))))


class Transformer(nnx.Module):
    """Two layers between an embedding of tokens and scores: of one class of 16, or of each next token."""

    def __init__(self, causal: bool) -> None:
        rngs = nnx.Rngs(0)
        self.causal = causal
        self.tokens, self.places = nnx.Embed(16, 16, rngs=rngs), nnx.Embed(8, 16, rngs=rngs)
        self.layers = nnx.List([Layer(causal, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x if self.causal else x[:, 0])


def shared(module: Any, x: Any, axis: int = 0) -> Any:
    """Map a module over rows, which share its weights."""
    return jax.vmap(module, axis, axis)(x)


def with_weights_by_row(module: Any, x: Any, axis: int = 0) -> Any:
    """Map a module over rows, each of which has weights for itself."""
    weights, static = eqx.partition(module, eqx.is_inexact_array)
    return jax.vmap(lambda row_weights, row: eqx.combine(row_weights, static)(row), (0, axis), axis)(
        weights, x
    )


def widened(module: Any, size: int) -> Any:
    """Return a module of which each row has the weights for itself, and gradients of its own."""
    return jax.tree_util.tree_map(
        lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)) if eqx.is_inexact_array(leaf) else leaf,
        module,
    )


class Mixer(eqx.Module):
    """Perceptrons over patches and over channels by turns (Tolstikhin et al. 2021)."""

    patches: eqx.nn.Conv2d
    blocks: list[tuple[eqx.nn.MLP, eqx.nn.MLP]]
    head: eqx.nn.Linear
    mapped: Callable[..., Any] = eqx.field(static=True)

    def __init__(self, mapped: Callable[..., Any] = shared) -> None:
        self.mapped = mapped
        keys = iter(jax.random.split(jax.random.key(0), 8))
        self.patches = eqx.nn.Conv2d(3, 8, 4, stride=4, key=next(keys))
        self.blocks = [
            (
                eqx.nn.MLP(4, 4, 16, 1, jax.nn.gelu, key=next(keys)),
                eqx.nn.MLP(8, 8, 16, 1, jax.nn.gelu, key=next(keys)),
            )
            for _ in range(2)
        ]
        self.head = eqx.nn.Linear(8, 4, key=next(keys))

    def __call__(self, image: Any) -> Any:
        x = self.patches(image).reshape(8, 4)
        for over_patches, over_channels in self.blocks:
            x = x + self.mapped(over_patches, x)
            x = x + self.mapped(over_channels, x, 1)
        return self.head(x.mean(1))


IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 16, (4, 8))
CLASSES = np.array([0, 1, 2, 3])

MODELS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "resnet": (ResNet, IMAGES, CLASSES),
    "bert": (lambda: Transformer(causal=False), TOKENS, CLASSES),
    "gpt": (lambda: Transformer(causal=True), TOKENS, TOKENS),
}
"""Makes a model; its inputs; classes of its outputs."""


def classified(model: Any, x: Any, y: Any) -> Any:
    """Return the cross entropy of a model's classes."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def trained(
    make: Callable[[], Any], x: Any, y: Any, steps: int = 2, start: Callable[[], Any] = nullcontext
) -> tuple[list[Any], Any]:
    """Return loss and gradients of each step of optax under jit, and the model of Flax.

    start: makes the context in which the model is made.
    """
    with start():
        model = make()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(classified)(model, x, y)
        optimizer.update(model, gradients)
        return loss, gradients

    return [jax.tree_util.tree_leaves(step(model, optimizer, x)) for _ in range(steps)], model


def trained_mixer(
    steps: int = 2, start: Callable[[], Any] = nullcontext, mapped: Callable[..., Any] = shared
) -> tuple[list[Any], Any]:
    """Return loss and gradients of each step of optax under Equinox' jit, and the mixer.

    start: makes the context in which the model is made.  mapped: `shared` or `with_weights_by_row`.
    """
    with start():
        model = Mixer(mapped)
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    def scores(model: Any, x: Any) -> Any:
        if mapped is with_weights_by_row:
            blocks = [(widened(tokens, 8), widened(channels, 4)) for tokens, channels in model.blocks]
            model = widened(eqx.tree_at(lambda model: model.blocks, model, blocks), len(x))
        return mapped(model, x)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any) -> Any:
        loss_and_gradients = eqx.filter_value_and_grad(
            lambda model: classified(partial(scores, model), x, CLASSES)
        )(model)
        updates, state = optimizer.update(loss_and_gradients[1], state)
        return loss_and_gradients, eqx.apply_updates(model, updates), state

    records = []
    for _ in range(steps):
        loss_and_gradients, model, state = step(model, state, IMAGES.transpose(0, 3, 1, 2))
        records.append(jax.tree_util.tree_leaves(loss_and_gradients))
    return records, model


TRAINED: dict[str, Callable[..., tuple[list[Any], Any]]] = {
    **{name: partial(trained, *arguments) for name, arguments in MODELS.items()},
    "mixer": trained_mixer,
}
"""Trains a model for some steps."""
