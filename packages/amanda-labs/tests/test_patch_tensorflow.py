from typing import Any

import numpy as np
import pytest

import amanda
from amanda.tools.patch import PatchError, PatchTool

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")


@pytest.fixture
def model() -> Any:
    keras.utils.set_random_seed(0)

    class Block(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.inner = keras.layers.Dense(4, name="inner")

        def call(self, x: Any) -> Any:
            return keras.ops.relu(self.inner(x)) + x

    given = keras.Input((3, 4))
    last = keras.layers.Dense(2, name="last")
    return keras.Model(given, last(Block(name="second")(Block(name="first")(given))))


@pytest.fixture
def x() -> Any:
    return tf.random.uniform((2, 3, 4), seed=1)


def under(tool: Any, run: Any) -> Any:
    with amanda.apply(tool):
        return run()


def steered(model: Any, x: Any, vector: Any) -> Any:
    first, second, last = (model.get_layer(name) for name in ("first", "second", "last"))
    return last(second(first(x) + vector))


@pytest.mark.parametrize("form", ["eager", "function"])
def test_layers_are_steered_as_by_hand(model: Any, x: Any, form: str) -> None:
    vector = tf.random.uniform((4,), seed=2)
    run = tf.function(lambda value: model(value)) if form == "function" else model
    tool = PatchTool("first", add=vector)
    for _ in range(2):
        assert np.array_equal(under(tool, lambda: run(x)), steered(model, x, vector))
    assert [(one.point, one.changed) for one in tool.result.patched] == [("first", 2)]
    assert np.array_equal(run(x), model(x))


def test_saved_values_of_a_layer_in_a_layer_are_set(model: Any, x: Any) -> None:
    other, clean = tf.random.uniform((2, 3, 4), seed=3), PatchTool("first/inner")
    under(clean, lambda: model(x))
    wanted = keras.ops.relu(model.get_layer("first").inner(x)) + other
    wanted = model.get_layer("last")(model.get_layer("second")(wanted))
    assert np.array_equal(under(PatchTool("first/inner", set=clean), lambda: model(other)), wanted)


def test_gradients_reach_a_variable_in_eager_mode(model: Any, x: Any) -> None:
    vector = tf.Variable(tf.zeros((4,)))
    tool = PatchTool("first", add=vector, differentiable=True)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(under(tool, lambda: model(x)))
    found = tape.gradient(loss, vector)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(steered(model, x, vector))
    assert np.array_equal(found, tape.gradient(loss, vector))
    assert not tool.result.remarks
    tool = PatchTool("first", add=vector, differentiable=True)
    under(tool, lambda: tf.function(lambda value: model(value))(x))
    assert "in graphs of tensorflow" in tool.result.remarks[0]


def test_calls_of_layers_are_plain_after_tools_of_both_sides(model: Any, x: Any) -> None:
    plain_call = keras.Operation.__call__
    inputs, outputs = PatchTool("second", side="input"), PatchTool("first")
    with amanda.apply(outputs, inputs):
        model(x)
    assert np.array_equal(inputs.saved["second"][0], outputs.saved["first"][0])
    assert keras.Operation.__call__ is plain_call


def test_a_function_that_was_traced_before_is_an_error(model: Any, x: Any) -> None:
    function = tf.function(lambda value: model(value))
    function(x)
    with pytest.raises(PatchError, match="traced in the scope"):
        under(PatchTool("first", scale=0.0), lambda: function(x))


@pytest.mark.parametrize("wrap", [tf.function, lambda function: function], ids=["graph", "eager"])
def test_an_index_counts_the_tensors_in_lists(wrap: Any, x: Any) -> None:
    for index in range(2):
        halves = under(PatchTool(type="split", index=index, scale=0), wrap(lambda: tf.split(x, 2, axis=2)))
        assert [bool(np.any(half)) for half in halves] == [index != 0, index != 1]
        tool = PatchTool(type="AddN", side="input", index=index, scale=0)
        total = under(tool, wrap(lambda: tf.add_n([x, 2 * x])))
        np.testing.assert_array_equal(total, [2 * x, x][index])
    with pytest.raises(PatchError, match="index is 2 and /Split has 2 outputs"):
        under(PatchTool(type="split", index=2), wrap(lambda: tf.split(x, 2, axis=2)))


@pytest.mark.parametrize("wrap", [tf.function, lambda function: function], ids=["graph", "eager"])
def test_without_an_index_every_tensor_of_a_list_of_outputs_is_a_point(wrap: Any, x: Any) -> None:
    split = wrap(lambda: tf.split(x, 2, axis=2))
    tool = PatchTool(type="split", index=None)
    under(tool, split)
    assert [values[0].shape for values in tool.saved.values()] == [(2, 3, 2)] * 2
    halves = under(PatchTool(type="split", index=None, scale=0), split)
    assert not np.any(halves)
