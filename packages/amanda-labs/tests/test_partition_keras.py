"""partition: submodels of Keras' models, applied one after the other, are the model, to the bit."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import children
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import ToolError
from amanda.tools.partition import PartitionError, PartitionResult, PartitionTool

KERAS = ["keras", "tf_keras"]


@pytest.fixture(params=KERAS)
def keras(request: pytest.FixtureRequest) -> Any:
    found = importlib.import_module(request.param)
    found.utils.set_random_seed(0)
    return found


def sequential(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((16,)), layers.Dense(32, activation="relu"), layers.Dense(32), layers.ReLU(),
         layers.Dense(32, activation="tanh"), layers.Dense(4)]
    )  # fmt: skip


def residual(keras: Any) -> Any:
    """An input that the first and the last layer read, a model within, and a layer that is called twice."""
    layers = keras.layers
    block = keras.Sequential([layers.Dense(16, name="inner"), layers.ReLU()], name="block")
    twice = layers.Dense(16, name="twice")
    given = keras.Input((16,))
    x = layers.Add()([block(given), given])
    x = layers.BatchNormalization()(twice(x))
    x = layers.Concatenate()([twice(x), given])
    return keras.Model(given, [layers.Dense(4, name="classes")(x), x])


def several(keras: Any) -> Any:
    """Inputs and outputs with names."""
    layers = keras.layers
    inputs = {"left": keras.Input((8,), name="left"), "right": keras.Input((4, 8), name="right")}
    left, right = layers.Dense(16)(inputs["left"]), layers.Dense(16)(layers.Flatten()(inputs["right"]))
    both = layers.Dense(16, activation="relu")(layers.Multiply()([left, right]))
    return keras.Model(inputs, {"sum": layers.Dense(2)(both), "left": left})


def masked(keras: Any) -> Any:
    """A mask that goes with what crosses, and an operator between symbolic tensors."""
    layers = keras.layers
    given = keras.Input((6,), dtype="int32")
    x = layers.Dense(8)(layers.Dense(8)(layers.Embedding(20, 8, mask_zero=True)(given)))
    return keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)) * 2.0)


def random(*shape: int, seed: int = 0) -> Any:
    return tf.constant(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


MODELS: dict[Callable[[Any], Any], Any] = {
    sequential: lambda: random(8, 16),
    residual: lambda: random(8, 16),
    masked: lambda: tf.constant([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]]),
    several: lambda: {"left": random(8, 8), "right": random(8, 4, 8, seed=1)},
}


def traced(run: Callable[[], Any], **options: Any) -> PartitionResult:
    tool = PartitionTool(**options)
    with amanda.apply(tool):
        run()
    result = tool.result
    assert isinstance(result, PartitionResult)
    return result


def chained(parts: list[Any], x: Any, **options: Any) -> Any:
    for part in parts:
        x = part(x, **options)
    return x


def assert_equal(one: Any, other: Any) -> None:
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)


# Keras warns that a submodel gives no mask on; its own layers read the mask of what it is given.
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning")
@pytest.mark.parametrize(("made", "stages"), [(sequential, 1), (residual, 3), (masked, 2), (several, 2)])
def test_submodels_are_the_model(keras: Any, made: Any, stages: int) -> None:
    model, x = made(keras), MODELS[made]()
    result = traced(lambda: model(x), stages=stages)
    before = [id(one) for one in model.weights]
    parts = result.submodels(model)
    assert len(parts) == stages
    assert all(isinstance(part, keras.Model) for part in parts)
    assert {id(one) for part in parts for one in part.weights} == set(before)
    assert [id(one) for one in model.weights] == before
    for training in (False, True):
        assert_equal(chained(parts, x, training=training), model(x, training=training))
    assert_equal(tf.function(lambda x: chained(parts, x))(x), tf.function(lambda x: model(x))(x))


@pytest.mark.parametrize("mode", ["eager", "function", pytest.param("fit", marks=pytest.mark.slow)])
def test_every_mode_of_tensorflow_tells_the_layers(keras: Any, mode: str) -> None:
    model, x = sequential(keras), random(8, 16)
    model.compile("sgd", "mse")
    runs: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(x),
        "function": lambda: tf.function(lambda x: model(x))(x),
        "fit": lambda: model.fit(x, random(8, 4), batch_size=8, epochs=1, verbose=0),
    }
    parts = traced(runs[mode], stages=2).submodels(model)
    assert [len(part.trainable_variables) for part in parts] in ([4, 4], [2, 6], [6, 2])
    assert_equal(chained(parts, x), model(x))


def test_gradients_are_those_of_the_model(keras: Any) -> None:
    model, x = residual(keras), random(8, 16)

    def gradients(call: Callable[[Any], Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(tf.square(one)) for one in call(x))
        return tape.gradient(loss, model.trainable_variables)

    parts = traced(lambda: gradients(model), stages=2).submodels(model)
    assert_equal(gradients(lambda x: chained(parts, x)), gradients(model))


def test_a_cut_inside_of_a_layer_moves_to_its_edge_and_is_told(keras: Any) -> None:
    layers = keras.layers
    block = keras.Sequential([layers.Dense(32, name=f"inner{i}") for i in range(4)], name="block")
    given = keras.Input((32,))
    model = keras.Model(given, layers.Dense(32, name="last")(block(given)))
    result = traced(lambda: model(random(2, 32)), stages=2)
    assert len(str(result).split("moved")) == 1
    parts = result.submodels(model)
    assert [[one.name for one in part.layers if one.weights] for part in parts] == [["block"], ["last"]]
    told = "The cut moved to the edge of layer block: it is in stage 0, not partly in 1."
    assert told in str(result)
    assert told in result.to_dict()["notes"]


def test_a_layer_of_several_stages_is_shared_and_told(keras: Any) -> None:
    layers = keras.layers
    twice, given = layers.Dense(16, name="twice"), keras.Input((16,))
    model = keras.Model(given, twice(layers.Dense(16, name="middle")(twice(given))))
    result = traced(lambda: model(random(2, 16)), stages=2)
    parts = result.submodels(model)
    assert "Layer twice is called in stages 0, 1, which share it." in str(result)
    assert parts[0].get_layer("twice") is parts[1].get_layer("twice") is model.get_layer("twice")
    assert_equal(chained(parts, random(2, 16)), model(random(2, 16)))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, as it saves
def test_submodels_are_saved_and_summed_up(keras: Any, tmp_path: Any) -> None:
    model, x = sequential(keras), random(8, 16)
    parts = traced(lambda: model(x), stages=2).submodels(model)
    for number, part in enumerate(parts):
        part.save(tmp_path / f"{number}.keras")
    loaded = [keras.models.load_model(tmp_path / f"{number}.keras") for number in range(2)]
    assert_equal(chained(loaded, x), model(x))


class Subclassed:
    """Made for each Keras."""

    def __new__(cls, keras: Any) -> Any:
        class Own(keras.Model):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(4)

            def call(self, x: Any) -> Any:
                return self.second(self.first(x))

        return Own()


def test_models_that_have_no_submodels(keras: Any) -> None:
    model, x = sequential(keras), random(8, 16)
    result = traced(lambda: model(x), stages=2)
    own = Subclassed(keras)
    own(x)
    with pytest.raises(
        PartitionError, match=r"is a Own, whose layers are called by code of its own .* functional"
    ):
        result.submodels(own)
    with pytest.raises(PartitionError, match="which has no inputs yet"):
        result.submodels(keras.Sequential([keras.layers.Dense(4)]))
    with pytest.raises(ToolError, match="submodels was given a Dense; it takes the functional or sequential"):
        result.submodels(model.layers[0])
    other = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4, name="elsewhere")])
    with pytest.raises(
        PartitionError, match=r"none of the .* ops that were traced is in a layer of sequential"
    ):
        result.submodels(other)
    small = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4, activation="relu", name="only")])
    with pytest.raises(PartitionError, match=r"has no whole layer of .*, whose layers are only"):
        traced(lambda: small(x), stages=2).submodels(small)


PROGRAM = """
import sys
import numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
keras = __import__(sys.argv[1])
import amanda
from amanda.tools.partition import PartitionTool

def made():
    keras.utils.set_random_seed(0)
    layers, given = keras.layers, keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same", name="stem")(given)
    for i in range(3):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
        x = layers.Add()([x, layers.Dropout(0.1, seed=i)(y) if sys.argv[2] == "random" else y])
    return keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))

random = np.random.default_rng(0)
images = random.standard_normal((6, 8, 12, 12, 3)).astype("float32")
targets = random.integers(0, 4, (6, 8))
error = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def curve(model, call, compiled):
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = error(y, call(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    step = tf.function(step) if compiled else step
    losses = [float(step(tf.constant(x), tf.constant(y))) for x, y in zip(images, targets)]
    return losses, [one.numpy() for one in model.weights]

for compiled in (False, True):
    plain = made()
    expected = curve(plain, lambda x: plain(x, training=True), compiled)
    model, tool = made(), PartitionTool(stages=2)
    with amanda.apply(tool):
        model(images[0])
    parts, devices = tool.result.submodels(model), []
    model.set_weights(made().get_weights())
    def placed(x):
        for part, device in zip(parts, sys.argv[3:]):
            with tf.device(device):
                x = part(x, training=True)
            devices.append(x.device)
        return x
    losses, weights = curve(model, placed, compiled)
    assert losses == expected[0], (compiled, losses, expected[0])
    assert all(np.array_equal(*both) for both in zip(weights, expected[1])), compiled
    assert losses[-1] != losses[0]
    assert [one.partition("device:")[2] for one in devices[:2]] == [one[1:] for one in sys.argv[3:]], devices
    print("equal", compiled)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "random", "second"),
    # TensorFlow numbers the draws of the ops that tf_keras draws by on each device.
    [
        ("keras", "random", 1),
        pytest.param("tf_keras", "plain", 1, marks=pytest.mark.long),
        pytest.param("tf_keras", "random", 0, marks=pytest.mark.long),
    ],
)
def test_training_on_two_devices_has_the_loss_curve_of_the_model(name: str, random: str, second: int) -> None:
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", PROGRAM, name, random, "/CPU:0", f"/CPU:{second}"]
    done = children.run(command, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
