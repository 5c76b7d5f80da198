"""What holds the value of an input is told in every mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import amanda


class Held(amanda.Tool):
    """What holds the second factor of each product."""

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "MatMul":
            assert context.get_variable(0) is None
            self.variables.append(context.get_variable(1))


def variables_read(program: Any) -> list[Any]:
    tool = Held()
    with amanda.apply(tool):
        program()
    return tool.variables


X = np.ones((2, 3), np.float32)


def test_eagerly_and_in_a_function_it_is_the_handle_of_the_variable() -> None:
    weight, second_weight = tf.Variable(tf.ones((3, 3))), tf.Variable(tf.ones((3, 3)))

    def products(x: Any) -> Any:
        return tf.matmul(tf.matmul(tf.matmul(x, weight), second_weight), weight)

    for program in (products, tf.function(products)):
        handles = variables_read(lambda program=program: program(tf.constant(X)))
        assert [handle is weight.handle for handle in handles] == [True, False, True]
        assert handles[1] is second_weight.handle


def test_functions_and_loops_within_a_function_pass_it_on() -> None:
    weight = tf.Variable(tf.ones((3, 3), tf.float64))
    inner = tf.function(lambda x: tf.matmul(x, tf.cast(weight, tf.float32)))

    @tf.function
    def outer(x: Any) -> Any:
        x = inner(x)
        for _ in tf.range(2):
            x = tf.matmul(x, tf.cast(weight, tf.float32))
        return tf.matmul(x, tf.ones((3, 3)))

    handles = variables_read(lambda: outer(tf.constant(X)))
    assert [handle is weight.handle for handle in handles] == [True, True, False]
    assert handles[-1] is None


def test_in_a_session_it_is_the_tensor_that_makes_the_variable() -> None:
    with tf.Graph().as_default():
        resource = tf.compat.v1.Variable(tf.ones((3, 3)), use_resource=True)
        reference = tf.compat.v1.Variable(tf.ones((3, 3)), use_resource=False)
        called = tf.function(lambda x: tf.matmul(x, resource))
        y = called(tf.matmul(tf.matmul(tf.constant(X), resource), reference))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            tensors = variables_read(lambda: session.run(y))
    assert [tensor.op.name for tensor in tensors] == [resource.op.name, reference.op.name, resource.op.name]
