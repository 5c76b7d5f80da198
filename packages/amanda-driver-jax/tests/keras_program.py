"""A model of Keras on JAX that is trained bare, under tools that insert nothing and one that counts.

Run with KERAS_BACKEND=jax in the environment, and the name of the model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from hashlib import sha256
from typing import Any

import keras
import numpy as np

import amanda
from amanda.drivers.jax import JaxDriver
from amanda.testing import attached

RNG = np.random.default_rng(0)


class Looking(amanda.Tool):
    """Looks at every op, forward and backward, and inserts nothing."""

    def __init__(self) -> None:
        self.op_types: set[str] = set()
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(
            lambda context: self.op_types.add(context.get_backward_op().__name__), backward=True
        )

    def look(self, context: Any) -> None:
        self.op_types.add(context.get_op_type())


class Counting(amanda.Tool):
    """Observes every op: counts products and convolutions by module, with the paths of their weights."""

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


def trained(model: Any, x: Any, y: Any, steps: int, *tools: amanda.Tool) -> tuple[list[float], list[str]]:
    """Return the losses of some steps under tools, and the scope's report."""
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy())
    with amanda.apply(*tools) as scope:
        losses = [float(model.train_on_batch(x, y)) for _ in range(steps)]
    return losses, [str(entry) for entry in scope.report]


def main(name: str) -> None:
    """Write losses, reports and a digest of the weights of each run, and what the tools saw."""
    keras.utils.set_random_seed(0)
    model, x, y = {"resnet50": resnet50, "text": text}[name]()
    start = model.get_weights()
    losses, reports, weights, look, count = [], [], [], Looking(), Counting()
    for steps, tools in ((20, ()), (20, (amanda.Tool(),)), (20, (look,)), (2, (count,))):
        model.set_weights(start)
        epoch_losses, report = trained(model, x, y, steps, *tools)
        losses.append(epoch_losses)
        reports += report
        weights.append(sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest())
    content: dict[str, Any] = {"calls": count.calls, "weights": count.weights, "seen": sorted(look.op_types)}
    content["layers"] = [layer.name for layer in model.layers]
    sys.stdout.write(json.dumps({"losses": losses, "digests": weights, "reports": reports, **content}))


if __name__ == "__main__":
    with attached(JaxDriver):
        main(sys.argv[1])
