"""Bit-identity: training steps of Flax NNX, Equinox and optax under tools that change nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amanda

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, TRAINED, shared, trained_mixer, with_weights_by_row

pytestmark = pytest.mark.usefixtures("attached_driver")

STEPS = 20
X = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
Y = np.arange(8) % 3


class Network(nnx.Module):
    """Convolutions, normalization and layers: what a step of NNX has of nested jitted functions."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.avg_pool(nnx.gelu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
        return self.linear(x.reshape(len(x), -1))


def trained(*tools: amanda.Tool, steps: int = STEPS) -> Any:
    """Return losses, gradients and parameters of a fresh network, trained under tools."""
    model = Network()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    records: list[Any] = []

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(x), Y).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value, gradients

    with amanda.apply(*tools):
        records += [step(model, optimizer, jnp.asarray(X)) for _ in range(steps)]
    return [*records, nnx.state((model, optimizer))]


def bits(tree: Any) -> list[bytes]:
    """Return the bits of each array."""
    leaves = jax.tree_util.tree_leaves(tree)
    return [np.asarray(leaf).tobytes() for leaf in leaves if isinstance(leaf, jax.Array)]


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    return bits(trained())


class Looking(amanda.Tool):
    """Looks at every op, forward and backward, and inserts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.op_types: set[str] = set()
        self.add_inst_for_op(self.look, require_outputs=True)
        self.add_inst_for_op(self.look, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        self.op_types.add(context.get_forward_op_type())
        if context.is_backward():
            self.op_types.add(context.get_backward_op().__name__)


@amanda.traceable
def handed_back(*values: Any) -> Any:
    """Return the values themselves."""
    return list(values)


class Native(amanda.Tool):
    """Puts routines into the program that hand values back, around every op and its backward op."""

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.inserted = 0
        self.add_inst_for_op(self.insert)
        self.add_inst_for_op(self.insert_backward, backward=True)

    def insert(self, context: amanda.OpContext) -> None:
        self.inserted += 1
        context.insert_before_op(handed_back)
        context.insert_after_op(handed_back if self.factor is None else scaled)

    def insert_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(handed_back)


@amanda.traceable
def scaled(*values: Any) -> Any:
    """Return the values, floating ones with their last bit changed."""
    return [
        value * (1 + 2**-20)
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
        else value
        for value in values
    ]


def test_an_empty_tool_leaves_every_bit(plain: list[bytes]) -> None:
    assert bits(trained(amanda.Tool())) == plain


def test_a_tool_that_looks_leaves_every_bit(plain: list[bytes]) -> None:
    tool = Looking()
    assert bits(trained(tool)) == plain
    assert {"conv_general_dilated", "dot_general", "dot_general_transpose", "integer_pow"} <= tool.op_types


def test_routines_in_the_program_that_hand_values_back_leave_every_bit(plain: list[bytes]) -> None:
    tool = Native()
    assert bits(trained(tool)) == plain
    assert tool.inserted > 100


def test_a_routine_that_changes_values_is_seen_in_the_bits(plain: list[bytes]) -> None:
    assert bits(trained(Native(factor=1))) != plain


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_is_trained_to_the_bit(name: str) -> None:
    bare = bits(TRAINED[name](STEPS))
    for tool in (amanda.Tool(), Looking()):
        with amanda.apply(tool) as scope:
            assert bits(TRAINED[name](STEPS)) == bare, type(tool).__name__
        assert not list(scope.report)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_to_the_bit_with_routines_in_its_program(name: str) -> None:
    tool = Native()
    with amanda.apply(tool):
        results = TRAINED[name](STEPS, start=amanda.disabled)
    assert bits(results) == bits(TRAINED[name](STEPS))
    assert tool.inserted > 100


@pytest.mark.slow
def test_routines_under_vmap_leave_every_bit_of_a_program_whose_rows_have_weights_of_their_own() -> None:
    """Each row of a mapped op has gradients for a backward routine, so their sum is taken behind it."""
    shared_weights, own_weights = (
        bits(trained_mixer(STEPS, mapped=mapped)) for mapped in (shared, with_weights_by_row)
    )
    with amanda.apply(Native()):
        results = bits(trained_mixer(STEPS, start=amanda.disabled))
    assert results == own_weights != shared_weights


class Python(amanda.Tool):
    """Hands values back from routines in Python, before every op of a type."""

    def __init__(self, *types: str) -> None:
        super().__init__()
        self.add_inst_for_op(self.insert)
        self.types = types

    def insert(self, context: amanda.OpContext) -> None:
        if context.get_op_type() in self.types:
            context.insert_before_op(lambda *values: list(values))


def distance(tree: Any, expected: Any) -> float:
    """Return the largest difference of two results, by the largest element of each array."""
    pairs = zip(
        map(np.asarray, jax.tree_util.tree_leaves(tree)), jax.tree_util.tree_leaves(expected), strict=True
    )
    floating = [(a, np.asarray(b)) for a, b in pairs if a.dtype == np.float32]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in floating if b.any())


def test_routines_in_python_change_no_more_than_what_is_not_fused_does() -> None:
    bare = trained(steps=1)
    with jax.disable_jit():  # each op alone, without Amanda
        control = distance(trained(steps=1), bare)
    assert 0 < distance(trained(Python("mul", "add", "sub"), steps=1), bare) < 4 * control
