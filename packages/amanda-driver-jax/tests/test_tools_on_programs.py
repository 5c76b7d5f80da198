"""Tools whose subject a compiled program changes: they work on it, or say why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import amanda
from amanda.tools.coverage import CoverageTool
from amanda.tools.flops import FlopsTool
from amanda.tools.profile import ProfileTool
from amanda.tools.remat import RematTool
from amanda.tools.rewrite import Capture, Op, RewriteTool, Rule
from amanda.tools.sweep import SparsitySweep
from amanda.tools.trace import TraceTool

pytestmark = pytest.mark.usefixtures("attached_driver")

IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 2)).astype(np.float32)


class Network(nnx.Module):
    """A convolution, ReLU and a layer of three classes."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.linear = nnx.Linear(256, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(nnx.relu(self.conv(x)).reshape(len(x), -1))


def called(model: Any, x: Any) -> Any:
    return model(x)


MODES = pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])


def runner(jit: bool) -> Callable[[], Any]:
    """Return a function that runs a network."""
    model, run = Network(), nnx.jit(called) if jit else called
    return lambda: run(model, jnp.asarray(IMAGES))


@MODES
def test_a_graph_has_the_weights_and_the_edges_of_the_program(jit: bool) -> None:
    tool, run = TraceTool(backward=False), runner(jit)
    with amanda.apply(tool):
        run()
    ops = {(op.module, op.type): op for op in tool.graph.ops}
    chain = [("conv", "conv2d"), ("conv", "add"), ("", "relu"), ("", "reshape"), ("linear", "linear")]
    for before, after in pairwise(chain):
        assert ops[before].outputs[0] in ops[after].inputs
    parameters = {tensor.name for tensor in tool.graph.tensors if tensor.kind == "parameter"}
    assert parameters == {"conv.kernel", "conv.bias", "linear.kernel", "linear.bias"}


@MODES
def test_a_subgraph_is_replaced(jit: bool) -> None:
    pattern = Op("relu", Op("add", Op("conv2d", Capture("x"), Capture("kernel")), Capture("bias")))

    def replacement(match: Any) -> Any:
        return jax.nn.relu(jax.lax.conv_general_dilated(
            match["x"], match["kernel"] * 2, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ) + match["bias"])  # fmt: skip

    run = runner(jit)
    tool, idle = RewriteTool(Rule(pattern, replacement, name="double")), amanda.Tool()
    plain = run()
    with amanda.apply(tool, idle) as scope:
        assert np.array_equal(run(), plain)  # the match is not known yet
        rewritten = [run(), run()]
    if jit:  # functions of JAX that are under jit themselves lie between: each has symbols of its own
        assert all(np.array_equal(output, plain) for output in rewritten)
        assert "its ops ran in another way" in str(tool.result.rows())
        return
    model = Network()
    model.conv.kernel.set_value(model.conv.kernel[...] * 2)
    assert all(np.allclose(output, model(IMAGES), atol=1e-5) for output in rewritten)
    assert not list(scope.report)
    assert np.array_equal(run(), plain)


@MODES
def test_a_sweep_prunes_one_op_at_a_time(jit: bool) -> None:
    run = runner(jit)
    swept = SparsitySweep(lambda: float(run().sum()), sparsities=[0.5]).run()
    metrics = {row[2]: row[6] for row in swept.rows() if row[1] in ("linear", "conv2d")}
    model = Network()
    for module, name in ((model.conv, "conv"), (model.linear, "linear")):
        kernel = np.array(module.kernel[...])
        order = np.argsort(np.abs(kernel).reshape(-1), kind="stable")
        masked = kernel.reshape(-1).copy()
        masked[order[: kernel.size // 2]] = 0
        module.kernel.set_value(jnp.asarray(masked.reshape(kernel.shape)))
        assert metrics[name] == pytest.approx(float(model(IMAGES).sum()), abs=1e-3)
        module.kernel.set_value(jnp.asarray(kernel))


@MODES
def test_hooks_of_modules_see_what_enters_and_leaves_them(jit: bool) -> None:
    tool, run = CoverageTool(), runner(jit)
    with amanda.apply(tool):
        run()
    rows = {(row[2], row[1]): row[-5:-1] for row in tool.result.rows()}
    assert rows["conv", "conv2d"] == (1, 0, 1, 0)
    assert rows["conv", "add"] == (1, 0, 0, 1)
    assert rows["", "relu"] == (1, 0, 0, 0)


def test_ops_of_a_program_have_no_time_of_their_own() -> None:
    compiled, eager = ProfileTool(), ProfileTool()
    with amanda.apply(compiled):
        runner(jit=True)()
    with amanda.apply(eager):
        runner(jit=False)()
    assert not [place for place in compiled.result.ops if place.module]
    assert "XLA compiled and fused them" in str(compiled.result)
    (conv,) = [place for place in eager.result.ops if place.type == "conv2d"]
    assert conv.calls == 1
    assert conv.total > 0
    assert not eager.result.remarks


def test_what_computes_again_is_for_jax_to_decide(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(RematTool(budget=1 << 20)):
        runner(jit=True)()
    assert "mark what is computed again with jax.checkpoint" in caplog.text


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_products_are_counted_by_the_axes_that_they_sum_over(how: Any) -> None:
    x, heads = jnp.ones((1, 5, 4)), jnp.ones((4, 2, 3))
    rows, experts, sizes = jnp.ones((6, 3)), jnp.ones((2, 3, 5)), jnp.array([2, 4])
    programs = {
        30 * 4: lambda: how(lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))))(x, heads),
        6 * 8: lambda: how(lambda x, w: lax.dot_general(x, w, (((0, 1), (0, 1)), ((), ()))))(
            heads, heads[..., :2]
        ),
        30 * 3: lambda: how(lambda x, w: lax.ragged_dot(x, w, sizes))(rows, experts),
    }
    for macs, run in programs.items():
        tool = FlopsTool()
        with amanda.apply(tool):
            run()
        assert tool.result.total("macs") == macs
