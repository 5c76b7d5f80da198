"""Counting, FLOPs and pruning of one network: the numbers that they tell on the other frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from portable import IMAGES, KERNEL, KERNEL_BIAS, MATRIX, MATRIX_BIAS, assert_numbers, measured

pytestmark = pytest.mark.usefixtures("attached_driver")


class Network(nnx.Module):
    """The network, in Flax."""

    def __init__(self) -> None:
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(64, 3, rngs=nnx.Rngs(0))
        for layer, weight, bias in ((self.conv, KERNEL, KERNEL_BIAS), (self.linear, MATRIX, MATRIX_BIAS)):
            layer.kernel.set_value(jnp.asarray(weight))
            layer.bias.set_value(jnp.asarray(bias))

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.linear(x.reshape(len(x), -1))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_on_jax(jit: bool) -> None:
    model = Network()
    run: Callable[..., Any] = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    assert_numbers(measured(lambda: np.asarray(run(model, jnp.asarray(IMAGES)))))
