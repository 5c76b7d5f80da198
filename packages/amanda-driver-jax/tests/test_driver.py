"""The conformance suite on JAX, op by op."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax._src import config, core

from amanda.drivers.jax import JaxDriver
from amanda.interceptor import codes
from amanda.testing import DriverTests, Sample, never

sys.path.insert(0, str(Path(__file__).parent))
from tape import Tape, concrete

FIRST = [[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]]
SECOND = [[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]]

tape = Tape()


def linear(x: Any, weight: Any) -> Any:
    return lax.dot_general(tape.symbol_of(x), tape.symbol_of(weight), (((1,), (1,)), ((), ())))


def relu(x: Any) -> Any:
    return jax.nn.relu(tape.symbol_of(x))


def add(x: Any, y: Any) -> Any:
    return lax.add(tape.symbol_of(x), tape.symbol_of(y))


def cat(arrays: Sequence[Any]) -> Any:
    return lax.concatenate(tape.symbol_of(list(arrays)), 0)


def pair(x: Any) -> Any:
    return lax.sort((tape.symbol_of(x), tape.symbol_of(x)), num_keys=1)


def many(x: Any, y: Any) -> Any:
    return lax.atan2(tape.symbol_of(x), tape.symbol_of(y))


for function in (linear, relu, add, cat, pair, many):
    codes.skip(function.__code__)


class Linear(nnx.Module):
    """A layer without bias."""

    def __init__(self, weight: Sequence[Any]) -> None:
        self.weight = tape.watch(jnp.array(weight, jnp.float32))

    def __call__(self, x: Any) -> Any:
        return linear(x, self.weight)


class Network(nnx.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        self.first = Linear(FIRST)
        self.second = Linear(SECOND)

    def __call__(self, x: Any) -> Any:
        return self.second(relu(self.first(x)))


class Calling(nnx.Module):
    """A module that calls a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


ahead = jax.jit(lambda x: x + 1).lower(jnp.ones(1)).compile()


class JaxSample(Sample):
    """JAX, whose ops are recorded on a tape."""

    driver = JaxDriver
    op_names: ClassVar = {
        "linear": "dot_general",
        "cat": "concatenate",
        "pair": "sort",
        "many": "atan2",
    }
    dtypes = (jnp.float32, jnp.float16, jnp.int32, jnp.complex64)
    relu_backward = "relu_transpose"
    many_backward_ops = 1

    linear = property(lambda self: linear)
    relu = property(lambda self: relu)
    add = property(lambda self: add)
    cat = property(lambda self: cat)
    pair = property(lambda self: pair)
    many = property(lambda self: many)

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        array = jnp.array(values, dtype or jnp.float32)
        return tape.watch(array) if requires_grad else array

    def parameter(self, values: Sequence[Any]) -> Any:
        return tape.watch(jnp.array(values, jnp.float32))

    @contextmanager
    def recording_autodiff(self) -> Iterator[None]:
        tape.__init__()  # type: ignore[misc]
        # JAX's filter of tracebacks adds a note of its own to every exception.
        with config.traceback_filtering("off"), tape.recording():
            yield
        tape.__init__()  # type: ignore[misc]
        assert core.trace_ctx.trace is core.eval_trace

    def bits(self, tensor: Any) -> bytes:
        return np.asarray(concrete(tensor)).tobytes()

    def numbers(self, tensor: Any) -> list[Any]:
        return list(np.asarray(concrete(tensor)).flatten().tolist())

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    def device(self, tensor: Any) -> str:
        return str(concrete(tensor).device)

    def gradient(self, tensor: Any) -> Any:
        return tape.gradient(tensor)

    def backward(self, tensor: Any) -> None:
        tape.backward(tensor)

    def model(self) -> Any:
        return Network()

    def module(self, forward: Any) -> Any:
        return Calling(forward)

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return jax.checkpoint(function)(tape.symbol_of(tensor))

    def vmap(self, function: Any) -> Any:
        return jax.vmap(function)

    def grad(self, function: Any) -> Any:
        return jax.grad(function)

    def jvp(self, function: Any) -> Any:
        return lambda x, tangent: jax.jvp(function, (x,), (tangent,))[1]

    def run_uninstrumentable_op(self) -> None:
        ahead(jnp.ones(1))


CHECKPOINT = never("jax.checkpoint computes again within the backward program, which binds no op anew")


class TestJaxDriver(DriverTests):
    """The suite on JAX, eager."""

    lacks: ClassVar = {
        "auxiliary_state": "no op of JAX writes into an array that it is given",
        "out": "no op of JAX takes an array to write its result into",
        "in_place": "no op of JAX writes into an array that it is given",
        "mutable_tensors": "nobody writes into an array of JAX",
        "numbers": "every op of JAX gives arrays",
        "leaves": "JAX returns gradients, no op stores them",
        "schema": "a primitive is bound with arrays by position; what else it takes are parameters",
        "fork": "JAX is multithreaded, and warns of os.fork",
        "batched_values": "JAX calls a routine for each sample, with its values",
    }

    gaps: ClassVar = {
        "test_a_value_handed_back_unchanged_adds_nothing": never(
            "a routine at an op that is differentiated sees the array, where the program has a symbol of it"
        ),
        "test_memory_does_not_grow_over_iterations": never(
            "JAX's native caches keep two dead weak references of each linearization, also without a driver"
        ),
        "test_one_call_site_over_several_weights_is_several_ops": never(
            "an array is a value, made anew in each step: what tells ops apart is the place of the call"
        ),
        "test_a_plan_dies_with_its_parameter": never("an array is a value, made anew in each step"),
        "test_ops_computed_again_by_a_checkpoint_have_the_ids_of_the_first_run": CHECKPOINT,
        "test_a_checkpoint_computes_the_same_executions_again": CHECKPOINT,
        "test_a_checkpoint_outside_modules_computes_the_same_ops_again": CHECKPOINT,
        "test_a_checkpoint_whose_scope_has_closed_runs_with_the_tools_of_the_backward_pass": CHECKPOINT,
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return JaxSample()
