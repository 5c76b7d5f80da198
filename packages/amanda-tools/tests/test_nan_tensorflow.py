"""The first NaN in TensorFlow: its op and line, also within the bodies of loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow.function import FunctionDriver
from amanda.tools.nan import Finding, NanTool


def first_of(program: Callable[[], Any], **options: Any) -> Finding:
    tool = NanTool(**options)
    with amanda.apply(tool):
        program()
    first = tool.result.first
    assert first is not None
    return first


def line_of(mark: str) -> str:
    """The file and line of this module that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}"))
    return f"{__file__}:{number}"


def loop(x: Any) -> Any:
    for step in tf.range(5):
        y = tf.nn.relu(x - tf.cast(step, tf.float32))
        x = tf.math.log(y - 1.0)  # planted: loop
    return x


def test_a_nan_in_the_body_of_a_loop_of_a_function_is_found_at_its_op_and_line() -> None:
    function = tf.function(loop)
    first = first_of(lambda: function(tf.fill((3,), 100.0)))
    assert (first.phase, first.type, first.source) == ("forward", "log", line_of("loop"))
    (read,) = first.inputs.values()
    assert read.nan == read.inf == 0
    assert read.most is not None
    assert read.most < 0


def test_so_is_one_in_the_condition_of_a_loop() -> None:
    def halved(x: Any) -> Any:
        while tf.reduce_sum(x) > 1.0 or tf.math.log(x) > 0.0:  # planted: condition
            x = x - 1.5
        return x

    first = first_of(lambda: tf.function(halved)(tf.constant(4.2)))
    assert (first.type, first.source) == ("log", line_of("condition"))


def test_so_is_one_in_a_loop_of_a_session() -> None:
    with tf.Graph().as_default() as graph:
        data = tf.compat.v1.placeholder(tf.float32, (3,))
        _, result = tf.while_loop(
            lambda i, x: i < 4,
            lambda i, x: (i + 1, tf.sqrt(x - 2.0)),  # planted: session
            (0, data),
        )
    with tf.compat.v1.Session(graph=graph) as session:
        first = first_of(lambda: session.run(result, {data: np.full(3, 9.0)}))
    assert (first.type, first.source) == ("sqrt", line_of("session"))


def test_so_is_one_in_a_branch_and_in_a_loop_of_python() -> None:
    @tf.function
    def branch(x: Any) -> Any:
        if tf.reduce_sum(x) > 0:
            y = tf.sqrt(-x)  # planted: branch
        else:
            y = x
        return y

    first = first_of(lambda: branch(tf.ones(2)))
    assert (first.type, first.source) == ("sqrt", line_of("branch"))
    first = first_of(lambda: loop(tf.fill((3,), 100.0)))
    assert (first.type, first.source) == ("log", line_of("loop"))


@pytest.mark.parametrize("traced", [False, True])
def test_one_of_the_backward_pass_is_told_with_the_line_of_its_forward_op(traced: bool) -> None:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x))  # planted: gradient
        return tape.gradient(y, x)

    first = first_of(lambda: (tf.function(step) if traced else step)(tf.zeros(3)), inf=True)
    assert (first.phase, first.type) == ("backward", "sqrt_backward")
    assert first.source == line_of("gradient")


def test_one_in_a_layer_of_a_model_that_is_trained_is_found() -> None:
    class Planted(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.math.log(tf.abs(x) - 100.0)  # planted: layer

    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3), Planted(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    first = first_of(lambda: model.fit(np.ones((2, 4)), np.ones((2, 1)), verbose=0))
    assert (first.phase, first.type, first.source) == ("forward", "log", line_of("layer"))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [tf.complex64, tf.bfloat16, tf.float16, tf.float64])
def test_numbers_of_every_type_are_looked_at(dtype: Any, traced: bool) -> None:
    def planted(x: Any) -> Any:
        return tf.math.log(tf.zeros_like(x))  # planted: types

    x = tf.cast(tf.fill((3,), 3e4), dtype)
    first = first_of(lambda: (tf.function(planted) if traced else planted)(x), inf=True)
    assert (first.type, first.source) == ("log", line_of("types"))
    assert first.outputs[0].inf == 3
    fine, tool = tf.cast(tf.fill((3,), 3e38), tf.complex64) * (1 + 1j), NanTool(inf=True)
    with amanda.apply(tool):
        tf.reverse(fine, [0])
    assert not tool.result.findings


def looked(program: Callable[[], Any]) -> Any:
    tool = NanTool()
    with amanda.apply(tool):
        program()
    return tool.result


def attention(x: Any, kept: Any) -> Any:
    scores = tf.where(kept, tf.matmul(x, x, transpose_b=True), float("-inf"))
    return tf.nn.softmax(scores)  # planted: softmax


def in_each_mode(function: Callable[..., Any], *inputs: Any) -> dict[str, Callable[[], Any]]:
    """A call in eager mode, as a function, and in a session."""
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(value.dtype, value.shape) for value in inputs]
        result = function(*fed)
    session = tf.compat.v1.Session(graph=graph)
    return {
        "eager": lambda: function(*map(tf.constant, inputs)),
        "function": lambda: tf.function(function)(*map(tf.constant, inputs)),
        "session": lambda: session.run(result, dict(zip(fed, inputs, strict=True))),
    }


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_a_mask_of_inf_is_left_alone_and_a_row_that_is_masked_whole_is_not(mode: str) -> None:
    x, mask = np.ones((3, 4), np.float32), np.tril(np.ones((3, 3), bool))
    assert not looked(in_each_mode(attention, x, mask)[mode])
    mask[0] = False
    result = looked(in_each_mode(attention, x, mask)[mode])
    assert [(finding.type, finding.source) for finding in result.findings] == [
        ("softmax", line_of("softmax"))
    ]


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_nan_that_comes_in_is_told(mode: str) -> None:
    x = np.full((2, 3), np.nan, np.float32)
    result = looked(in_each_mode(lambda x: tf.matmul(x, tf.ones((3, 2))), x)[mode])
    assert result.sentence.startswith("First NaN: input 0 of matmul has 6 NaN of 6, read ")
    assert not result.findings


@pytest.mark.parametrize("traced", [False, True])
def test_a_variable_that_holds_nan_is_told(traced: bool) -> None:
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    layer.kernel.assign(np.full((4, 3), np.nan))
    call = tf.function(layer) if traced else layer
    result = looked(lambda: call(tf.ones((2, 4))))
    assert not result.findings
    assert " has 12 NaN of 12, read " in result.sentence


def findings(program: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Types of the ops at which NaN begins, and what held NaN before."""
    tool = NanTool()
    with amanda.apply(tool):
        program()
    return [entry.type for entry in tool.result.findings], [entry.what for entry in tool.result.entered]


def test_calls_of_functions_loops_and_branches_are_no_findings_beside_the_op_within() -> None:
    inner = tf.function(lambda x: tf.math.log(x - 5.0))

    def looped(x: Any) -> Any:
        for _ in tf.range(2):
            x = tf.cond(tf.reduce_any(x > 0.0), lambda x=x: tf.math.log(x - 5.0), lambda x=x: x)
        return x

    x = tf.constant([1.0, 6.0])
    assert findings(lambda: tf.function(lambda x: inner(x) * 2.0)(x)) == (["log"], [])
    assert findings(lambda: tf.function(looped)(x)) == (["log"], [])


def test_what_iterators_and_lists_hold_begins_nowhere() -> None:
    data = tf.data.Dataset.from_tensor_slices(np.float32([[np.nan, 1]]))
    assert findings(lambda: [tf.reduce_sum(row) for row in data]) == ([], ["input 0 of IteratorGetNext"])

    def listed(x: Any) -> Any:
        rows = tf.TensorArray(tf.float32, 2).unstack(x)
        return tf.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s + rows.read(i)), (0, 0.0))[1]

    types, entered = findings(lambda: tf.function(listed)(tf.constant([np.nan, 1.0])))
    assert types == []
    assert len(entered) == 1


def test_training_on_nan_names_what_holds_it_alone() -> None:
    model = keras.Sequential([keras.layers.LSTM(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.random.default_rng(0).random((4, 3, 2)).astype("float32")
    data[1] = np.nan
    types, entered = findings(lambda: model.fit(data, np.zeros((4, 1)), verbose=0))
    assert types == []
    assert entered


@tf.function
def masked_rows(x: Any) -> Any:
    mask = tf.where(x > 0.0, 0.0, -np.inf)  # Inf at each execution, and nothing else is looked at
    half = tf.cast(tf.cast(x, tf.float16), tf.bfloat16)
    for _ in tf.range(2):
        x = tf.reduce_sum(tf.exp(x + mask), -1, keepdims=True) + x
    y = tf.math.log(x - 2.0)
    first, second = tf.split(tf.complex(y, y), 2, axis=-1)
    return tf.abs(first) + tf.abs(second), half * 2, tf.math.log(tf.cast(half, tf.float64))


@pytest.mark.parametrize("inf", [False, True])
def test_what_native_code_finds_finite_is_passed_over_and_nothing_else(
    inf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> Any:
        tool = NanTool(inf=inf)
        with amanda.apply(tool):
            for number in (1.0, -3.0, 2.0, np.nan, 5.0):
                masked_rows(tf.constant([[number, 1.0]]))
        return tool.result.to_dict()

    native = told()
    monkeypatch.setattr("amanda.interceptor.nonfinite", lambda arrays: list(range(len(arrays))))
    assert native == told()
    assert "NaN" in str(native)


@pytest.mark.parametrize("numbers", [(1.0, 2.0, 3.0), (1.0, np.nan, 2.0, 3.0)])
def test_ops_that_end_in_a_later_batch_than_they_begin_in_are_counted_once(
    numbers: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    @tf.function
    def step(x: Any) -> Any:
        return tf.sqrt(tf.exp(x) + 1.0) @ tf.ones((2, 2))

    def result() -> Any:
        tool = NanTool()
        with amanda.apply(tool):
            for number in numbers:
                step(tf.constant([[number, 1.0]]))
        return tool.result

    together = result()
    monkeypatch.setattr(FunctionDriver, "observer_bytes", 0)  # a batch for each observer
    apart = result()
    assert apart.executions == together.executions > 3 * len(numbers)
    assert [entered.step for entered in apart.entered] == [entered.step for entered in together.entered]
