"""Architecture search on JAX: mixtures, and candidates with weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amanda
from amanda.tools.search import Choice, SearchError, SearchTool

pytestmark = pytest.mark.usefixtures("attached_driver")

IMAGES = np.random.default_rng(0).random((4, 8, 8, 2)).astype(np.float32)
CHOICES = ["conv2d=keep|conv5|conv1", "sigmoid=keep|relu"]


class Cell(nnx.Module):
    """A convolution and an activation."""

    def __init__(self, **options: Any) -> None:
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0), **options)

    def __call__(self, x: Any) -> Any:
        return jax.nn.sigmoid(self.conv(x))


def prepared(model: Any, x: Any, choices: Any = CHOICES, **options: Any) -> SearchTool:
    tool = SearchTool(choices, **options)
    tool.prepare(model, x)
    return tool


def convolved(x: Any, kernel: Any, **options: Any) -> Any:
    parameters = {"window_strides": (1, 1), "padding": "SAME", **options}
    return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **parameters)


def by_hand(weights: Any, x: Any) -> Any:
    """Return the loss of the cell as Liu et al. 2019 mix it."""
    kernel, bias, wide, point, first, second = weights
    shares = jax.nn.softmax(first)
    x = sum(shares[i] * convolved(x, candidate) for i, candidate in enumerate((kernel, wide, point))) + bias
    shares = jax.nn.softmax(second)
    return ((shares[0] * jax.nn.sigmoid(x) + shares[1] * jax.nn.relu(x)) ** 2).sum()


def loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).sum()


FORMS: dict[str, Callable[[], Any]] = {
    "eager": lambda: nnx.grad(loss),
    "jit of the gradient": lambda: nnx.jit(nnx.grad(loss)),
    "gradient of the jit": lambda: nnx.grad(nnx.jit(loss)),
    "in a scan": lambda: nnx.jit(
        nnx.grad(lambda model, x: jax.lax.scan(lambda a, b: (a + loss(model, b), None), 0.0, x[None])[0])
    ),
    "mapped": lambda: nnx.jit(
        nnx.grad(lambda model, x: jax.vmap(lambda image: loss(model, image[None]))(x).sum())
    ),
    "computed again": lambda: nnx.jit(nnx.grad(nnx.remat(loss))),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_a_cell_by_hand(form: str) -> None:
    model, x = Cell(), jnp.asarray(IMAGES)
    tool = prepared(model, x, mixture=True)
    parameters = [*tool.weights(), *tool.alphas()]
    assert set(parameters) == set(tool.parameters())
    values = [model.conv.kernel[...], model.conv.bias[...], *(parameter.value for parameter in parameters)]
    expected_gradients = jax.grad(by_hand)(values, x)
    gradient = FORMS[form]()
    with amanda.apply(tool) as scope:
        gradients = gradient(model, x)
        conv_gradients = [gradients["conv"]["kernel"][...], gradients["conv"]["bias"][...]]
        for gradient_value, expected in zip(
            [*conv_gradients, *tool.gradients(parameters)], expected_gradients, strict=True
        ):
            np.testing.assert_allclose(gradient_value, expected, rtol=2e-5, atol=2e-5)
        assert tool.gradients(parameters) == [None] * 4
        gradient(model, x)
        gradient(model, x)
        for gradient_value, expected in zip(tool.gradients(parameters), expected_gradients[2:], strict=True):
            np.testing.assert_allclose(gradient_value, 2 * expected, rtol=2e-5, atol=2e-5)
        assert not list(scope.report)
    assert "tool.gradients(parameters)" in tool.result.remarks[-1]


def test_parameters_that_are_assigned_are_read_by_the_same_program() -> None:
    model, x, traced = Cell(), jnp.asarray(IMAGES), []

    @nnx.jit
    def run(model: Any, x: Any) -> Any:
        traced.append(1)
        return loss(model, x)

    tool = prepared(model, x, mixture=True)
    parameters, kernel = [*tool.weights(), *tool.alphas()], [model.conv.kernel[...], model.conv.bias[...]]
    with amanda.apply(tool):
        for seed in range(12):  # more than values that a program follows by itself
            numbers = np.random.default_rng(seed)
            for parameter in parameters:
                parameter.assign(numbers.normal(size=parameter.shape).astype(np.float32))
            with amanda.disabled():
                expected = by_hand([*kernel, *map(np.asarray, parameters)], x)
            np.testing.assert_allclose(run(model, x), expected, rtol=1e-5)
    assert len(traced) == 1
    with pytest.raises(ValueError, match="of shape"):
        parameters[0].assign(np.zeros(3))


def test_a_model_that_is_mapped_hands_over_the_sum_of_its_rows() -> None:
    linear = equinox.nn.Linear(3, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 3))

    @jax.jit
    @jax.grad
    def gradient(linear: Any, x: Any) -> Any:
        return (jax.vmap(lambda row: jax.nn.sigmoid(linear(row)))(x) ** 2).sum()

    tool = SearchTool(["sigmoid=keep|relu"], mixture=True)
    tool.prepare(lambda: gradient(linear, x))
    (alpha,) = tool.alphas()
    tool.gradients([alpha])
    with amanda.apply(tool):
        gradient(linear, x)

    def mixed(alpha: Any) -> Any:
        shares, y = jax.nn.softmax(alpha), jax.vmap(linear)(x)
        return ((shares[0] * jax.nn.sigmoid(y) + shares[1] * jax.nn.relu(y)) ** 2).sum()

    np.testing.assert_allclose(tool.gradients([alpha])[0], jax.grad(mixed)(alpha.value), rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "options", [{}, {"strides": 2}, {"kernel_dilation": 2}, {"feature_group_count": 2}], ids=str
)
def test_convolutions_compute_what_layers_with_their_weights_do(options: Any, jit: bool) -> None:
    model, x = Cell(**options), jnp.asarray(IMAGES)
    tool = prepared(model, x, [Choice(["keep", "conv5", "conv1", "conv3g2"], type="conv2d")])
    run = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    ((_, *labels),) = tool.space.values()
    weights = dict(zip(labels, tool.weights(), strict=True))
    assert set(labels) == {"conv5", "conv3g2", *([] if "strides" in options else ["conv1"])}
    inputs = (x, jnp.asarray(IMAGES[:, :5]))  # padding of a stride differs with the size
    for label in labels:
        tool.architecture = dict.fromkeys(tool.space, label)
        strides_and_dilation = {
            "strides": options.get("strides", 1),
            "kernel_dilation": options.get("kernel_dilation", 1),
        }
        size, groups = np.shape(weights[label])[0], 2 if label == "conv3g2" else 1
        conv = nnx.Conv(
            2, 4, (size, size), rngs=nnx.Rngs(0), feature_group_count=groups, **strides_and_dilation
        )
        conv.kernel.set_value(weights[label].value)
        for values in inputs:
            with amanda.apply(tool) as scope:
                outputs = run(model, values)
            np.testing.assert_allclose(outputs, jax.nn.sigmoid(conv(values)), rtol=1e-5, atol=1e-6)
            assert not list(scope.report)


def test_what_is_traced_has_no_weight_to_start_from() -> None:
    model, x = Cell(), jnp.asarray(IMAGES)
    tool = SearchTool(CHOICES)
    tool.prepare(nnx.jit(lambda model, x: model(x)), model, x)
    assert len(tool.space) == 1
    assert "outside of jit" in str(tool.result)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_bits_have_gradients_that_pass_straight_through(jit: bool) -> None:
    linear, x = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
    tool = prepared(linear, x, ["linear=keep|bits4"])
    tool.architecture = dict.fromkeys(tool.space, "bits4")
    how = nnx.jit if jit else lambda function: function
    with amanda.apply(tool):
        gradient = how(nnx.grad(loss))(linear, x)["kernel"][...]
        outputs = how(lambda model, x: model(x))(linear, x)
    kernel = np.abs(np.asarray(linear.kernel[...]))
    within = kernel < kernel.max(0)  # the largest are half way to the next integer, which is clipped
    expected = 2 * x.T @ outputs  # that of the product, by the rounded weight
    np.testing.assert_allclose(gradient[within], expected[within], rtol=1e-5)


def test_a_mixture_is_learned_on_batches_that_are_held_out() -> None:
    numbers = np.random.default_rng(0)
    images = numbers.random((96, 8, 8, 1)).astype(np.float32)
    labels = numbers.integers(0, 2, 96).astype(np.int32)
    images[labels == 1, :4] += 1
    x, y = jnp.asarray(images), jnp.asarray(labels)

    class Network(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.conv, self.linear = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Linear(16, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = jax.nn.sigmoid(self.conv(x))
            return self.linear(x.reshape(len(x), 2, 4, 2, 4, 4).mean((2, 4)).reshape(len(x), -1))

    model = Network()
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)

    def objective(model: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, gradients = nnx.value_and_grad(objective)(model, x, y)
        optimizer.update(model, gradients)
        return value

    derive = nnx.jit(nnx.value_and_grad(objective))
    tool = prepared(model, x[:1], ["conv2d=keep|conv5|conv1", "sigmoid=keep|relu"], mixture=True)
    weights, alphas = list(tool.weights()), list(tool.alphas())
    before = [np.asarray(value) for value in (*weights, *alphas)]
    trained, validation = slice(64), slice(64, 96)
    states = {}

    def updated(parameters: Any, rate: float) -> None:
        values = [parameter.value for parameter in parameters]
        chain = optax.adam(rate)
        state = states.setdefault(rate, chain.init(values))
        updates, states[rate] = chain.update(tool.gradients(parameters), state, values)
        for parameter, value in zip(parameters, optax.apply_updates(values, updates), strict=True):
            parameter.assign(value)

    with amanda.apply(tool):
        first, _ = derive(model, x[validation], y[validation])
        tool.gradients([*weights, *alphas])
        for _ in range(30):
            step(model, optimizer, x[trained], y[trained])
            updated(weights, 0.02)
            tool.gradients(alphas)
            derive(model, x[validation], y[validation])
            updated(alphas, 0.05)
            tool.gradients(weights)
        last, _ = derive(model, x[validation], y[validation])
    assert float(last) < 0.8 * float(first)
    after = [np.asarray(value) for value in (*weights, *alphas)]
    assert all(
        np.any(first_value != last_value) for first_value, last_value in zip(before, after, strict=True)
    )
    tool.settle()
    with amanda.apply(tool):
        assert float(derive(model, x[validation], y[validation])[0]) < float(first)
    with pytest.raises(SearchError, match="is no parameter; give those of weights"):
        tool.gradients([x])


def test_parameters_are_loaded_into_those_that_an_optimizer_holds() -> None:
    model, x = Cell(), jnp.asarray(IMAGES)
    tool, loading = prepared(model, x, mixture=True), prepared(model, x, mixture=True, seed=1)
    saved = {name: np.asarray(value) for name, value in tool.state_dict().items()}
    alphas = list(loading.alphas())
    loading.load_state_dict(saved)
    loading.prepare(model, x)
    assert all(alpha is loaded for alpha, loaded in zip(alphas, loading.alphas(), strict=True))
    for parameter, loaded in zip(tool.parameters(), loading.parameters(), strict=True):
        np.testing.assert_array_equal(parameter, loaded)


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda: jax.nn.sigmoid(x @ w).sum(), lambda: jnp.tanh(x @ w).sum())


IN_BRANCHES: dict[str, Callable[..., Any]] = {
    "eager": jax.grad(branched),
    "jit of the gradient": jax.jit(jax.grad(branched)),
    "gradient of the jit": jax.grad(jax.jit(branched)),
    "in a scan": jax.grad(
        lambda w, x: jax.lax.scan(lambda a, b: (a + branched(w, b), None), 0.0, x[None])[0]
    ),
}


@pytest.mark.parametrize("form", IN_BRANCHES)
def test_a_branch_that_is_differentiated_has_no_parameters_of_candidates(form: str) -> None:
    w, x, gradient = jnp.full((3, 3), 0.5), jnp.ones((2, 3)), IN_BRANCHES[form]
    tool = SearchTool(["sigmoid=keep|relu"], mixture=True)
    tool.prepare(branched, w, x)
    assert len(tool.space) == 1
    with amanda.apply(tool):
        branched(w, x)  # without a derivative the mixture computes
    with (
        amanda.apply(tool),
        pytest.raises(SearchError, match=r"logistic is in a branch .* jax\.numpy\.where"),
    ):
        gradient(w, x)
    tool = SearchTool(["sigmoid=keep|relu"])
    tool.prepare(branched, w, x)
    tool.architecture = dict.fromkeys(tool.space, "relu")
    with amanda.apply(tool):
        result = gradient(w, x)
    np.testing.assert_allclose(result, jax.grad(lambda w: jax.nn.relu(x @ w).sum())(w))
