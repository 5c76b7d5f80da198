"""A CNN and a vision transformer of Keras layers on the digits."""

from collections.abc import Callable
from typing import Any

import keras
from _digits import digits

Model = Any


def cnn() -> Model:
    """Two convolutions and a classifier."""
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
    """Patches of 2 by 2 pixels, blocks of attention and a GELU network, normalised before."""
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
    """How a model is trained on the digits, and how well it does.

    epochs: of the dense model.  tuning: epochs of what comes after.
    """

    measures = ("accuracy",)

    def __init__(self, make: Callable[[], Model], epochs: int = 24, tuning: int = 5) -> None:
        self.make, self.epochs, self.tuning, self.digits = make, epochs, tuning, digits()

    def dense(self, seed: int) -> Model:
        """A trained model."""
        keras.utils.set_random_seed(seed)
        model = self.make()
        self._train(model, seed, self.epochs, 1.5e-3)
        return model

    def tune(self, model: Model, seed: int, *callbacks: Any) -> None:
        """Train on."""
        self._train(model, seed, self.tuning, 1e-3, callbacks)

    def calibrate(self, model: Model) -> None:
        """Run the model on some of the images it was trained on."""
        model.predict(self.digits.images[:256], batch_size=256, verbose=0)

    def score(self, model: Model) -> dict[str, float]:
        """The share of right answers among the images kept for testing."""
        logits = model.predict(self.digits.test_images, batch_size=540, verbose=0)
        return {"accuracy": float((logits.argmax(1) == self.digits.test_labels).mean())}

    def _train(self, model: Model, seed: int, epochs: int, rate: float, callbacks: Any = ()) -> None:
        keras.utils.set_random_seed(seed)
        steps = epochs * -(-len(self.digits.images) // 32)
        decay = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.05 * rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(decay), loss, jit_compile=False)  # XLA divides otherwise
        images, labels = self.digits.images, self.digits.labels
        model.fit(images, labels, batch_size=32, epochs=epochs, verbose=0, callbacks=[*callbacks])
