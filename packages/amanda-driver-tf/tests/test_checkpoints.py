"""Checkpoints that are written in a scope are, byte for byte, those that are written without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda

Scope = Callable[[], AbstractContextManager[Any]]

pytestmark = pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours


class OwnVariables(amanda.Tool):
    """Routines around every op with variables of their own, which count; nothing is changed."""

    def __init__(self) -> None:
        self.counts: list[Any] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.counts.append(tf.Variable(0, name=f"count_{len(self.counts)}"))
        context.insert_before_op(self.count, number=self.counts[-1])
        context.insert_after_op(self.count, number=self.counts[-1])

    def analyse_backward(self, context: amanda.OpContext) -> None:
        self.counts.append(tf.Variable(0))
        context.insert_after_backward_op(self.count, number=self.counts[-1])

    def count(self, *values: Any, number: Any) -> Any:
        number.assign_add(1)
        return values

    @property
    def calls(self) -> int:
        """How often all routines were called."""
        return sum(int(count.numpy()) for count in self.counts)


def files(folder: Path) -> dict[str, bytes]:
    """What is in every file of a folder, but the one that tells of the newest checkpoint with its time."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "checkpoint"}


def contents(path: str) -> dict[str, Any]:
    """Names of a checkpoint with dtype, shape and bytes of their values."""
    reader = tf.train.load_checkpoint(path)
    values = {name: np.asarray(reader.get_tensor(name)) for name, _ in tf.train.list_variables(path)}
    return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in values.items()}


def train_and_write(folder: Path, compiled: bool, scope: Scope) -> str:
    """Train a Keras model for three steps and write it with its optimizer; the checkpoint's path."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    generator = tf.random.Generator.from_seed(3)

    def train_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch + generator.normal([2, 4]), training=True) ** 2)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(train_step) if compiled else train_step
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, generator=generator)
    with scope():
        for _ in range(3):
            step(tf.ones([2, 4]))
        return str(checkpoint.write(str(folder / "trained")))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_checkpoint_written_in_a_scope(compiled: bool, tmp_path: Path) -> None:
    tool = OwnVariables()
    paths = []
    for name, scope in {"bare": nullcontext, "within": lambda: amanda.apply(tool)}.items():
        (tmp_path / name).mkdir()
        paths.append(train_and_write(tmp_path / name, compiled, scope))
    assert tool.calls > 0
    bare, within = map(contents, paths)
    assert list(within) == list(bare)
    assert within == bare
    assert files(tmp_path / "within") == files(tmp_path / "bare")


@pytest.mark.parametrize("resource", [True, False], ids=["resource variables", "reference variables"])
def test_a_saver_writes_the_same_checkpoint_and_graph_in_a_scope(resource: bool, tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.set_random_seed(0)
        weight = tf.compat.v1.get_variable("weight", [4, 2], use_resource=resource)
        loss = tf.reduce_sum(tf.nn.dropout(tf.ones([2, 4]) @ weight, 0.5) ** 2)
        train = tf.compat.v1.train.AdamOptimizer(0.01).minimize(loss)
        initialize = tf.compat.v1.global_variables_initializer()
        saver = tf.compat.v1.train.Saver()
    tool = OwnVariables()
    paths = []
    for name, scope in {"bare": nullcontext, "within": lambda: amanda.apply(tool)}.items():
        with tf.compat.v1.Session(graph=graph) as session:
            session.run(initialize)
            with scope():
                for _ in range(3):
                    session.run(train)
                paths.append(saver.save(session, str(tmp_path / name / "trained")))
    assert tool.calls > 0
    bare, within = map(contents, paths)
    assert list(within) == list(bare)
    assert within == bare
    assert files(tmp_path / "within") == files(tmp_path / "bare")


def test_what_was_written_in_a_scope_is_restored_without_and_the_other_way(tmp_path: Path) -> None:
    keras.backend.clear_session()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    checkpoint = tf.train.Checkpoint(model=model)
    first = model.get_weights()
    with amanda.apply(OwnVariables()):
        within = checkpoint.write(str(tmp_path / "within"))
    outside = checkpoint.write(str(tmp_path / "outside"))
    for path, scope in ((within, nullcontext()), (outside, amanda.apply(OwnVariables()))):
        model.set_weights([np.zeros_like(value) for value in first])
        with scope:
            checkpoint.read(path).assert_consumed()
        for value, expected in zip(model.get_weights(), first, strict=True):
            np.testing.assert_array_equal(value, expected)
