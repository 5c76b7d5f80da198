"""The conformance suite on TensorFlow's functions: each op of the sample is a traced function of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import pytest
import tensorflow as tf

from amanda.drivers.tensorflow.function import FunctionDriver
from amanda.testing import DriverTests, Sample
from tests.eager.test_driver import Calling, TensorFlowSample


class FunctionSample(TensorFlowSample):
    """The eager sample, with every op in a function."""

    driver = FunctionDriver

    @cached_property
    def linear(self) -> Any:
        return tf.function(tf.linalg.matmul)

    @cached_property
    def relu(self) -> Any:
        return tf.function(tf.nn.relu)

    @cached_property
    def add(self) -> Any:
        return tf.function(tf.add)

    @cached_property
    def cat(self) -> Any:
        return tf.function(lambda tensors: tf.concat(tensors, 0))

    @cached_property
    def pair(self) -> Any:
        return tf.function(tf.linalg.qr)

    @cached_property
    def many(self) -> Any:
        return tf.function(tf.linalg.matmul)

    def module(self, forward: Any) -> Any:
        return Calling(forward)


class TestFunctionDriver(DriverTests):
    """The suite on functions."""

    gaps: ClassVar = {}

    @pytest.fixture
    def sample(self) -> Iterator[Sample]:
        sample = FunctionSample()
        yield sample
        sample.close()
