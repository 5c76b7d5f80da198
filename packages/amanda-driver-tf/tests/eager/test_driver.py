"""The conformance suite on TensorFlow's eager mode."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import tensorflow as tf

from amanda.drivers.tensorflow.eager import TensorFlowEagerDriver
from amanda.testing import DriverTests, Sample

FIRST = [[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]]
SECOND = [[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]]


class Linear(tf.Module):
    """A layer without bias."""

    def __init__(self, weight: Sequence[Any]) -> None:
        super().__init__()
        self.weight = tf.Variable(weight, dtype=tf.float64)

    def __call__(self, x: Any) -> Any:
        return tf.linalg.matmul(x, self.weight)


class Network(tf.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(FIRST)
        self.second = Linear(SECOND)

    def __call__(self, x: Any) -> Any:
        return self.second(tf.nn.relu(self.first(x)))


class Calling(tf.Module):
    """A module that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class Recorded:
    """One tape and the leaves that it watches; done once each of them has got a gradient."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self.leaves: list[Any] = []
        self.tape.__enter__()
        for variable in variables:
            self.tape.watch(variable)

    def gradients(self, result: Any) -> Iterator[tuple[Any, Any]]:
        """Leaves and their gradients, where they have one."""
        sources = [*self.leaves, *self.tape.watched_variables()]
        if self.tape._recording:
            self.tape.__exit__(None, None, None)
        gradients = self.tape.gradient(result, sources)
        self.leaves = [leaf for leaf, gradient in zip(sources, gradients, strict=True) if gradient is None]
        yield from (
            (leaf, gradient)
            for leaf, gradient in zip(sources, gradients, strict=True)
            if gradient is not None
        )


class TensorFlowSample(Sample):
    """TensorFlow: a tape is always open, and a new one when every leaf has its gradient."""

    driver = TensorFlowEagerDriver
    op_names: ClassVar = {
        "linear": "MatMul", "relu": "Relu", "add": "AddV2", "cat": "ConcatV2", "pair": "Qr", "many": "MatMul",
    }  # fmt: skip
    dtypes = (tf.float64, tf.float32, tf.int64, tf.complex128)
    relu_backward = "ReluGrad"
    watching = True

    linear = property(lambda self: tf.linalg.matmul)
    relu = property(lambda self: tf.nn.relu)
    add = property(lambda self: tf.add)
    cat = property(lambda self: lambda tensors: tf.concat(tensors, 0))
    pair = property(lambda self: tf.linalg.qr)
    many = property(lambda self: tf.linalg.matmul)

    def __init__(self) -> None:
        self._variables: list[weakref.ref[Any]] = []
        self._recorded = Recorded(())
        self._gradients: dict[int, Any] = {}

    def close(self) -> None:
        """Leave no tape behind."""
        if self._recorded.tape._recording:
            self._recorded.tape.__exit__(None, None, None)

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        tensor = tf.constant(values, dtype or tf.float64)
        if requires_grad:
            self._recorded.tape.watch(tensor)
            self._recorded.leaves.append(tensor)
        return tensor

    def parameter(self, values: Sequence[Any]) -> Any:
        return self._watched(tf.Variable(values, dtype=tf.float64))

    def _watched(self, variable: Any) -> Any:
        if self.watching:
            self._variables.append(weakref.ref(variable))
            self._recorded.tape.watch(variable)
        return variable

    def bits(self, tensor: Any) -> bytes:
        return bytes(tensor.numpy().tobytes())

    def numbers(self, tensor: Any) -> list[Any]:
        return list(tensor.numpy().flatten().tolist())

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape.as_list())

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)

    def gradient(self, tensor: Any) -> Any:
        return self._gradients.get(id(tensor))

    def backward(self, tensor: Any) -> None:
        recorded, done = self._recorded, False
        try:
            for leaf, gradient in recorded.gradients(tf.reduce_sum(tensor)):
                self._gradients[id(leaf)] = gradient
            done = not recorded.leaves
        except BaseException:
            done = True
            raise
        finally:
            if done:
                living = [reference() for reference in self._variables]
                self._recorded = Recorded([reference for reference in living if reference is not None])
            else:
                recorded.tape.__enter__()

    def model(self) -> Any:
        model = Network()
        for variable in model.variables:
            self._watched(variable)
        return model

    def module(self, forward: Any) -> Any:
        return Calling(forward)

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return tf.recompute_grad(function)(tensor)

    def run_uninstrumentable_op(self) -> None:
        next(iter(tf.data.Dataset.range(2).map(lambda x: x + 1)))


class TestTensorFlowEagerDriver(DriverTests):
    """The suite on TensorFlow, eager."""

    lacks: ClassVar = {
        "auxiliary_state": "a batch normalization returns its statistics, and another op assigns them",
        "in_place": "tensors are immutable; of a variable that is written a routine sees the handle",
        "mutable_tensors": "tensors are immutable",
        "out": "no op of TensorFlow takes a tensor to write its result into",
        "leaves": "a tape gives gradients back, it stores none",
        "schema": "an op is given what was read of a variable, and the schema's names are x and y",
        "numbers": "`numpy()` is no op",
        "fork": "a forked child of TensorFlow waits for threads that it does not have",
        "batched_values": "tf.vectorized_map builds a graph",
        "grad": "TensorFlow has tapes and accumulators, no transforms of functions",
        "jvp": "TensorFlow has tapes and accumulators, no transforms of functions",
        "vmap": "tf.vectorized_map builds a graph",
    }

    def test_a_plan_dies_with_its_parameter(self, sample: Sample) -> None:
        assert isinstance(sample, TensorFlowSample)
        sample.watching = False  # an open tape holds what it watches
        super().test_a_plan_dies_with_its_parameter(sample)

    @pytest.fixture
    def sample(self) -> Iterator[Sample]:
        sample = TensorFlowSample()
        yield sample
        sample.close()
