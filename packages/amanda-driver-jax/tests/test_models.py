"""Models of Flax and Equinox that optax trains under jit: as bare, with every op in its module."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend.core import jaxprs_in_params

import amanda

sys.path.insert(0, str(Path(__file__).parent))
from models import CLASSES, IMAGES, MODELS, TRAINED, Mixer, classified

pytestmark = pytest.mark.usefixtures("attached_driver")

STEPS = 2
COUNTED = ("dot_general", "conv_general_dilated", "gather", "tanh", "rsqrt", "reduce_window_max")
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
    counts: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for inner in jaxprs_in_params(equation.params):
            counts += counted(inner)
    return counts


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


def assert_same(results: Any, bare: Any) -> None:
    for step_values, step_expected in zip(results, bare, strict=True):
        for value, expected in zip(step_values, step_expected, strict=True):
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

    primitives = primitives_of(name)
    for kind in COUNTED[: 2 if name == "mixer" else None]:  # Equinox maps activations over elements
        assert look.forward[kind] == STEPS * primitives[kind], kind
    for kind in ("dot_general", "conv_general_dilated"):
        assert look.backward[kind] == STEPS * primitives[kind]
    assert set(look.weights) == WEIGHTS[name]
    assert all(path.rpartition(".")[0] == module for path, module in look.weights.items())


def test_classes_that_are_made_in_a_scope_have_their_modules() -> None:
    bases = (nnx.Module, eqx.Module, nn.Module)
    before = [(vars(base).get("__init_subclass__"), vars(base).get("__call__")) for base in bases]
    paths: list[str] = []
    tool = amanda.Tool()

    def look(context: Any) -> None:
        if context.get_op_type() == "dot_general":
            variable = next(v for v in map(context.get_variable, (0, 1)) if v is not None)
            paths.append(f"{context.get_scope()}: {context.get_variable_path(variable)}")

    tool.add_inst_for_op(look)
    x, key = jnp.ones((2, 3)), jax.random.key(0)
    with amanda.apply(tool):
        jnp.sin(x)  # the driver is attached by now

        class Flax(nnx.Module):
            def __init__(self) -> None:
                self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

            def __call__(self, x: Any) -> Any:
                return self.layer(x)

        class Equinox(eqx.Module):
            layer: eqx.nn.Linear

            def __call__(self, x: Any) -> Any:
                return self.layer(x)

        class Linen(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                return nn.Dense(3, name="layer")(x)

        linen = Linen()
        with amanda.disabled():
            parameters = linen.init(key, x)
        nnx.jit(lambda model, x: model(x))(Flax(), x)
        eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(Equinox(eqx.nn.Linear(3, 3, key=key)), x)
        jax.jit(linen.apply)(parameters, x)
    assert paths == ["layer: layer.kernel", "layer: layer.weight", "layer: params.layer.kernel"]
    after = [(vars(base).get("__init_subclass__"), vars(base).get("__call__")) for base in bases]
    assert after == before


class Activated(nnx.Module):
    """A layer and an activation, which is a function of JAX under jit."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return jax.nn.sigmoid(self.linear(x))


def test_an_op_has_one_id_in_programs_and_outside_for_each_model() -> None:
    def loss(model: Any, x: Any) -> Any:
        return model(x).sum()

    forms = [loss, nnx.jit(loss), nnx.grad(loss), nnx.jit(nnx.grad(loss)), nnx.grad(nnx.jit(loss))]
    first, model, x = Activated(), Activated(), jnp.ones((2, 3))
    tool, ids_by_type = amanda.Tool(), dict[str, set[int]]()

    def look(context: amanda.OpContext) -> None:
        ids_by_type.setdefault(context.get_op_type(), set()).add(context.get_op_id())

    tool.add_inst_for_op(look)
    with amanda.apply(amanda.Tool()):
        first(x)  # another tool has met it, so programs of this one are of the other model
    with amanda.apply(tool):
        for form in forms:
            form(model, x)
        ids = [ids_by_type[name] for name in ("dot_general", "logistic")]
        assert all(len(op_ids) == 1 for op_ids in ids)
        first(x)
    assert all(len(op_ids) == 2 for op_ids in ids)
