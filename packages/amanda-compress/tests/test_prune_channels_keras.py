"""Pruning of channels in Keras models: what is removed is what was masked, and models are rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import ChannelPruneResult, ChannelPruneTool, PruneError
from amanda.tools.prune.channels import _plan

Array = NDArray[Any]


def random(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def unlike(model: Any) -> Any:
    """Give averages, scales and offsets values as after training, so that no layer passes 0 on as 0."""
    rng = np.random.default_rng(0)
    for one in model.weights:
        if one.name in ("gamma", "moving_variance"):
            one.assign(rng.uniform(0.5, 1.5, one.shape))
        elif one.name in ("beta", "moving_mean", "bias"):
            one.assign(rng.normal(0, 0.1, one.shape))
    return model


def macs(model: Any, x: Array) -> int:
    flops = FlopsTool()
    with amanda.apply(flops):
        model(x, training=False)
    found: int = flops.result.total("macs")
    return found


def elements(model: Any) -> int:
    """Return how many floating-point numbers the weights have, as the model counts them but for integers."""
    return sum(int(np.prod(one.shape)) for one in model.weights if "float" in one.dtype)


def removed(model: Any, x: Array, **options: Any) -> ChannelPruneResult:
    """Remove channels; check that the new model computes what the given one did with masks, not before."""
    unlike(model)
    before, dense = [one.numpy() for one in model.weights], model(x, training=False).numpy()
    tool = ChannelPruneTool(**options)
    tool.prepare(model, x)
    compiled = tf.function(lambda value: model(value, training=False))
    with amanda.apply(tool) as scope:
        masked = model(x, training=False).numpy()
        in_graph = compiled(tf.constant(x)).numpy()
    assert str(scope.report) == "everything that ran was instrumented"
    result = tool.finalize(model, remove=True)
    scale = np.abs(masked).max()
    assert np.abs(in_graph - masked).max() <= 1e-5 * scale
    assert np.abs(result.model(x, training=False).numpy() - masked).max() <= 1e-5 * scale
    assert np.abs(dense - masked).max() > 1e-3 * scale
    assert all(np.array_equal(one.numpy(), old) for one, old in zip(model.weights, before, strict=True))
    assert type(result.model) is type(model)
    assert result.parameters == elements(model)
    assert result.kept_parameters == elements(result.model)
    assert macs(result.model, x) == pytest.approx(result.flops * macs(model, x), rel=1e-9)
    return result


def network(*inner: Any, shape: tuple[int, ...] = (8, 8, 3)) -> Any:
    return keras.Sequential([keras.Input(shape), *inner, layers.Flatten(), layers.Dense(5)])


APPLICATIONS = {
    "DenseNet121": 0.35, "EfficientNetB0": 0.35, "MobileNetV2": 0.35, "ResNet50": 0.35, "VGG16": 0.35,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", APPLICATIONS)
def test_application_is_smaller_and_computes_what_was_masked(name: str) -> None:
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None
    )
    result = removed(model, random(2, 64, 64, 3))
    assert result.model.count_params() < APPLICATIONS[name] * model.count_params()
    # the layer computes with numbers that are made of these when it is built
    normalized = ["normalization/mean", "normalization/variance"] if name == "EfficientNetB0" else []
    assert result.unread == normalized
    assert list(result.left) == ["predictions/kernel"]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras when it saves
def test_digits_train_on_after_removal_and_load_from_a_file(tmp_path: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    x = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(),
        layers.MaxPooling2D(), layers.Conv2D(32, 3, padding="same", activation="relu"), layers.Flatten(),
        layers.Dense(32, activation="relu"), layers.Dense(10),
    ])  # fmt: skip
    tool = ChannelPruneTool(sparsity=0.5)
    tool.prepare(model, x[:8])
    smaller = tool.finalize(model, remove=True).model
    assert [one.filters for one in smaller.layers if isinstance(one, layers.Conv2D)] == [8, 16]
    assert macs(smaller, x[:8]) < 0.4 * macs(model, x[:8])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    smaller.compile("adam", loss)
    history = smaller.fit(x, labels, epochs=3, verbose=0).history["loss"]
    assert history[-1] < 0.5 * history[0]
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.saving.load_model(tmp_path / "smaller.keras")
    assert np.array_equal(loaded(x[:8]).numpy(), smaller(x[:8]).numpy())


def test_masks_train_in_fit_and_stay() -> None:
    model, x = network(layers.Conv2D(8, 3), layers.BatchNormalization()), random(16, 8, 8, 3)
    tool = ChannelPruneTool()
    tool.prepare(model, x)
    model.compile("adam", "mse")
    with amanda.apply(tool):
        history = model.fit(x, random(16, 5), epochs=4, verbose=0).history["loss"]
        masked = model(x, training=False).numpy()
    assert history[-1] < history[0]
    smaller = tool.finalize(model, remove=True).model
    assert np.abs(smaller(x, training=False).numpy() - masked).max() <= 1e-5 * np.abs(masked).max()


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        (layers.SeparableConv2D(8, 3, depth_multiplier=2), 4),
        (layers.Conv2DTranspose(8, 3, strides=2), 4),
        (layers.Conv2D(8, 3, dilation_rate=2), 4),
    ],
)
def test_layer_has_fewer_filters(layer: Any, kept: int) -> None:
    model = network(layers.Conv2D(8, 3, padding="same"), layers.PReLU(shared_axes=[1, 2]), layer)
    result = removed(model, random(2, 8, 8, 3))
    assert result.model.layers[0].filters == 4
    assert result.model.layers[2].filters == kept


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.Conv2D, (8, 8, 3)), (layers.Conv2DTranspose, (8, 8, 3)), (layers.SeparableConv2D, (8, 8, 3)),
        (layers.Conv1D, (8, 3)), (layers.Conv3D, (4, 4, 4, 3)),
    ],
)  # fmt: skip
def test_one_channel_of_each_layer_stays(layer: Any, shape: tuple[int, ...]) -> None:
    model = network(
        layer(4, 2), layers.BatchNormalization(), layers.ReLU(), layer(6, 2), layers.Flatten(),
        layers.Dense(5, "relu"), shape=shape,
    )  # fmt: skip
    result = removed(model, random(2, *shape), sparsity=0.99)
    assert [row[4] for row in result.rows()] == [1, 1, 1]
    assert not any("does not suit" in why for why in result.left.values())


def test_a_budget_of_latency_prunes_a_small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "_share_of_time", lambda plan, example, named: plan.remaining_work)
    result = removed(network(layers.Conv2D(8, 3), layers.Conv2D(8, 3)), random(2, 8, 8, 3), of="latency")
    assert result.latency is not None
    assert 0.2 < result.latency <= 0.5


# Of Keras: the layers after the first have no use for the mask.
@pytest.mark.filterwarnings(r"ignore:[\s\S]*does not support masking:UserWarning")
@pytest.mark.parametrize("is_by_name", [False, True])
def test_the_time_of_a_call_is_that_of_a_call_with_its_inputs_by_name(is_by_name: bool) -> None:
    masks: list[Any] = []

    class Masked(layers.Layer):
        def call(self, x: Any, mask: Any = None) -> Any:
            masks.append(mask)
            return x

    model = network(Masked(), layers.Conv2D(8, 3), layers.Conv2D(8, 3))
    x, mask = random(2, 8, 8, 3), np.ones((2, 8), bool)
    tool = ChannelPruneTool(of="latency")
    if is_by_name:
        tool.prepare(model, inputs=x, mask=mask)
    else:
        tool.prepare(model, x, mask=mask)
    # A symbol, by which the compiled function is traced that is timed.
    assert any(isinstance(value, tf.Tensor) and not hasattr(value, "numpy") for value in masks)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras when it saves
@pytest.mark.parametrize(("groups", "filters"), [(4, 6), (12, 6), (-1, 6), (3, 4)])
def test_group_normalization_loses_whole_groups(groups: int, filters: int, tmp_path: Path) -> None:
    model = network(
        layers.Conv2D(12, 3), layers.GroupNormalization(groups), layers.ReLU(), layers.Conv2D(8, 3)
    )
    x = random(2, 8, 8, 3)
    smaller = removed(model, x).model
    assert smaller.layers[0].filters == filters
    assert smaller.layers[1].groups == filters * model.layers[1].groups // 12
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.saving.load_model(tmp_path / "smaller.keras")
    assert np.array_equal(loaded(x).numpy(), smaller(x).numpy())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups": 4, "scale": False, "center": False}, "Number of groups"),
        ({"groups": 1}, "Mean of normal computes over them"),
    ],
)
def test_channels_of_a_group_normalization_that_cannot_lose_groups_are_left(
    options: dict[str, Any], reason: str
) -> None:
    layer = layers.GroupNormalization(**options, name="normal")
    model = network(layers.Conv2D(12, 3), layer, layers.Conv2D(8, 3))
    result = removed(model, random(2, 8, 8, 3))
    assert [one.filters for one in result.model.layers if isinstance(one, layers.Conv2D)] == [12, 4]
    assert any(reason in why for why in result.left.values())


def test_reshape_and_a_model_within_a_model_become_smaller() -> None:
    inner = network(layers.Conv2D(8, 3), layers.GlobalAveragePooling2D(), layers.Reshape((1, 1, 8)))
    given = keras.Input((8, 8, 3))
    model = keras.Model(given, layers.Dense(4)(layers.ReLU()(inner(given))))
    result = removed(model, random(2, 8, 8, 3))
    assert result.model.layers[1].layers[2].target_shape == (1, 1, 4)


def test_normalization_keeps_what_it_was_adapted_to() -> None:
    normalization, x = layers.Normalization(), random(2, 8, 8, 3) * 3 + 2
    normalization.adapt(x)
    removed(network(normalization, layers.Conv2D(8, 3)), x)


class Own(layers.Layer):
    """A layer whose config does not say how many channels it has."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.kernel)


def test_layers_that_cannot_say_are_left_with_the_reason() -> None:
    model = network(
        layers.Conv2D(8, 3), layers.LayerNormalization(), layers.Conv2D(8, 3), Own(), layers.ReLU()
    )
    tool = ChannelPruneTool()
    tool.prepare(model, random(2, 8, 8, 3))
    left = tool.result.left
    assert any("the config of Own says no number" in why for why in left.values())
    assert any("mean of layer_normalization" in why.lower() for why in left.values())


class Subclassed(keras.Model):
    """A model with code of its own."""

    def call(self, x: Any) -> Any:
        return x


def test_model_with_code_of_its_own_is_refused() -> None:
    with pytest.raises(PruneError, match="a Subclassed with code of its own: no config says its sizes"):
        ChannelPruneTool().prepare(Subclassed(), random(1, 4))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_layers_of_mixed_precision_become_smaller(policy: str) -> None:
    inner = layers.Conv2D(8, 3, dtype=policy), layers.Conv2D(6, 3, dtype=policy)
    model, x, tool = network(*inner), random(2, 8, 8, 3), ChannelPruneTool()
    dense = model(x, training=False).numpy()
    tool.prepare(model, x)
    with amanda.apply(tool):
        masked = model(x, training=False).numpy()
    smaller = tool.finalize(model, remove=True).model
    assert [tuple(one.kernel.shape) for one in smaller.layers[:2]] == [(3, 3, 3, 4), (3, 3, 4, 3)]
    assert {one.dtype for one in smaller.weights} == {"float32"}
    assert smaller.layers[0].compute_dtype == policy.removeprefix("mixed_")
    scale = np.abs(masked).max()
    assert np.abs(smaller(x, training=False).numpy() - masked).max() <= 0.02 * scale  # sums of bfloat16
    assert np.abs(masked - dense).max() > 0.1 * scale


def test_a_plan_that_could_not_be_checked_is_forgotten() -> None:
    model, x, tool = network(layers.Conv2D(8, 3)), random(2, 8, 8, 3), ChannelPruneTool()
    tool.prepare(model, x)
    with pytest.raises(PruneError, match="has NaN or Inf"):
        tool.prepare(model, x * np.nan)
    with pytest.raises(PruneError, match="a model that it has not met"):
        tool.finalize(model, remove=True)


def test_optimizer_of_keras_is_refused() -> None:
    model, tool = network(layers.Conv2D(8, 3)), ChannelPruneTool()
    tool.prepare(model, random(2, 8, 8, 3))
    with pytest.raises(PruneError, match="compile a smaller model of Keras with a new one"):
        tool.finalize(model, remove=True, optimizer=keras.optimizers.Adam())


def test_zeros_are_written_into_the_weights_without_removal() -> None:
    model, x = unlike(network(layers.Conv2D(8, 3), layers.BatchNormalization())), random(2, 8, 8, 3)
    tool = ChannelPruneTool()
    tool.prepare(model, x)
    with amanda.apply(tool):
        masked = model(x, training=False).numpy()
    assert tool.finalize(model).model is model
    assert np.abs(model(x, training=False).numpy() - masked).max() <= 1e-6 * np.abs(masked).max()
    assert int((np.abs(model.layers[0].kernel.numpy()).sum((0, 1, 2)) == 0).sum()) == 4
