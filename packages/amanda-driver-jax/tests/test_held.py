"""Values that traceable routines read of their tools, in jitted functions, whose programs follow changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import GraphDriverTests, GraphSample, attached

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
WEIGHT = np.array([2.0, -1.0, 0.5], np.float32)


class Values(GraphSample):
    """tanh(x) * weight; the values are what tanh gives.

    traced: how often the function was traced.
    """

    op: ClassVar = "tanh"

    def __init__(self) -> None:
        self.traced = 0
        self.run = jax.jit(self.counted)

    def counted(self, x: Any) -> Any:
        """Compute, and count that it is traced."""
        self.traced += 1
        return self.computed(x)

    def computed(self, x: Any) -> Any:
        """Return what the program computes."""
        return jnp.tanh(x) * WEIGHT

    def check_scaled(self, scale: float) -> None:
        close(self.run(X), np.tanh(X) * WEIGHT * np.float32(scale))

    def tensor(self, number: float) -> Any:
        return jnp.full(3, number, jnp.float32)

    def copy_count(self) -> int:
        return self.traced


class Weights(Values):
    """The same; the values are the weights that the product reads."""

    op: ClassVar = "mul"

    def insert(self, context: amanda.OpContext, routine: Callable[..., Any]) -> None:
        context.insert_before_op(routine, inputs=[1])


class Body(Values):
    """tanh, three times, in the body of a loop."""

    def computed(self, x: Any) -> Any:
        return lax.scan(lambda carry, _: (jnp.tanh(carry), None), x, None, length=3)[0]

    def check_scaled(self, scale: float) -> None:
        value = X
        for _ in range(3):
            value = np.tanh(value) * np.float32(scale)
        close(self.run(X), value)


class Gradients(Values):
    """The gradients of tanh(x) * weight; the values are those of the forward pass, in the loss."""

    def __init__(self) -> None:
        self.traced = 0
        self.run = jax.jit(jax.value_and_grad(lambda x: self.counted(x).sum()))

    def check_scaled(self, scale: float) -> None:
        value, gradients = self.run(X)
        close(value, (np.tanh(X) * WEIGHT * np.float32(scale)).sum())
        close(gradients, (1 - np.tanh(X) ** 2) * WEIGHT)


def close(values: Any, expected: Any) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


class TestGraphDriver(GraphDriverTests):
    """Programs of jitted functions."""

    @pytest.fixture(params=[Values, Weights, Body, Gradients])
    def sample(self, request: pytest.FixtureRequest) -> Iterator[GraphSample]:
        with attached(JaxDriver):
            yield request.param()
