"""What TensorFlow converts for a call of an op is converted once, and the op is one op."""

from __future__ import annotations

import sys
from typing import Any

import children
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import RoutineError


def test_an_attribute_that_tensorflow_converts_makes_no_second_op(ops: Any) -> None:
    x = tf.constant(1.0)
    with amanda.apply(ops):
        for _ in range(5):
            y = tf.raw_ops.Cast(x=x, DstT="float64")
    assert y.dtype == tf.float64
    assert ops.forward == ["Cast"] * 5


def test_an_attribute_of_no_type_is_refused_as_outside_of_a_scope(ops: Any) -> None:
    def wrong() -> None:
        tf.raw_ops.Sum(input=tf.constant([1.0]), axis=tf.constant(0), keep_dims=1)

    with pytest.raises(TypeError) as vanilla:
        wrong()
    with amanda.apply(ops), pytest.raises(TypeError) as inside:
        wrong()
    assert str(inside.value) == str(vanilla.value)
    assert ops.forward == ["Sum"]


def test_a_tensor_in_the_place_of_a_list_makes_one_op(ops: Any) -> None:
    x = tf.constant([1.0, 2.0])
    with amanda.apply(ops):
        y = tf.raw_ops.Pack(values=x)
    assert y.numpy().tolist() == [1.0, 2.0]
    assert ops.forward.count("Pack") == 1


def test_an_array_that_a_differentiable_routine_gives_is_a_tensor_and_makes_no_second_op(acting: Any) -> None:
    calls: list[Any] = []

    @amanda.differentiable
    def doubled(x: Any) -> Any:
        calls.append(x)
        return x.numpy() * 2

    with amanda.apply(acting("insert_before_op", "Tanh", doubled)):
        results = [tf.tanh(tf.constant(0.5)) for _ in range(4)]
    assert results == [tf.tanh(tf.constant(1.0))] * 4
    assert len(calls) == 4


def test_an_array_that_a_replacement_gives_is_a_tensor(acting: Any) -> None:
    with amanda.apply(acting("replace_op", "Tanh", lambda x: np.float32(2) * x.numpy())):
        result = tf.tanh(tf.constant(0.5))
    assert isinstance(result, tf.Tensor)
    assert result == 1.0


@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.differentiable])
def test_another_handle_for_an_assignment_is_refused(acting: Any, mark: Any) -> None:
    variable, second_variable = tf.Variable(1.0), tf.Variable(2.0)
    tool = acting(
        "insert_before_op", "AssignAddVariableOp", mark(lambda handle: second_variable.handle), inputs=[0]
    )
    with amanda.apply(tool), pytest.raises(RoutineError, match="another handle"):
        variable.assign_add(5.0)
    same = acting("insert_before_op", "AssignAddVariableOp", mark(lambda handle: handle), inputs=[0])
    with amanda.apply(same):
        for _ in range(3):
            variable.assign_add(1.0)
    assert (variable.numpy(), second_variable.numpy()) == (4.0, 2.0)


@pytest.mark.slow
def test_the_first_op_of_a_process_may_have_a_number_to_convert() -> None:
    program = "import tensorflow as tf, amanda\nwith amanda.apply(amanda.Tool()):\n    tf.fill((3,), 2.0)"
    children.run([sys.executable, "-c", program], check=True)
