"""Transformers of Flax whose layers are scanned over: bits, NaN at its op, masks and scales by layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import amanda
from amanda.tools.nan import NanTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool

pytestmark = pytest.mark.usefixtures("attached_driver")

LAYERS, HEADS, SIZE = 3, 2, 8
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 5))
PROJECTIONS = ("query", "key", "value", "out", "up", "down")


def attend(query: Any, key: Any, value: Any) -> Any:
    heads = (projected.reshape(*projected.shape[:-1], HEADS, -1) for projected in (query, key, value))
    query, key, value = heads
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(*query.shape[:2], -1)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        dense = {name: nn.Dense(SIZE * (2 if name == "up" else 1), name=name) for name in PROJECTIONS}
        h = nn.LayerNorm()(x)
        x = x + dense["out"](attend(dense["query"](h), dense["key"](h), dense["value"](h)))
        return x + dense["down"](nn.gelu(dense["up"](nn.LayerNorm()(x)))), None


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(16, SIZE)(tokens)
        layers = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(16, name="head")(x)


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        for name in PROJECTIONS:
            inputs, outputs = SIZE * (1 + (name == "down")), SIZE * (1 + (name == "up"))
            setattr(self, name, nnx.Linear(inputs, outputs, rngs=rngs))
        self.norm1, self.norm2 = nnx.LayerNorm(SIZE, rngs=rngs), nnx.LayerNorm(SIZE, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.norm1(x)
        x = x + self.out(attend(self.query(h), self.key(h), self.value(h)))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxTransformer(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(16, SIZE, rngs=rngs), nnx.Linear(SIZE, 16, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxLayer))(rngs)

    def __call__(self, tokens: Any) -> Any:
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(self.embed(tokens), self.layers))


def linen() -> tuple[Callable[[Any], Any], Any]:
    """Return the loss under jit, and the parameters."""
    model = LinenTransformer()
    params = model.init(jax.random.key(0), TOKENS)
    return jax.jit(lambda params: loss(model.apply(params, TOKENS))), params


def nnx_() -> tuple[Callable[[Any], Any], Any]:
    return nnx.jit(lambda model: loss(model(TOKENS))), NnxTransformer()


def loss(scores: Any) -> Any:
    return -jax.nn.log_softmax(scores)[..., 0].mean()


def kernels(params: Any) -> dict[str, Any]:
    """Return copies of the stacks of kernels of the layers, by projection."""
    if isinstance(params, nnx.Module):
        return {name: np.array(getattr(params.layers, name).kernel[...]) for name in PROJECTIONS}
    return {name: np.array(params["params"]["layers"][name]["kernel"]) for name in PROJECTIONS}


def gradients(name: str) -> tuple[Callable[[Any], Any], Any]:
    run, params = MODELS[name]()
    grad = nnx.grad if name == "nnx" else jax.grad
    return (nnx.jit if name == "nnx" else jax.jit)(lambda params: (run(params), grad(run)(params))), params


MODELS: dict[str, Callable[[], tuple[Callable[[Any], Any], Any]]] = {"linen": linen, "nnx": nnx_}


def tool_with(routine: Callable[..., Any] | None) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_after_op(routine) if routine else context.get_inputs()
    )
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(routine) if routine else context.get_grad_outputs(),
        backward=True,
    )
    return tool


@amanda.traceable
def equal(*values: Any) -> Any:
    copies = [jnp.where(True, value, value) if isinstance(value, jax.Array) else value for value in values]
    return copies if len(copies) != 1 else copies[0]


def copied(*values: Any) -> Any:
    copies = [value.copy() if isinstance(value, np.ndarray) else value for value in values]
    return copies if len(copies) != 1 else copies[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_as_without_a_tool(name: str) -> None:
    run, params = gradients(name)
    bare = [np.asarray(leaf) for leaf in jax.tree.leaves(run(params))]
    for routine, tolerance in ((None, 0), (equal, 0), (copied, 1e-5)):  # callbacks keep XLA from fusing
        with amanda.apply(tool_with(routine)) as scope:
            values = jax.tree.leaves(run(params))
        for value, expected in zip(values, bare, strict=True):
            np.testing.assert_allclose(
                value, expected, rtol=tolerance, atol=tolerance / 10, err_msg=str(routine)
            )
        assert not list(scope.report)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_nan_of_one_layer_is_found_at_its_op(name: str) -> None:
    run, params = MODELS[name]()
    tool, plant, layers = NanTool(), amanda.Tool(), count()

    def planted(value: Any) -> Any:
        return value * np.float32("nan") if next(layers) == 1 else None

    def insert(context: amanda.OpContext) -> None:
        if context.get_op_type() == "rsqrt" and context.get_scope().endswith(
            "1"
        ):  # the second norm of a layer
            context.insert_after_op(planted)

    plant.add_inst_for_op(insert)
    with amanda.apply(plant, tool):
        run(params)
    first = tool.result.findings[0]
    assert (first.type, next(layers)) == ("rsqrt", LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_pruned_and_finalized_each_for_itself(name: str) -> None:
    run, params = MODELS[name]()
    before, tool, stats = (
        kernels(params),
        PruneTool(sparsity=0.5),
        StatsTool(activations=False, gradients=False),
    )
    with amanda.apply(tool, stats):
        value = run(params)
    finalized = tool.finalize(params).model
    for projection, stack in kernels(finalized).items():
        for i, (slice_weight, weight) in enumerate(zip(stack, before[projection], strict=True)):
            np.testing.assert_array_equal(slice_weight, weight * (np.abs(weight) > np.median(np.abs(weight))))
            assert any(entry.path.endswith(f"{projection}.kernel[{i}]") for entry in tool.weights)
    np.testing.assert_allclose(value, run(finalized), rtol=1e-5)
    assert {entry.tensor for entry in stats.result} >= {f"weight [{i}]" for i in range(LAYERS)}


def with_kernels(params: Any, change: Callable[[Any], Any]) -> Any:
    """Return a model with other kernels, each layer's changed by itself."""

    def changed(path: Any, leaf: Any) -> Any:
        if "kernel" not in jax.tree_util.keystr(path):
            return leaf
        return jnp.stack(list(map(change, leaf))) if leaf.ndim == 3 else change(leaf)

    if not isinstance(params, nnx.Module):
        return jax.tree_util.tree_map_with_path(changed, params)
    graph, state = nnx.split(params)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(changed, state))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_quantised_each_for_itself(name: str) -> None:
    run, params = MODELS[name]()
    tool = QuantizeTool(method="static", per_channel=False, activation_bits=None, weight_bits=4)
    with amanda.apply(tool), tool.calibrating():
        bare = run(params)
    with amanda.apply(tool):
        value = run(params)

    def rounded(kernel: Any) -> Any:
        scale = jnp.abs(kernel).max() / 7.5
        return jnp.clip(jnp.round(kernel / scale), -8, 7) * scale

    assert abs(value - bare) > 1e-4
    np.testing.assert_allclose(value, run(with_kernels(params, rounded)), rtol=1e-5)
