"""Two replicas on two devices of a processor: trained bare and under tools; told in a file."""

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow import without_fusion
from amanda.tools.flops import FlopsTool
from amanda.tools.stats import StatsTool

DEVICE = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(DEVICE, [tf.config.LogicalDeviceConfiguration()] * 2)
STRATEGY = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
X = np.random.RandomState(0).rand(16, 6).astype("float32")
Y = np.random.RandomState(1).rand(16, 2).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(2)])


def fit():
    with STRATEGY.scope():
        model = network()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return [history.history["loss"], weights(model)]


def loop(graph):
    with STRATEGY.scope():
        model, optimizer = network(), keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def run(x, y):
        return STRATEGY.reduce("SUM", STRATEGY.run(step, args=(x, y)), axis=None)

    call = tf.function(run) if graph else run
    losses = [float(call(x, y)) for x, y in STRATEGY.experimental_distribute_dataset(data)]
    return [losses, weights(model)]


def weights(model):
    """Of each replica."""
    values = [STRATEGY.experimental_local_results(one.value) for one in model.trainable_variables]
    return [[part.numpy().tolist() for part in value] for value in values]


class Masks(amanda.Tool):
    """Every other row of the weight of a product is 0."""

    def __init__(self):
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        if context.get_op_type() == "MatMul":
            context.insert_before_op(masked, inputs=[1])


def masked(weight):
    return weight * (np.arange(weight.shape[0]) % 2)[:, None].astype("float32")


class Everything(amanda.Tool):
    """Routines at all four points of each op, which are given all values and hand them back."""

    def __init__(self):
        self.handles, routine = 0, self.look
        self.add_inst_for_op(lambda context: context.insert_before_op(routine))
        self.add_inst_for_op(lambda context: context.insert_after_op(routine), require_outputs=True)
        self.add_inst_for_op(lambda context: context.insert_before_backward_op(routine), backward=True)
        self.add_inst_for_op(
            lambda context: context.insert_after_backward_op(routine), backward=True, require_outputs=True
        )

    def look(self, *values):
        self.handles += sum(getattr(one, "dtype", None) == tf.resource for one in values)
        return values


def under_each_tool(train):
    """What training gives under tools that are given handles of both devices, bare at first."""
    tools = {"bare": amanda.Tool(), "echo": Everything(), "profile": amanda.load_tool("profile")}
    found = {}
    with without_fusion():
        for name, tool in tools.items():
            with amanda.apply(tool):
                found[name] = train()
    assert tools["echo"].handles > 100
    return found


def main(path: Path) -> None:
    found = {}
    for name, train in (("fit", fit), ("function", lambda: loop(True)), ("eager", lambda: loop(False))):
        bare, flops, stats = train(), FlopsTool(), StatsTool(bins=0)
        with amanda.apply(flops, stats):
            seen = train()
        with amanda.apply(Masks()):
            changed = train()
        found[name] = {
            "bare": bare, "seen": seen, "masked": changed, "flops": flops.result.to_dict(),
            "stats": stats.result.to_dict()["rows"],
        }  # fmt: skip
    found["after"] = loop(True)
    found["each"] = under_each_tool(fit)
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
