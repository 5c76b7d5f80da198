"""Amanda's conformance suite on autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd import core, tracer
from autograd.builtins import NamedTupleVSpace, SequenceBox
from autograd.extend import VJPNode, defjvp, defvjp, primitive, register_notrace
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

from amanda.backend import TensorMap
from amanda.drivers.autograd import AutogradDriver, Module, mark_parameters
from amanda.testing import DriverTests, Sample, never


class Halves(NamedTuple):
    """The results of `pair`."""

    first: Any
    second: Any


class HalvesSpace(NamedTupleVSpace):
    """Gradients of halves, for autograd."""

    seq_type = Halves


HalvesSpace.register(Halves)
SequenceBox.register(Halves)


@primitive
def relu(x: Any) -> Any:
    """Return x where it is positive, else 0."""
    return np.maximum(x, 0)


defvjp(relu, lambda ans, x: lambda g: g * (x > 0))
defjvp(relu, lambda g, ans, x: g * (x > 0))


@primitive
def pair(x: Any) -> Halves:
    """Return the two halves of x along its first axis."""
    return Halves(*np.split(x, 2))


defvjp(pair, lambda ans, x: lambda g: anp.concatenate([g[0], g[1]]))


@primitive
def total(x: Any) -> Any:
    """Return the sum, by a primitive within this one."""
    return anp.sum(x)


@primitive
def item(x: Any) -> Any:
    """Return the number in an array of one element."""
    return x.item()


register_notrace(VJPNode, item)


GRADIENTS: TensorMap[Any] = TensorMap()
"""Gradients that have reached arrays; autograd returns them, and the suite looks for them at the arrays."""


def recorded(array: Any) -> Any:
    """Return an array in a box at the start of the trace of a test, as `grad` would."""
    reference = weakref.ref(array)

    def accumulate(gradient: Any) -> tuple[()]:
        array = reference()
        if array is not None:
            former = GRADIENTS.get(array)
            GRADIENTS[array] = gradient if former is None else former + gradient
        return ()

    node = VJPNode.new_root()
    node.vjp = accumulate
    return ArrayBox(array, tracer.trace_stack.top, node)


class Linear(Module):
    """A layer without bias."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def forward(self, x: Any) -> Any:
        """Return the product of x and the weight."""
        return anp.matmul(x, recorded(mark_parameters(self.weight)))


class Network(Module):
    """Two layers with a relu between."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = Linear(first), Linear(second)

    def forward(self, x: Any) -> Any:
        """Return the second layer's outputs."""
        return self.second(relu(self.first(x)))


class Calling(Module):
    """A module that calls a function."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


class AutogradSample(Sample):
    """Arrays of NumPy, which autograd records in boxes, some primitives, and a tiny model."""

    driver = AutogradDriver
    op_names: ClassVar = {"linear": "matmul", "cat": "concatenate_args", "many": "matmul"}
    argument_names = ("x1", "x2")
    dtypes = ("float64", "float32", "int64", "complex128")
    relu_backward = "relu_vjp"
    model_backward_ops = 3
    many_backward_ops = 1

    linear = property(lambda self: anp.matmul)
    relu = property(lambda self: relu)
    add = property(lambda self: anp.add)
    cat = property(lambda self: anp.concatenate)
    pair = property(lambda self: pair)
    item = property(lambda self: item)
    many = property(lambda self: anp.matmul)

    @contextmanager
    def recording_autodiff(self) -> Iterator[None]:
        with tracer.trace_stack.new_trace():
            yield

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        array = np.array(values, dtype or "float64")
        return recorded(array) if requires_grad else array

    def parameter(self, values: Sequence[Any]) -> Any:
        return recorded(mark_parameters(np.array(getval(values), "float64")))

    def bits(self, tensor: Any) -> bytes:
        return np.asarray(getval(tensor)).tobytes()

    def numbers(self, tensor: Any) -> list[Any]:
        numbers: list[Any] = np.ravel(getval(tensor)).tolist()
        return numbers

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return np.shape(getval(tensor))

    def dtype(self, tensor: Any) -> Any:
        return np.result_type(getval(tensor)).name

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    def overwrite(self, tensor: Any) -> None:
        getval(tensor)[...] += 1

    def backward(self, tensor: Any) -> None:
        if isbox(tensor):
            core.backward_pass(np.ones(np.shape(getval(tensor))), tensor._node)

    def gradient(self, tensor: Any) -> Any:
        return GRADIENTS.get(getval(tensor))

    def model(self) -> Any:
        first = [[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]]
        second = [[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]]
        return Network(np.array(first), np.array(second))

    def module(self, forward: Callable[..., Any]) -> Any:
        return Calling(forward)

    def checkpoint(self, function: Callable[..., Any], tensor: Any) -> Any:
        return autograd.checkpoint(function)(tensor)

    def grad(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return autograd.grad(function)

    def jvp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, tangent: autograd.make_jvp(function)(x)(tangent)[1]

    def run_uninstrumentable_op(self) -> None:
        total(self.input())


class TestAutogradDriver(DriverTests):
    """The suite on autograd."""

    lacks: ClassVar = {
        "auxiliary_state": "its primitives return all that they compute",
        "batched_values": "nothing maps a function over samples",
        "in_place": "autograd records no writes into arrays",
        "leaves": "gradients are returned, and not stored in arrays",
        "vmap": "nothing maps a function over samples",
        "weak_references": "boxes and numbers cannot be referenced weakly",
    }
    gaps: ClassVar = {
        "test_a_value_handed_back_unchanged_adds_nothing": never(
            "the program has in a box what a routine is given"
        ),
        "test_add_takes_its_arguments_by_name": never("NumPy's ufuncs take operands by position alone"),
        "test_keyword_arguments_are_put_in_their_place": never(
            "NumPy's ufuncs take operands by position alone"
        ),
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return AutogradSample()
