"""Shipped tools on a convolutional network of Flax that optax trains under jit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.prune import PruneTool
from amanda.tools.search import Choice, Search, SearchTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

pytestmark = pytest.mark.usefixtures("attached_driver")

STEPS = 3
X, Y = np.linspace(-1, 1, 4 * 8 * 8).reshape(4, 8, 8, 1).astype(np.float32), np.array([0, 1, 2, 0])


class Network(nnx.Module):
    """A convolution, ReLU and a layer of three classes."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)
        self.linear = nnx.Linear(128, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(nnx.relu(self.conv(x)).reshape(len(x), -1))


def trained(*tools: amanda.Tool, scale: float = 1.0) -> tuple[list[float], Network]:
    """Return the losses of some steps under tools, and the network."""
    model = Network()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(x), Y).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    with amanda.apply(*tools):
        losses = [float(step(model, optimizer, jnp.asarray(X * scale))) for _ in range(STEPS)]
    return losses, model


@pytest.mark.parametrize("make", [FlopsTool, TraceTool, StatsTool, NanTool], ids=lambda item: item.__name__)
def test_training_goes_on_as_without_the_tool(make: Callable[[], amanda.Tool]) -> None:
    plain, _ = trained(amanda.Tool())
    assert np.allclose(trained(make())[0], plain, rtol=1e-5)


def test_macs_are_those_of_the_layers() -> None:
    tool = FlopsTool()
    trained(tool)
    places = [place for place in tool.result.ops if place.type in ("conv2d", "linear")]
    macs = {place.type: place.calls * (place.macs or 0) for place in places}
    assert macs["conv2d"] == STEPS * 4 * 8 * 8 * 2 * 9
    assert macs["linear"] == STEPS * 4 * 128 * 3


def test_statistics_are_of_the_values_of_each_step() -> None:
    tool = StatsTool()
    trained(tool)
    (row,) = [
        candidate for candidate in tool.result.rows() if "conv2d" in candidate and "output 0" in candidate
    ]
    assert STEPS * 4 * 8 * 8 * 2 in row


def test_nan_is_named_where_it_begins() -> None:
    healthy, ill = NanTool(), NanTool()
    trained(healthy)
    trained(ill, scale=float("nan"))
    assert not list(healthy.result.rows())
    assert list(ill.result.rows())


def test_masks_are_in_the_program_of_every_step() -> None:
    weights: list[Any] = []
    tool, watch = PruneTool(sparsity=0.5, type="linear"), amanda.Tool()

    def insert(context: amanda.OpContext) -> None:
        if context.get_op_type() == "dot_general":
            context.insert_before_op(lambda weight: weights.append(np.asarray(weight).copy()), inputs=[1])

    watch.add_inst_for_op(insert)
    trained(tool, watch)
    assert len(weights) == STEPS
    assert all((weight == 0).mean() == pytest.approx(0.5, abs=0.01) for weight in weights)


def test_a_graph_has_the_ops_of_the_program() -> None:
    graphs = []
    for _ in range(3):  # threads of XLA call routines in another order each time
        tool = TraceTool()
        trained(tool)
        graphs.append(sorted((op.type, op.module) for op in tool.result.graph.ops))
    assert graphs[0] == graphs[1] == graphs[2]
    expected = {("conv2d", "conv"), ("relu", ""), ("linear", "linear"), ("linear_backward", "linear")}
    assert expected <= set(graphs[0])
    assert [type for type, _ in graphs[0]].count("conv2d_backward") == 1


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "keep": jax.nn.sigmoid, "relu": jax.nn.relu, "skip": lambda x: x,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}  # fmt: skip


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_architectures_compute_what_their_candidates_do(jit: bool) -> None:
    rngs = nnx.Rngs(0)
    conv, linear = nnx.Conv(1, 2, (3, 3), rngs=rngs), nnx.Linear(2, 3, rngs=rngs)

    def network(x: Any, first: Any = jax.nn.sigmoid, second: Any = jax.nn.sigmoid) -> Any:
        return second(linear(first(conv(x)).mean((1, 2))))

    run = jax.jit(lambda x: network(x)) if jit else lambda x: network(x)
    tool, x = SearchTool([Choice(list(ACTIVATIONS), type="sigmoid")]), jnp.asarray(X)
    tool.prepare(run, x)
    assert list(tool.space.values()) == [tuple(ACTIVATIONS)] * 2
    with amanda.apply(tool) as scope:
        for names in product(ACTIVATIONS, repeat=2):  # more of them than programs follow by themselves
            tool.architecture = dict(zip(tool.space, names, strict=True))
            with amanda.disabled():
                expected = network(x, *(ACTIVATIONS[name] for name in names))
            np.testing.assert_allclose(run(x), expected, rtol=1e-5, atol=1e-6)
        assert list(scope.report) == []
    search = Search(tool, lambda: float(run(x).sum()), "random", metric="sum", progress=False)
    best = search.run(trials=8).best
    with amanda.disabled():
        expected = network(x, *(ACTIVATIONS[name] for name in best.architecture.values()))
    np.testing.assert_allclose(best.metric, expected.sum(), rtol=1e-5)
