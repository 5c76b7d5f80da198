"""Routines of programs are called in the order of the data, in each transformation and on several devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda.tools.nan import NanTool

pytestmark = pytest.mark.usefixtures("attached_driver")

X = jnp.linspace(0.1, 1.0, 6)


class Recording(amanda.Tool):
    """Records ops and backward ops, before and after each.  calls: "sin" before sin, "/sin" after it."""

    def __init__(self, observing: bool) -> None:
        self.calls: list[str] = []
        self.mark = amanda.observer if observing else lambda routine: routine
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def recorded(self, name: str) -> Callable[..., Any]:
        return self.mark(lambda *values: self.calls.append(name))

    def forward(self, context: Any) -> None:
        name = context.get_op_type()
        context.insert_before_op(self.recorded(name))
        context.insert_after_op(self.recorded(f"/{name}"))

    def backward(self, context: Any) -> None:
        name = context.get_backward_op().__name__
        context.insert_before_backward_op(self.recorded(name))
        context.insert_after_backward_op(self.recorded(f"/{name}"))


def chain(x: Any) -> Any:
    return lax.tanh(lax.sin(lax.cos(x)))


def total(x: Any) -> Any:
    return lax.reduce_sum(chain(x), (0,))


def scanned(x: Any) -> Any:
    return lax.exp(lax.scan(lambda carry, _: (lax.sin(carry), None), lax.cos(x), None, length=2)[0])


def looped(x: Any) -> Any:
    return lax.exp(
        lax.while_loop(lambda s: lax.lt(s[0], 0.9), lambda s: (lax.sqrt(s[0]), lax.sin(s[1])), (0.5, x))[1]
    )


def branched(x: Any) -> Any:
    return lax.exp(lax.cond(lax.gt(lax.reduce_max(x, (0,)), 0.0), lax.sin, lax.cos, lax.tanh(x)))


CHAIN = ["cos", "sin", "tanh"]
BACKWARD = ["reduce_sum", "reduce_sum_transpose", "tanh_transpose", "sin_transpose", "cos_transpose"]
PROGRAMS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "chain": (chain, CHAIN),
    "gradient": (jax.grad(total), CHAIN + BACKWARD),
    "gradient of checkpoint": (jax.grad(jax.checkpoint(total)), CHAIN + BACKWARD),
    "scan": (scanned, ["cos", "sin", "sin", "exp"]),
    "while": (looped, ["lt", "sqrt", "sin"] * 3 + ["lt", "exp"]),
    "cond": (branched, ["reduce_max", "gt", "tanh", "sin", "exp"]),
}


@pytest.mark.parametrize("observing", [False, True], ids=["routines", "observers"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_routines_are_called_in_the_order_of_the_data(name: str, observing: bool) -> None:
    program, ops = PROGRAMS[name]
    step, tool = jax.jit(program), Recording(observing)
    plain = step(X)
    with amanda.apply(tool):
        assert np.allclose(step(X), plain, rtol=1e-6)
    calls = [call for call in tool.calls if "convert_element_type" not in call]
    assert calls == [f"{mark}{op}" for op in ops for mark in ("", "/")]


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rows_of_an_op_are_called_before_those_of_the_next(how: Any) -> None:
    tool = Recording(observing=True)
    with amanda.apply(tool):
        how(jax.vmap(chain))(X)
    assert tool.calls == [f"{mark}{op}" for op in CHAIN for mark in ("", "/") for _ in X]


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nan_begins_at_one_op(how: Any) -> None:
    tool = NanTool()
    with amanda.apply(tool):
        how(lambda x: jnp.tanh(jnp.sin(jnp.log(x) * 2) + 1))(X - 0.5)
    assert [finding.type for finding in tool.result.findings] == ["log"]


def halved(n: Any) -> Any:
    return lax.while_loop(lambda s: s[0] > 1.5, lambda s: (s[0] * 0.5, s[1] + 1), (n, 0))[1]


def switched(x: Any) -> Any:
    return lax.switch((x > 0).astype(int), [lambda x: jnp.cos(x) + 1, lambda x: jnp.sin(x) * 2], x)


def counted(x: Any) -> Any:
    return lax.fori_loop(0, jnp.int32(x * 3), lambda i, total: total + i * x, 0.0)


@pytest.mark.parametrize("how", [jax.vmap, lambda f: jax.jit(jax.vmap(f)), lambda f: jax.vmap(jax.jit(f))],
                         ids=["vmap", "jit of vmap", "vmap of jit"])  # fmt: skip
@pytest.mark.parametrize("program", [halved, switched, counted])
def test_rows_that_take_other_ways_have_their_values(program: Callable[[Any], Any], how: Any) -> None:
    rows = jnp.linspace(-3.0, 40.0, 5)
    run = how(program)
    plain = run(rows)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: values))
    with amanda.apply(tool):
        assert np.allclose(run(rows), plain, rtol=1e-6)


DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached

assert len(jax.devices()) == 2
mesh = Mesh(np.array(jax.devices()), ("d",))
x = jnp.linspace(0.1, 1.0, 8)
chain = lambda x: jax.lax.tanh(jax.lax.sin(jax.lax.cos(x)))
PROGRAMS = {
    "sharded": (jax.jit(chain), jax.device_put(x, NamedSharding(mesh, P("d"))), 1),
    "shard_map": (jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=P("d"), out_specs=P("d"))), x, 2),
}
with attached(JaxDriver):
    for name, (program, argument, times) in PROGRAMS.items():
        calls, tool = [], amanda.Tool()

        def insert(context, calls=calls):
            op = context.get_op_type()
            context.insert_before_op(lambda *values: calls.append(op))
            context.insert_after_op(lambda *values: calls.append("/" + op))

        tool.add_inst_for_op(insert)
        plain = program(argument)
        with amanda.apply(tool):
            assert np.allclose(program(argument), plain, rtol=1e-6)
        ops = ["cos", "/cos", "sin", "/sin", "tanh", "/tanh"]
        assert len(calls) == len(ops) * times, (name, calls)
        for device in range(times):  # each calls in order; neither waits for the other
            rest = iter(calls)
            assert all(op in rest for op in ops), (name, calls)
"""


@pytest.mark.slow
def test_routines_are_called_in_the_order_of_the_data_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    children.run([sys.executable, "-c", DEVICES], check=True)
