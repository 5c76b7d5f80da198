"""A model's forward pass and train step in each mode, run with and without a scope."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .observation import Facts, array_facts, graph_facts, layer_facts, random_states, seed
from .subject import Subject

Scope = Callable[[], AbstractContextManager[Any]]
Arrays = dict[str, np.ndarray[Any, Any]]
RATE, MOMENTUM = 0.01, 0.9


class Observed(NamedTuple):
    """Every array of some steps by name, and all else that can be compared."""

    arrays: Arrays
    further_facts: Facts

    @property
    def facts(self) -> Facts:
        """All of it, arrays by their digests."""
        return {**array_facts(self.arrays), **self.further_facts}


class Program:
    """One model in one mode; every observation starts from the same weights and seeds."""

    def observed(
        self, scope: Scope = nullcontext, after_step: Callable[[], None] = lambda: None, steps: int = 2
    ) -> Observed:
        """Run some steps, each in a scope of its own; all else happens outside of scopes."""
        arrays: Arrays = {}
        self.start()
        for number in range(steps):
            with scope():
                values = self.step()
            arrays |= {f"step {number}: {name}": value for name, value in values.items()}
            after_step()
        arrays |= {f"variable {name}": value for name, value in self.variables().items()}
        return Observed(arrays, {**random_states(), **self.structure()})

    def start(self) -> None:
        """Set weights and random states to what they were at first."""
        raise NotImplementedError

    def step(self) -> Arrays:
        """A forward pass and a train step: outputs, loss, gradients, random values."""
        raise NotImplementedError

    def variables(self) -> Arrays:
        """The present value of every variable."""
        raise NotImplementedError

    def structure(self) -> Facts:
        """What is there besides values."""
        raise NotImplementedError


class EagerProgram(Program):
    """A Keras model and its optimizer, called eagerly."""

    def __init__(self, subject: Subject) -> None:
        import keras

        keras.backend.clear_session()
        seed()
        self.model = subject.make(keras)
        self.optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        self.optimizer.build(self.model.trainable_variables)
        self.generator = tf.random.Generator.from_seed(7)
        self.batch = tf.constant(subject.inputs())
        self.named = {
            variable.path: variable.value for variable in (*self.model.variables, *self.optimizer.variables)
        }
        self.named["generator"] = self.generator.state
        self.at_first = self.variables()
        self.make()

    def make(self) -> None:
        self.forward, self.train = self.forward_pass, self.train_step

    def start(self) -> None:
        seed()
        for name, value in self.at_first.items():
            self.named[name].assign(value)

    def step(self) -> Arrays:
        values = {"evaluated": self.forward(self.batch)}
        outputs, loss, gradients, drawn = self.train(self.batch)
        values |= {"outputs": outputs, "loss": loss, "drawn": drawn}
        values |= {f"gradient {number}": value for number, value in enumerate(gradients)}
        return {name: value.numpy() for name, value in values.items()}

    def variables(self) -> Arrays:
        return {name: variable.numpy() for name, variable in self.named.items()}

    def structure(self) -> Facts:
        return layer_facts(self.model)

    def forward_pass(self, batch: Any) -> Any:
        return self.model(batch, training=False)

    def train_step(self, batch: Any) -> tuple[Any, Any, Sequence[Any], Any]:
        with tf.GradientTape() as tape:
            outputs = self.model(batch, training=True)
            loss = weighted_sum(outputs)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        with tf.control_dependencies([outputs, loss, *gradients]):  # an update races with reads otherwise
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        drawn = self.generator.normal([4]) + tf.random.uniform([4])
        return outputs, loss, [tf.convert_to_tensor(variable) for variable in gradients], drawn


class FunctionProgram(EagerProgram):
    """The same in two tf.functions."""

    def make(self) -> None:
        """Functions that are not traced yet."""
        self.forward, self.train = tf.function(self.forward_pass), tf.function(self.train_step)

    def structure(self) -> Facts:
        facts = super().structure()
        for name, function in (("forward", self.forward), ("train", self.train)):
            facts[f"traces of {name}"] = function.experimental_get_tracing_count()
            graph = function.get_concrete_function(self.batch).graph
            facts[f"graph of {name}"] = [(op.name, op.type, len(op.inputs)) for op in graph.get_operations()]
        return facts


class SessionProgram(Program):
    """A model of tf_keras in a graph of its own, with TensorFlow 1's optimizer, in a session."""

    def __init__(self, subject: Subject) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.compat.v1.set_random_seed(0)
            self.build(subject)
            self.initialize = tf.compat.v1.global_variables_initializer()
        self.feeds = {self.batch: subject.inputs()}
        self.session: Any = None

    def build(self, subject: Subject) -> None:
        """Forward pass, train step and everything else that is fetched."""
        import tf_keras

        model = subject.make(tf_keras)
        inputs = subject.inputs()
        self.batch = tf.compat.v1.placeholder(inputs.dtype, inputs.shape)
        evaluated = model(self.batch, training=False)
        outputs = model(self.batch, training=True)
        loss = weighted_sum(outputs)
        weights = model.trainable_weights
        gradients = [tf.convert_to_tensor(value) for value in tf.gradients(loss, weights)]
        optimizer = tf.compat.v1.train.MomentumOptimizer(RATE, MOMENTUM)
        # A bias that is only added has a gradient without it: an update would race with the forward pass.
        with tf.control_dependencies([outputs, loss, *gradients]):
            update = optimizer.apply_gradients(zip(gradients, weights, strict=True))
        updates = model.get_updates_for(self.batch)
        self.forward = {"evaluated": evaluated}
        self.train = {
            "outputs": outputs, "loss": loss, "drawn": tf.random.normal([4]), "update": (update, updates),
            **{f"gradient {number}": value for number, value in enumerate(gradients)},
        }  # fmt: skip
        self.named = {value.name: value for value in tf.compat.v1.global_variables()}

    def start(self) -> None:
        """A new session starts every kernel's random state anew."""
        seed()
        self.close()
        self.session = tf.compat.v1.Session(graph=self.graph, config=configuration())
        self.session.run(self.initialize)

    def step(self) -> Arrays:
        values = self.session.run(self.forward, self.feeds) | self.session.run(self.train, self.feeds)
        del values["update"]
        return {name: np.asarray(value) for name, value in values.items()}

    def variables(self) -> Arrays:
        return {name: np.asarray(value) for name, value in self.session.run(self.named).items()}

    def structure(self) -> Facts:
        return graph_facts(self.graph)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


PROGRAMS: dict[str, type[Any]] = {
    "session": SessionProgram,
    "function": FunctionProgram,
    "eager": EagerProgram,
}


def configuration() -> Any:
    """Of a session: what is set for functions by `tf.config`."""
    options = tf.config.optimizer.get_experimental_options()
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = options.get("disable_meta_optimizer", False)
    return config


def weighted_sum(outputs: Any) -> Any:
    """A loss in which each element has a weight of its own."""
    flat = tf.reshape(outputs, [-1])
    return tf.reduce_sum(flat * tf.linspace(-1.0, 1.0, flat.shape[0]))
