"""Weights that are slices of one array: of layers that are scanned over, of models that are mapped over."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool

STACK = np.random.default_rng(0).normal(size=(3, 6, 6)).astype(np.float32)
X = jnp.ones((2, 6))


def half(weight: Any) -> Any:
    return weight * (np.abs(weight) > np.median(np.abs(weight)))


PRUNED = np.stack([half(matrix) for matrix in STACK])


def scanned(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer["kernel"]), None), x, params["layers"])[0]


def mapped(params: Any, x: Any) -> Any:
    return jax.vmap(lambda layer, x: jnp.tanh(x @ layer["kernel"]), (0, None))(params["layers"], x)


def scanned_under_vmap(params: Any, x: Any) -> Any:
    return jax.vmap(scanned, (None, 0))(params, x[:, None])[:, 0]


def scanned_backwards(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["kernel"]), h), x, params["layers"], reverse=True)


def total(values: Any) -> Any:
    return sum(leaf.sum() for leaf in jax.tree.leaves(values))


def params_of(stack: Any) -> Any:
    return {"layers": {"kernel": jnp.asarray(stack)}}


@pytest.mark.parametrize("net", [scanned, mapped, scanned_under_vmap, scanned_backwards])
def test_each_slice_has_a_mask(net: Callable[..., Any]) -> None:
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        value = jax.jit(net)(params_of(STACK), X)
    expected = jax.jit(net)(params_of(PRUNED), X)
    for leaf, expected_value in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_value, rtol=1e-5)
    assert [weight.path.rpartition(".")[2] for weight in tool.weights] == [f"kernel[{i}]" for i in range(3)]


def test_stack_of_stacks_has_a_mask_for_each_slice() -> None:
    def net(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, layer: (scanned(layer, h), None), x, params)[0]

    tool, both = PruneTool(sparsity=0.5), {"layers": {"kernel": jnp.stack([STACK, STACK[::-1]])}}
    with amanda.apply(tool):
        value = jax.jit(net)(both, X)
    pruned = {"layers": {"kernel": jnp.stack([PRUNED, PRUNED[::-1]])}}
    np.testing.assert_allclose(value, jax.jit(net)(pruned, X), rtol=1e-5)
    assert len(list(tool.weights)) == 6
    np.testing.assert_array_equal(tool.finalize(both).model["layers"]["kernel"], pruned["layers"]["kernel"])


@pytest.mark.parametrize("net", [scanned, mapped])
def test_gradients_of_each_slice_are_masked(net: Callable[..., Any]) -> None:
    tool = PruneTool(sparsity=0.5)
    step = jax.jit(jax.grad(lambda params: (net(params, X) ** 2).sum()))
    with amanda.apply(tool):
        gradient = step(params_of(STACK))["layers"]["kernel"]
    expected = step(params_of(PRUNED))["layers"]["kernel"] * (PRUNED != 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)  # of 1 - tanh ** 2


def test_finalize_writes_each_slice() -> None:
    tool, params = PruneTool(sparsity=0.5), params_of(STACK)
    with amanda.apply(tool):
        jax.jit(scanned)(params, X)
    np.testing.assert_array_equal(tool.finalize(params).model["layers"]["kernel"], PRUNED)


def test_masks_of_slices_are_saved_and_loaded() -> None:
    tool, loading = PruneTool(sparsity=0.5), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        value = jax.jit(scanned)(params_of(STACK), X)
    loading.load_state_dict(tool.state_dict())
    with amanda.apply(loading):
        np.testing.assert_array_equal(jax.jit(scanned)(params_of(STACK), X), value)


def test_each_slice_has_scales() -> None:
    scaled = STACK * np.array([1, 10, 100], np.float32)[:, None, None] / 100
    tool = QuantizeTool(method="dynamic", per_channel=False, activation_bits=None)
    with amanda.apply(tool):
        value = jax.jit(scanned)(params_of(scaled), X)
    h = X
    for weight in scaled:
        single = QuantizeTool(method="dynamic", per_channel=False, activation_bits=None)
        with amanda.apply(single):
            h = jax.jit(lambda params, h: jnp.tanh(h @ params["kernel"]))({"kernel": jnp.asarray(weight)}, h)
    np.testing.assert_allclose(value, h, rtol=1e-5)


def test_each_slice_has_scales_of_a_calibration() -> None:
    params = params_of(STACK * np.array([1, 10, 100], np.float32)[:, None, None] / 100)
    tool = QuantizeTool(method="static", per_channel=False)
    with amanda.apply(tool), tool.calibrating():
        bare = jax.jit(scanned)(params, X)
    with amanda.apply(tool):
        value = jax.jit(scanned)(params, X)
    h = exact = X
    for weight in np.asarray(params["layers"]["kernel"]):
        single, layer = QuantizeTool(method="static", per_channel=False), {"kernel": jnp.asarray(weight)}
        step = jax.jit(lambda params, h: jnp.tanh(h @ params["kernel"]))
        with amanda.apply(single), single.calibrating():
            exact = step(layer, exact)
        with amanda.apply(single):
            h = step(layer, h)
    assert not np.array_equal(value, bare)
    np.testing.assert_allclose(value, h, rtol=1e-5)


@pytest.mark.parametrize("net", [scanned, mapped, scanned_backwards])
def test_each_slice_has_statistics(net: Callable[..., Any]) -> None:
    scaled = params_of(STACK * np.array([1, 10, 100], np.float32)[:, None, None] / 100)
    tool = StatsTool(every=2)
    with amanda.apply(tool):
        for _ in range(3):
            _, gradient = jax.jit(jax.value_and_grad(lambda params: total(net(params, X))))(scaled)
    rows = {row.tensor: row for row in tool.result.measured if row.type in ("linear", "linear_backward")}
    for i in range(3):
        for tensor, stack in ((f"weight [{i}]", scaled), (f"weight gradient [{i}]", gradient)):
            array = np.asarray(stack["layers"]["kernel"][i])
            statistics = rows[tensor].statistics
            assert (rows[tensor].executions, statistics.elements) == (2, 72)
            np.testing.assert_allclose(
                (statistics.least, statistics.most), (array.min(), array.max()), rtol=1e-5
            )
        assert f"output 0 [{i}]" in rows


def test_stacks_without_a_name_are_told() -> None:
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), X, jnp.asarray(STACK))
    assert "None of the products that were met reads a parameter that a model holds." in tool.result.notes()


class Layer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(jax.vmap(self.linear)(x))


class Scanned(eqx.Module):
    layers: Layer

    def __call__(self, x: Any) -> Any:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda h, layer: (eqx.combine(layer, static)(h), None), x, arrays)[0]


@pytest.mark.parametrize("wrap", [lambda function: function, eqx.filter_jit])
def test_layers_of_equinox_are_pruned_and_finalized_by_slice(wrap: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    model = Scanned(eqx.filter_vmap(lambda key: Layer(eqx.nn.Linear(6, 6, key=key)))(keys))
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        value = wrap(model)(X)
    finalized = tool.finalize(model).model
    np.testing.assert_array_equal(
        finalized.layers.linear.weight,
        np.stack([half(np.asarray(weight)) for weight in model.layers.linear.weight]),
    )
    np.testing.assert_allclose(value, wrap(finalized)(X), rtol=1e-5)


@pytest.mark.parametrize("kind", ["vmap", "scan"])
def test_modules_of_nnx_are_pruned_and_finalized_by_slice(kind: str) -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def models(rngs: Any) -> Any:
        return nnx.Linear(6, 6, rngs=rngs)

    @nnx.jit
    def run(model: Any, x: Any) -> Any:
        if kind == "vmap":
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(model, x)
        return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, model
        )

    model, tool = models(nnx.Rngs(0)), PruneTool(sparsity=0.5)
    expected = np.stack([half(np.asarray(kernel)) for kernel in model.kernel[...]])
    with amanda.apply(tool):
        value = run(model, X)
    tool.finalize(model)
    np.testing.assert_array_equal(model.kernel[...], expected)
    np.testing.assert_allclose(value, run(model, X), rtol=1e-5)


def test_sequence_that_is_scanned_is_no_weight() -> None:
    tool = PruneTool(sparsity=0.5)
    weight, sequence = jnp.asarray(STACK[0]), {"x": jnp.ones((4, 2, 6))}

    def net(params: Any, batch: Any) -> Any:
        return jax.lax.scan(
            lambda h, x: (jnp.tanh(x["x"] @ params["w"] + h), None), jnp.zeros((2, 6)), batch
        )[0]

    with amanda.apply(tool):
        jax.jit(net)({"w": weight}, sequence)
    assert [entry.path for entry in tool.weights] == ["params.w"]


scan = jax.lax.scan


def test_scan_that_was_imported_before_has_a_mask_for_each_slice() -> None:
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        net = jax.jit(lambda p: scan(lambda h, w: (jnp.tanh(h @ w["kernel"]), None), X, p["layers"]))
        net(params_of(STACK))
    assert len(list(tool.weights)) == 3


def test_scan_keeps_its_cache_in_a_scope() -> None:
    traced = []

    def body(h: Any, w: Any) -> Any:
        traced.append(1)
        return jnp.tanh(h @ w), None

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.get_inputs())
    with amanda.apply(tool):
        for _ in range(3):
            jax.lax.scan(body, X, jnp.asarray(STACK))
    assert len(traced) == 1
