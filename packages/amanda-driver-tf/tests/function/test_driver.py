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

IN_PLACE = never("tensors are immutable")
NO_OUT = never("no op of TensorFlow takes a tensor to write its result into")
NO_LEAF = never("a tape gives gradients back, it stores none")
NODES = never("an op is a node of a function, wherever that is called from")
SCOPES = never("a node knows its name scope, not the module that calls its function")
SYMBOLS = never("a graph is analysed before it runs, on symbols")
ARGUMENTS = never("an op is given the function's argument, and the schema's names are its own")


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

    gaps: ClassVar = {
        "test_an_exception_of_an_analysis_reaches_the_user_as_itself": SCOPES,
        "test_an_exception_of_a_routine_reaches_the_user_as_itself": SCOPES,
        "test_every_op_gives_what_it_gave": NO_OUT,
        "test_a_changed_output_is_in_the_tensor_given_as_out": NO_OUT,
        "test_a_replacement_of_an_in_place_op_writes_to_the_users_tensor": IN_PLACE,
        "test_writing_into_a_given_value_is_an_error": IN_PLACE,
        "test_a_changed_output_of_an_in_place_op_is_in_the_users_tensor": IN_PLACE,
        "test_a_changed_input_of_an_in_place_op_is_written_to_the_users_tensor": IN_PLACE,
        "test_an_in_place_op_passes_gradients_straight_through": IN_PLACE,
        "test_a_value_handed_back_unchanged_adds_nothing": never("a function gives a new tensor"),
        "test_a_plan_with_actions_is_guarded_by_dtype_and_rank": never(
            "each signature is a graph of its own"
        ),
        "test_a_tool_that_decides_by_a_callable_is_asked_for_each_answer": SYMBOLS,
        "test_a_plan_dies_with_its_parameter": never(
            "a plan dies with the graph that a function was traced in"
        ),
        "test_ops_of_a_routine_are_not_instrumented": SYMBOLS,
        "test_an_op_has_the_same_id_outside_modules_in_the_next_iteration": NODES,
        "test_an_op_keeps_its_id_when_a_neighbour_is_skipped": NODES,
        "test_two_calls_on_one_line_are_two_ops": NODES,
        "test_one_call_site_over_several_weights_is_several_ops": NODES,
        "test_repeats_of_a_place_are_told_apart_up_to_a_cap": NODES,
        "test_ids_are_bounded_in_a_loop_outside_modules": NODES,
        "test_two_paths_to_one_line_are_two_ops": NODES,
        "test_a_checkpoint_outside_modules_computes_the_same_ops_again": NODES,
        "test_backward_sees_gradients_in_and_out": SYMBOLS,
        "test_forward_values_are_there_for_the_first_backward_analysis": SYMBOLS,
        "test_outputs_are_known_after_the_op": SYMBOLS,
        "test_the_gradient_of_a_leaf_is_changed_before_it_is_stored": NO_LEAF,
        "test_what_stores_a_gradient_is_not_replaced": NO_LEAF,
        "test_inputs_are_in_the_order_of_the_schema": ARGUMENTS,
        "test_keyword_arguments_are_put_in_their_place": ARGUMENTS,
        "test_a_routine_is_given_the_inputs_that_it_selects": ARGUMENTS,
        "test_arguments_that_are_no_tensors_are_attributes_by_name": ARGUMENTS,
        "test_an_output_that_is_no_tensor_is_seen_and_changed": never("`numpy()` is no op"),
        "test_a_scope_does_not_follow_a_fork": pytest.mark.xfail(
            reason="never: a forked child of TensorFlow waits for threads that it does not have", run=False
        ),
        "test_a_traceable_routine_is_accepted_and_run": never(
            "a traceable routine is called when it is traced"
        ),
    }

    @pytest.fixture
    def sample(self) -> Iterator[Sample]:
        sample = FunctionSample()
        yield sample
        sample.close()
