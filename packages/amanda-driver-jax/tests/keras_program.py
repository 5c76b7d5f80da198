"""A model of Keras on JAX that is trained bare, under a tool and under a looking tool; writes what was seen.

Run with KERAS_BACKEND=jax in the environment, and the name of the model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import keras
import numpy as np

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached

RNG = np.random.default_rng(0)


class Looking(amanda.Tool):
    """Looks at every op: counts products and convolutions by module, with the paths of their weights."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.weights: dict[str, str] = {}
        self.add_inst_for_op(self.look)

    def look(self, context: Any) -> None:
        name = f"{context.get_scope()}: {context.get_op_type()}"
        if context.get_op_type() in ("dot_general", "conv_general_dilated"):
            variable = context.get_variable(1)
            if variable is not None:
                self.weights[context.get_variable_path(variable)] = context.get_scope()
        context.insert_before_op(amanda.observer(lambda *_: self.calls.update([name])))


def resnet50() -> tuple[Any, Any, Any]:
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=4)
    for layer in model.layers:  # of two images a normalisation gives signs alone, which a last digit turns
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    return model, RNG.normal(size=(2, 32, 32, 3)).astype(np.float32), np.array([0, 1])


def text() -> tuple[Any, Any, Any]:
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(16, 16, name="tokens")(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization(name="norm")(x))
    model = keras.Model(tokens, keras.layers.Dense(3, activation="softmax", name="head")(x))
    return model, RNG.integers(0, 16, (4, 8)), np.array([0, 1, 2, 0])


def main(name: str) -> None:
    """Write losses and reports of each run, and what the looking tool saw."""
    keras.utils.set_random_seed(0)
    model, x, y = {"resnet50": resnet50, "text": text}[name]()
    start = model.get_weights()
    losses, reports, look = [], [], Looking()
    for tools in ((), (amanda.Tool(),), (look,)):
        model.set_weights(start)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy())
        with amanda.apply(*tools) as scope:
            losses.append([float(model.train_on_batch(x, y)) for _ in range(2)])
        reports += [str(one) for one in scope.report]
    seen = {"calls": look.calls, "weights": look.weights, "layers": [one.name for one in model.layers]}
    sys.stdout.write(json.dumps({"losses": losses, "reports": reports, **seen}))


if __name__ == "__main__":
    with attached(JaxDriver):
        main(sys.argv[1])
