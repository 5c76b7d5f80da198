"""A model of PyTorch against the same in Flax, and JAX against JAX, outside of jit and under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from amanda.tools.diff import diff

pytestmark = pytest.mark.usefixtures("attached_driver")

torch = pytest.importorskip("torch")

IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
GIVEN = torch.tensor(IMAGES.transpose(0, 3, 1, 2))
MODES = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.up, self.scaled, self.down = (
            torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        x = self.norm(self.stem(x)).relu().mean((2, 3))
        return self.down(torch.nn.functional.gelu(self.scaled(self.up(x))))


class Twin(nnx.Module):
    def __init__(self, model: Network, activation: Callable[[Any], Any] = jax.nn.relu) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), padding=1, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, epsilon=1e-5, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.scaled = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.activation = activation
        self.stem.kernel[...] = jnp.asarray(model.stem.weight.detach().numpy().transpose(2, 3, 1, 0))
        self.norm.mean[...] = jnp.asarray(model.norm.running_mean.numpy())
        for name in ("up", "down"):
            getattr(self, name).kernel[...] = jnp.asarray(getattr(model, name).weight.detach().numpy().T)
        for name in ("stem", "up", "down"):
            getattr(self, name).bias[...] = jnp.asarray(getattr(model, name).bias.detach().numpy())

    def __call__(self, x: Any) -> Any:
        x = self.activation(self.norm(self.stem(x))).mean((1, 2))
        return self.down(jax.nn.gelu(self.scaled(self.up(x)), approximate=False))


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    model = Network().eval()
    model.norm.running_mean.normal_()
    return model


def of_torch(model: Network) -> Callable[[], None]:
    return lambda: model(GIVEN).square().sum().backward()


def of_jax(twin: Twin, jit: bool) -> Callable[[], Any]:
    gradient = nnx.grad(lambda model, x: (model(x) ** 2).sum())
    call = nnx.jit(gradient) if jit else gradient
    return lambda: call(twin, jnp.asarray(IMAGES))


@MODES
def test_twins_with_the_same_weights_agree(network: Network, jit: bool) -> None:
    result = diff(of_torch(network), of_jax(Twin(network), jit))
    assert not result, result.sentence
    assert set(result.modules) == {"stem", "norm", "up", "scaled", "down"}
    backward = {comparison.module for comparison in result.comparisons if comparison.phase == "backward"}
    assert {"stem", "up", "down"} <= backward


def _epsilon(twin: Twin) -> None:
    twin.scaled.epsilon = 1e-2


def _statistics(twin: Twin) -> None:
    twin.norm.mean[...] = twin.norm.mean[...] + 0.01


def _weight(twin: Twin) -> None:
    twin.up.kernel[...] = twin.up.kernel[...].at[3].multiply(1.01)


@MODES
@pytest.mark.parametrize(("spoil", "module"), [(_epsilon, "scaled"), (_statistics, "norm"), (_weight, "up")])
def test_a_change_is_named_at_its_module(network: Network, spoil: Any, module: str, jit: bool) -> None:
    twin = Twin(network)
    spoil(twin)
    sides = of_torch(network), of_jax(twin, jit)
    first = diff(*sides[:: -1 if jit else 1]).first
    assert first is not None
    assert (first.phase, first.module) == ("forward", module)


@MODES
def test_an_activation_that_differs_is_named_in_two_runs_of_jax(network: Network, jit: bool) -> None:
    called = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    x, leaky = jnp.asarray(IMAGES), Twin(network, lambda x: jax.nn.leaky_relu(x, 0.1))
    assert not diff(Twin(network), lambda images: called(Twin(network), images), x)
    first = diff(Twin(network), lambda images: called(leaky, images), x).first
    assert first is not None
    assert (first.type, first.inputs) == ("relu", True)
