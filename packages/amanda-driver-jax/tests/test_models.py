"""Models of Flax and Equinox that optax trains under jit: as bare, with every op in its module."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached

sys.path.insert(0, str(Path(__file__).parent))
from models import CLASSES, IMAGES, MODELS, Mixer, classified, trained, trained_mixer

STEPS = 2
COUNTED = ("dot_general", "conv_general_dilated", "gather", "tanh", "rsqrt", "reduce_window_max")
TRAINED: dict[str, Callable[[], Any]] = {
    **{name: partial(trained, *given) for name, given in MODELS.items()}, "mixer": trained_mixer
}  # fmt: skip

ATTENTION = ("query", "key", "value", "out")
LAYERS = {
    f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down", *(f"attention.{a}" for a in ATTENTION))
}
WEIGHTS = {
    "resnet": {"stem.kernel", "head.kernel"}
    | {f"blocks.{i}.{name}.kernel" for i in (0, 1) for name in ("conv1", "conv2", "shortcut")},
    "bert": {f"{name}.kernel" for name in (*LAYERS, "head")},
    "gpt": {f"{name}.kernel" for name in (*LAYERS, "head")},
    "mixer": {"patches.weight", "head.weight"}
    | {f"blocks.{i}.{j}.layers.{k}.weight" for i in (0, 1) for j in (0, 1) for k in (0, 1)},
}  # fmt: skip
"""Paths of what convolutions and products read as weights."""


@pytest.fixture(autouse=True)
def _attached() -> Iterator[None]:
    with attached(JaxDriver):
        yield


class Looking(amanda.Tool):
    """Looks at what enters each op and each backward op: counts by type, and weights by module."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.weights: dict[str, str] = {}
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_backward, backward=True)

    def look(self, context: Any) -> None:
        name = context.get_op_type()
        if name in ("dot_general", "conv_general_dilated"):
            for index in (0, 1):
                variable = context.get_variable(index)
                if variable is not None:
                    self.weights[context.get_variable_path(variable)] = context.get_scope()
        context.insert_before_op(amanda.observer(lambda *_: self.forward.update([name])))

    def look_backward(self, context: Any) -> None:
        name = context.get_backward_op().__name__.removesuffix("_transpose")
        context.insert_before_backward_op(amanda.observer(lambda *_: self.backward.update([name])))


def counted(jaxpr: Any) -> Counter[str]:
    """Return how often each primitive is in a program, with the programs in it."""
    found: Counter[str] = Counter()
    for one in jaxpr.eqns:
        found[one.primitive.name] += 1
        for inner in jaxprs_in_params(one.params):
            found += counted(inner)
    return found


def unmapped(images: Any) -> Any:
    """Return the mixer's loss, computed row by row: an op that is mapped over is executed for each."""
    model, scores = Mixer(), []
    for image in images:
        x = model.patches(image).reshape(8, 4)
        for over_patches, over_channels in model.blocks:
            x = x + jnp.stack([over_patches(row) for row in x])
            x = x + jnp.stack([over_channels(row) for row in x.T]).T
        scores.append(model.head(x.mean(1)))
    return classified(jnp.stack, scores, CLASSES)


def primitives_of(name: str) -> Counter[str]:
    """Return how often JAX's own trace of a model's loss has each primitive."""
    if name == "mixer":
        program: Any = jax.make_jaxpr(unmapped)(IMAGES.transpose(0, 3, 1, 2))
    else:
        make, x, y = MODELS[name]
        graph, state = nnx.split(make())
        program = jax.make_jaxpr(lambda state, x: classified(nnx.merge(graph, state), x, y))(state, x)
    return counted(program.jaxpr)


def assert_same(made: Any, bare: Any) -> None:
    for one, other in zip(made, bare, strict=True):
        for value, expected in zip(one, other, strict=True):
            assert np.allclose(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_as_bare_and_every_op_is_seen_in_its_module(name: str) -> None:
    bare, _ = TRAINED[name]()
    with amanda.apply(amanda.Tool()) as idle:
        assert_same(TRAINED[name]()[0], bare)
    look = Looking()
    with amanda.apply(look) as scope:
        assert_same(TRAINED[name]()[0], bare)
    assert not [*idle.report, *scope.report]

    own = primitives_of(name)
    for kind in COUNTED[: 2 if name == "mixer" else None]:  # Equinox maps activations over elements
        assert look.forward[kind] == STEPS * own[kind], kind
    for kind in ("dot_general", "conv_general_dilated"):
        assert look.backward[kind] == STEPS * own[kind]
    assert set(look.weights) == WEIGHTS[name]
    assert all(path.rpartition(".")[0] == module for path, module in look.weights.items())
