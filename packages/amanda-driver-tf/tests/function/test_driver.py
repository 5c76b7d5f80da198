"""The conformance suite on TensorFlow's functions: each op of the sample is a traced function of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tensorflow as tf

from amanda.drivers.tensorflow.function import FunctionDriver
from amanda.testing import DriverTests, Sample, never

_EAGER = importlib.util.spec_from_file_location(
    "tests_of_eager_mode", Path(__file__).parents[1] / "eager" / "test_driver.py"
)
assert _EAGER is not None
assert _EAGER.loader is not None
eager: Any = sys.modules.setdefault(_EAGER.name, importlib.util.module_from_spec(_EAGER))
_EAGER.loader.exec_module(eager)

NODES = never("an op is a node of a function, wherever that is called from")
SCOPES = never("a node knows its name scope, not the module that calls its function")
SYMBOLS = never("a graph is analysed before it runs, on symbols")


class FunctionSample(eager.TensorFlowSample):  # type: ignore[misc]
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


class TestFunctionDriver(DriverTests):
    """The suite on TensorFlow, functions."""

    lacks: ClassVar = {
        "auxiliary_state": "a batch normalization returns its statistics, and another op assigns them",
        "in_place": "tensors are immutable",
        "mutable_tensors": "tensors are immutable",
        "out": "no op of TensorFlow takes a tensor to write its result into",
        "leaves": "a tape gives gradients back, it stores none",
        "call_sites": "an op is a node of a function, wherever that is called from",
        "values": "a graph is analysed before it runs, on symbols",
        "schema": "an op is given the function's argument, and the schema's names are its own",
        "numbers": "`numpy()` is no op",
        "fork": "a forked child of TensorFlow waits for threads that it does not have",
        "traceable_calls": "a traceable routine is called when it is traced",
        "batched_values": "tf.vectorized_map builds a graph",
        "grad": "TensorFlow has tapes and accumulators, no transforms of functions",
        "jvp": "TensorFlow has tapes and accumulators, no transforms of functions",
        "vmap": "tf.vectorized_map builds a graph",
    }
    gaps: ClassVar = {
        "test_an_exception_of_an_analysis_reaches_the_user_as_itself": SCOPES,
        "test_an_exception_of_a_routine_reaches_the_user_as_itself": SCOPES,
        "test_a_value_handed_back_unchanged_adds_nothing": never("a function gives a new tensor"),
        "test_a_plan_with_actions_is_guarded_by_dtype_and_rank": never(
            "each signature is a graph of its own"
        ),
        "test_a_plan_dies_with_its_parameter": never(
            "a plan dies with the graph that a function was traced in"
        ),
        "test_ops_of_a_routine_are_not_instrumented": SYMBOLS,
        "test_one_call_site_over_several_weights_is_several_ops": NODES,
        "test_two_paths_to_one_line_are_two_ops": NODES,
        "test_a_checkpoint_computes_the_same_executions_again": NODES,
    }

    @pytest.fixture
    def sample(self) -> Iterator[Sample]:
        sample = FunctionSample()
        yield sample
        sample.close()
