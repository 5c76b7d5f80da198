"""What is left after errors, after scopes, and after functions and tools have died."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting
from tensorflow.python.eager import context

import amanda
from amanda.errors import RoutineError


def fail(*_):
    raise ZeroDivisionError("a tool's own mistake")


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("insert_before_op", "MatMul"),
        ("insert_after_op", "Relu"),
        ("replace_op", "Relu"),
        ("insert_before_backward_op", "ReluGrad"),
        ("insert_after_backward_op", "MatMul"),
        ("replace_backward_op", "ReluGrad"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_an_exception_reaches_the_user_as_itself_and_leaves_functions_vanilla(
    layer, action, kind, inside
) -> None:
    vanilla = layer.trained(inside)
    with pytest.raises(ZeroDivisionError) as raised, amanda.apply(inserting(action, kind, fail)):
        layer.trained(inside)
    (note,) = raised.value.__notes__
    assert action in note
    assert kind in note
    np.testing.assert_equal(layer.trained(inside), vanilla)


def test_an_exception_of_an_analysis_leaves_no_plans(layer) -> None:
    failing = [True]

    def analysis(context) -> None:
        if failing.pop() if failing else False:
            raise ZeroDivisionError

    tool = amanda.Tool()
    types = []
    tool.add_inst_for_op(lambda context: types.append(context.get_op().type))
    tool.add_inst_for_op(analysis)
    with amanda.apply(tool):
        with pytest.raises(ZeroDivisionError):
            layer.loss(layer.x)
        types.clear()
        layer.loss(layer.x)
    assert "MatMul" in types


def test_a_wrong_shape_is_an_error_at_the_routine(layer) -> None:
    with (
        pytest.raises(RoutineError, match=r"shape \(1, 1\) where shape \(1, 3\)"),
        amanda.apply(inserting("insert_before_op", "Relu", lambda value: value[:1, :1])),
    ):
        layer.loss(layer.x)


def test_an_error_of_an_op_is_as_without_tools() -> None:
    @tf.function
    def gathered(x, i):
        return tf.nn.relu(tf.raw_ops.GatherV2(params=x, indices=i, axis=0))

    arguments = tf.constant([1.0]), tf.constant([5])
    with pytest.raises(tf.errors.InvalidArgumentError) as plain:
        gathered(*arguments)
    with (
        amanda.apply(inserting("insert_before_op", "Relu", lambda value: None)),
        pytest.raises(tf.errors.InvalidArgumentError) as instrumented,
    ):
        gathered(*arguments)
    assert str(instrumented.value) == str(plain.value)


def test_copies_die_with_their_function_and_with_their_tool() -> None:
    def names() -> set[str]:
        gc.collect()
        return {name for name in context.context().list_function_names() if "_amanda_" in str(name)}

    before = names()
    f = tf.function(lambda x: tf.nn.relu(x))
    x = tf.constant([1.0])
    tool = inserting("insert_before_op", "Relu", lambda value: value * 2)
    with amanda.apply(tool):
        f(x)
    assert len(names() - before) == 1
    dead = weakref.ref(tool)
    del tool
    assert names() == before
    assert dead() is None
    tool = inserting("insert_before_op", "Relu", lambda value: value * 2)
    with amanda.apply(tool):
        f(x)
    del f
    assert names() == before
    with amanda.apply(tool):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("one_tool", [True, False])
def test_hundreds_of_scopes_leave_memory_as_it_was(one_tool) -> None:
    f = tf.function(lambda x: tf.nn.relu(x))
    x = tf.constant([1.0])

    def tool() -> amanda.Tool:
        return inserting("insert_before_op", "Relu", lambda value: value * 2)

    shared_tool = tool()

    def run(times: int) -> tuple[int, int]:
        for _ in range(times):
            with amanda.apply(shared_tool if one_tool else tool()):
                assert f(x) == 2.0
        gc.collect()
        return len(gc.get_objects()), len(context.context().list_function_names())

    objects, functions = run(20)
    objects_then, functions_then = run(300)
    assert objects_then - objects < 100
    assert functions_then == functions


def test_with_the_cache_off_analysis_runs_at_each_execution(layer) -> None:
    types = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: types.append(context.get_op().type))
    with amanda.apply(tool):
        for _ in range(2):
            layer.loss(layer.x)
        assert types.count("MatMul") == 1
        with amanda.cache_disabled():
            for _ in range(2):
                layer.loss(layer.x)
    assert types.count("MatMul") == 3


def test_ids_are_the_same_for_a_function_and_its_differentiated_one(layer) -> None:
    ids = []
    tool = inserting("insert_before_op", "Relu", lambda value: None)
    tool.add_inst_for_op(lambda context: ids.append((context.get_op().name, context.get_op_id())))
    with amanda.apply(tool):
        layer.loss(layer.x)
        once = list(ids)
        layer.trained(False)
    assert len(set(once)) == len(once)
    assert ids == once
