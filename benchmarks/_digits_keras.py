"""A CNN and a vision transformer of Keras layers on the digits."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")

import keras
import tensorflow as tf
from _digits import digits
from _methods import Method, Scores

from amanda.drivers.tensorflow import without_fusion

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from baselines.magnitude_keras import MagnitudePruning
from baselines.quantize_keras import Quantized

Model = Any


def cnn() -> Model:
    """Return two convolutions and a classifier."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


class Positions(keras.layers.Layer):
    """Adds a learned vector to each patch."""

    def build(self, shape: Any) -> None:
        self.positions = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, patches: Any) -> Any:
        return patches + self.positions


def vit(width: int = 32, blocks: int = 2, heads: int = 4) -> Model:
    """Return patches of 2 by 2 pixels, blocks of attention and a GELU network, normalised before."""
    layers = keras.layers
    images = keras.Input((8, 8, 1))
    hidden = layers.Reshape((16, width))(layers.Conv2D(width, 2, strides=2)(images))
    hidden = Positions()(hidden)
    for _ in range(blocks):
        normed = layers.LayerNormalization(epsilon=1e-6)(hidden)
        hidden = hidden + layers.MultiHeadAttention(heads, width // heads)(normed, normed)
        normed = layers.LayerNormalization(epsilon=1e-6)(hidden)
        hidden = hidden + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normed))
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization(epsilon=1e-6)(hidden))
    return keras.Model(images, layers.Dense(10)(pooled))


class DigitsStudy:
    """Models are not copied but set back, and operators are not fused.

    Accuracy is the share of right answers among the images kept for testing.
    epochs: of the dense model.  tuning: epochs of fine-tuning.
    """

    layers, qat, running = ("conv2d", "matmul"), "qat", staticmethod(without_fusion)

    def __init__(self, make: Callable[[], Model], epochs: int = 24, tuning: int = 5) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self.make, self.epochs, self.tuning, self.digits = make, epochs, tuning, digits()

    def dense(self, seed: int) -> Model:
        """Return a trained model."""
        keras.utils.set_random_seed(seed)
        model = self.make()
        self._train(model, seed, self.epochs, 1.5e-3)
        self.begun = model.get_weights()
        return model

    def fresh(self, model: Model) -> Model:
        """Return the model as it was after `dense`."""
        model.set_weights(self.begun)
        return model

    def weights(self, model: Model) -> dict[int, Any]:
        """Return the model's weights."""
        return dict(enumerate(model.get_weights()))

    def tune(self, model: Model, seed: int, more: Iterable[Any] = ()) -> None:
        """Train on, with `more` callbacks."""
        self._train(model, seed, self.tuning, 1e-3, more)

    def calibrate(self, model: Model) -> None:
        """Run the model on some of the images for training."""
        model.predict(self.digits.images[:256], batch_size=256, verbose=0)

    def score(self, model: Model) -> Scores:
        """Return the accuracy."""
        logits = model.predict(self.digits.test_images, batch_size=540, verbose=0)
        return {"accuracy": float((logits.argmax(1) == self.digits.test_labels).mean())}

    def by_hand(self, model: Model, method: Method, seed: int) -> tuple[Scores, Model]:
        """Return the scores of a method without tools, and the model as it then is."""
        if method.kind in ("", "prune"):
            pruning = [MagnitudePruning(model, 0.5)] if method.kind else []
            if method.tune:
                self.tune(model, seed, pruning)
            return self.score(model), model
        quantized = Quantized(model, self.calibrate, method.bits)
        if method.tune:
            quantized.set("train")
            self.tune(model, seed)
            quantized.set("fixed")
        scores = self.score(model)
        quantized.remove()
        return scores, model

    def _train(
        self, model: Model, seed: int, epochs: int, rate: float, callbacks: Iterable[Any] = ()
    ) -> None:
        keras.utils.set_random_seed(seed)
        steps = epochs * -(-len(self.digits.images) // 32)
        decay = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.05 * rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(decay), loss, jit_compile=False)  # XLA divides otherwise
        images, labels = self.digits.images, self.digits.labels
        model.fit(images, labels, batch_size=32, epochs=epochs, verbose=0, callbacks=[*callbacks])
