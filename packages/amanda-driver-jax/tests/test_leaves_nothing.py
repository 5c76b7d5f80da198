"""Traces that scopes leave, threads, donation, devices, and programs that are one op."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src import config
from jax.experimental import pallas as pl

import amanda

pytestmark = pytest.mark.usefixtures("attached_driver")

X, W = jnp.arange(6.0).reshape(2, 3) / 7, jnp.ones((3, 3)) / 3


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum()


@amanda.traceable
def doubled(x: Any) -> Any:
    """Return twice a value."""
    return 2 * x


class Doubling(amanda.Tool):
    """Doubles what each tanh gives, in the program."""

    def __init__(self) -> None:
        super().__init__()
        self.op_types: list[str] = []
        self.add_inst_for_op(self.insert)

    def insert(self, context: amanda.OpContext) -> None:
        self.op_types.append(context.get_op_type())
        if context.get_op_type() == "tanh":
            context.insert_after_op(doubled)


def live() -> int:
    """Return the number of executables that are alive."""
    gc.collect()
    return sum(type(candidate).__name__ == "LoadedExecutable" for candidate in gc.get_objects()) or len(
        jax.devices()[0].client.live_executables()
    )


def scopes(count: int, step: Any) -> None:
    for _ in range(count):
        with amanda.apply(Doubling()):
            step(W, X)


def test_executables_go_with_their_tools() -> None:
    step = jax.jit(dense)
    plain = step(W, X)
    scopes(2, step)
    step(W, X)
    before = live()
    scopes(10, step)
    assert live() <= before + 1
    assert step(W, X) == plain
    assert step._cache_size() == 1


def test_tools_may_end_while_jax_makes_a_function() -> None:
    threshold = gc.get_threshold()
    for _ in range(30):
        tool: Any = Doubling()
        tool.itself = tool  # so that a garbage collection ends it
        with amanda.apply(tool):
            jax.jit(dense)(W, X)
        del tool
        try:
            gc.set_threshold(1)
            functions = [jax.jit(dense) for _ in range(20)]
        finally:
            gc.set_threshold(*threshold)
    assert functions[0](W, X) == dense(W, X)


@pytest.mark.slow
def test_a_thousand_scopes_keep_memory_flat() -> None:
    import resource

    step = jax.jit(dense)
    scopes(200, step)
    before, memory = live(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scopes(800, step)
    assert live() <= before + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 40_000  # KiB


class Reading(Doubling):
    """Scales, in the program, by an array that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = jnp.ones((2, 3))
        self.add_inst_for_op(self.insert_reading)

    def insert_reading(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "tanh":
            context.insert_after_op(self.scaled)

    @amanda.traceable
    def scaled(self, x: Any) -> Any:
        """Return a value, scaled."""
        return x * self.scale


class Called(amanda.Tool):
    """Is called at each op, and at each backward op."""

    def __init__(self) -> None:
        super().__init__()
        self.called = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self.call))
        self.add_inst_for_op(lambda context: context.insert_before_backward_op(self.call), backward=True)

    def call(self, *values: Any, run: dict[str, Any]) -> None:
        self.called += 1


@pytest.mark.parametrize("how", ["jit of grad", "grad of jit", "grad"])
@pytest.mark.parametrize("make", [Doubling, Reading, Called])
def test_a_tool_dies_though_jax_keeps_programs(make: type[amanda.Tool], how: str) -> None:
    grad = jax.grad(jax.jit(dense)) if how == "grad of jit" else jax.grad(dense)
    step, tool = jax.jit(grad) if how == "jit of grad" else grad, make()
    with amanda.apply(tool):
        step(W, X)
    if isinstance(tool, Called):
        assert tool.called
    reference = weakref.ref(tool)
    del tool
    gc.collect()
    assert reference() is None


def test_executions_go_with_their_backward_passes() -> None:
    def living_records() -> int:
        gc.collect()
        return sum(type(candidate).__name__ in ("Trace", "RoutineJob") for candidate in gc.get_objects())

    tool = Called()
    with amanda.apply(tool):
        jax.grad(dense)(W, X)
        before, called = living_records(), tool.called
        for _ in range(5):
            jax.grad(dense)(W, X)
        assert living_records() <= before
        assert tool.called == 6 * called


def test_nothing_is_traced_or_compiled_again_after_a_scope() -> None:
    traced: list[None] = []

    @jax.jit
    def step(w: Any, x: Any) -> Any:
        traced.append(None)
        return dense(w, x)

    settings = dict(jax.config.values)
    context = config.trace_context()
    step(W, X)
    with amanda.apply(Doubling()):
        step(W, X)
    count = len(traced)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        step(W, X)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(traced) == count == 2
    assert not [name for name in compiled if "compile" in name]
    assert dict(jax.config.values) == settings
    assert config.trace_context() == context


def test_a_donated_buffer_is_given_away() -> None:
    step = jax.jit(lambda w, x: (w + jnp.tanh(x @ w).sum(), None)[0], donate_argnums=0)
    plain = step(jnp.array(W), X)
    for tool in (amanda.Tool(), Doubling()):
        donated = jnp.array(W)
        with amanda.apply(tool):
            result = step(donated, X)
        assert donated.is_deleted()
        assert np.array_equal(result, plain) == (type(tool) is amanda.Tool)


def test_a_scope_is_of_its_thread_and_scopes_nest() -> None:
    step, results = jax.jit(dense), []
    plain = step(W, X)
    entered, leaving = threading.Event(), threading.Event()

    def beside() -> None:
        entered.wait()
        results.append(step(W, X))
        leaving.set()

    thread = threading.Thread(target=beside)
    thread.start()
    with amanda.apply(Doubling()):
        entered.set()
        leaving.wait()
        once = step(W, X)
        with amanda.apply(Doubling()):
            twice = step(W, X)
        assert step(W, X) == once
    thread.join()
    assert results == [plain]
    assert step(W, X) == plain
    assert np.allclose([once, twice], [2 * plain, 4 * plain], rtol=1e-6)


def test_an_exported_program_is_reported() -> None:
    program = export.export(jax.jit(dense))(W, X)
    plain = program.call(W, X)
    with amanda.apply(Doubling()) as scope:
        assert program.call(W, X) == plain
    assert len(list(scope.report)) == 1


def test_a_pallas_kernel_is_one_op() -> None:
    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...]) * 2

    run = jax.jit(pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((2, 3), jnp.float32), interpret=True))
    plain, tool = run(X), Doubling()
    with amanda.apply(tool):
        assert np.array_equal(run(X), plain)
    assert tool.op_types == ["pallas_call"]


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, sys
from jax.sharding import Mesh, PartitionSpec as P
import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached

assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("d",))

def loss(w, x):
    total = jax.shard_map(
        lambda w, x: jax.lax.psum(jnp.tanh(x @ w).sum(), "d"), mesh=mesh, in_specs=(P(), P("d")),
        out_specs=P(),
    )
    return total(w, x)

w, x = jnp.ones((3, 3)) / 3, jnp.arange(24.0).reshape(8, 3) / 7
step = jax.jit(loss)
plain = step(w, x)
seen = []

def insert(context):
    seen.append(context.get_op_type())
    if context.get_op_type() == "tanh":
        context.insert_after_op(doubled)

@amanda.traceable
def doubled(x):
    return 2 * x

tool, empty = amanda.Tool(), amanda.Tool()
tool.add_inst_for_op(insert)
empty.add_inst_for_op(lambda context: None)
with attached(JaxDriver):
    with amanda.apply(empty):
        assert step(w, x) == plain
    with amanda.apply(tool) as scope:
        assert np.allclose(step(w, x), 2 * plain, rtol=1e-6), (step(w, x), plain)
assert {"dot_general", "tanh"} <= set(seen), seen
assert step(w, x) == plain
"""


def test_shard_map_on_four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    children.run([sys.executable, "-c", SHARDED], check=True)


def _run_symbols(tool: amanda.Tool) -> None:
    """Have routines hand something from forward to backward ops."""
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *values, run: None))
    backward = lambda context: context.insert_before_backward_op(lambda *values, run: None)  # noqa: E731
    tool.add_inst_for_op(backward, backward=True)


TOOLS: dict[str, Any] = {
    "empty": lambda tool: None,
    "looks": lambda tool: tool.add_inst_for_op(lambda context: context.get_inputs()),
    "echo": lambda tool: tool.add_inst_for_op(
        lambda context: context.insert_after_op(lambda *values: values)
    ),
    "run": _run_symbols,
}
TRACED: dict[str, Any] = {
    "jit": lambda: jax.jit(lambda x: jnp.subtract(x, 1.0) * 2)(X),
    "gradient": lambda: jax.jit(jax.grad(lambda x: jnp.sin(jnp.where(x > 0, x, 0)).sum()))(X),
    "scan": lambda: jax.jit(
        lambda x: jax.lax.scan(lambda carry, _: (jnp.add(carry, 1), None), x, None, length=2)
    )(X),
    "nested": lambda: jax.jit(lambda x: jax.jit(lambda y: (y, jnp.where(y > 0, y, x)))(x * 2)[0])(X),
}


@pytest.mark.parametrize("program", TRACED)
@pytest.mark.parametrize("tool", TOOLS)
def test_no_symbol_outlives_its_trace(program: str, tool: str) -> None:
    applied = amanda.Tool()
    TOOLS[tool](applied)
    with amanda.apply(applied), jax.check_tracer_leaks():
        TRACED[program]()
