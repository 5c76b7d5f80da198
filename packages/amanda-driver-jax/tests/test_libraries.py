"""Programs of libraries on JAX: solvers under vmap, samplers, a graph network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.stats import StatsTool

pytestmark = pytest.mark.usefixtures("attached_driver")

X = jnp.linspace(0.1, 1.0, 3)
SENDERS, RECEIVERS = jnp.array([0, 1, 2, 0]), jnp.array([1, 2, 0, 2])


def graph_network(x: Any) -> Any:
    def loss(weight: Any) -> Any:
        nodes = x[:, None] @ weight
        for _ in range(2):
            nodes = jnp.log(jnp.cosh(jax.ops.segment_sum(nodes[SENDERS], RECEIVERS, 3)))
        return nodes.sum()

    return jax.jit(jax.value_and_grad(loss))(jnp.ones((1, 3)) / 3)


def solver(x: Any) -> Any:
    diffrax = pytest.importorskip("diffrax")
    term = diffrax.ODETerm(lambda t, y, args: -jnp.log(y))
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-4)

    def solve(start: Any) -> Any:
        solution = diffrax.diffeqsolve(
            term, diffrax.Heun(), 0.0, 1.0, 0.1, start, stepsize_controller=controller, max_steps=16,
            throw=False,
        )  # fmt: skip
        return solution.ys

    return jax.jit(jax.vmap(solve))(x)


def chains(x: Any) -> Any:
    numpyro = pytest.importorskip("numpyro")
    infer = pytest.importorskip("numpyro.infer")

    def model(y: Any) -> None:
        mean = numpyro.sample("mean", numpyro.distributions.Normal(0, 1))
        numpyro.sample("y", numpyro.distributions.Normal(mean, jnp.log(3 + y)), obs=y)

    sampler = infer.MCMC(
        infer.HMC(model, num_steps=2, trajectory_length=None), num_warmup=2, num_samples=2, num_chains=2,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    sampler.run(jax.random.PRNGKey(0), y=x)
    return sampler.get_samples()["mean"]


def sampler(x: Any) -> Any:
    blackjax = pytest.importorskip("blackjax")
    hmc = blackjax.hmc(lambda position: -(jnp.log(x) * (position - x) ** 2).sum(), 0.1, jnp.ones(1), 2)

    def step(state: Any, key: Any) -> Any:
        state, _ = hmc.step(key, state)
        return state, state.position

    run = jax.jit(lambda key: lax.scan(step, hmc.init(jnp.zeros(1)), jax.random.split(key, 3))[1])
    return run(jax.random.key(0))


def long(program: Callable[[Any], Any]) -> Any:
    return pytest.param(program, marks=[pytest.mark.slow, pytest.mark.long])


def tool_with(routine: Callable[..., Any] | None) -> amanda.Tool:
    tool = amanda.Tool()
    insert = lambda context: context.insert_after_op(routine) if routine else context.get_inputs()  # noqa: E731
    tool.add_inst_for_op(insert)
    tool.add_inst_for_op(lambda context: None, backward=True)
    return tool


def equal_values(*values: Any) -> list[Any]:
    return [value.copy() if isinstance(value, (np.ndarray, jax.Array)) else value for value in values]


def leaves(values: Any) -> list[Any]:
    return list(map(np.asarray, jax.tree_util.tree_leaves(values)))


@pytest.mark.parametrize("program", [graph_network, *map(long, (solver, chains, sampler))])
def test_programs_compute_what_they_do_without_a_tool(program: Callable[[Any], Any]) -> None:
    plain = leaves(program(X))
    with amanda.apply(tool_with(None)):
        looked = leaves(program(X))
    assert [value.tobytes() for value in looked] == [value.tobytes() for value in plain]
    routines = [tool_with(lambda *values: values), tool_with(equal_values)]
    for tool in (*routines, FlopsTool(), NanTool(), StatsTool()):
        with amanda.apply(tool):
            values = leaves(program(X))
        for value, expected in zip(values, plain, strict=True):
            # Callbacks keep XLA from fusing.
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", [graph_network, *map(long, (solver, sampler))])
def test_nan_is_found_at_its_op(program: Callable[[Any], Any]) -> None:
    plant, tool = amanda.Tool(), NanTool()

    def analyse(context: Any) -> None:
        if context.get_op_type() == "log":
            context.insert_after_op(lambda value: value * np.float32("nan"))

    plant.add_inst_for_op(analyse)
    with amanda.apply(plant, tool):
        program(X)
    assert tool.result.findings[0].type == "log"
