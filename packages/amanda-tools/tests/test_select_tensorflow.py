"""Selections and windows of steps on TensorFlow."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import AmandaError
from amanda.tools.flops import FlopsTool
from amanda.tools.select import select
from amanda.tools.steps import Steps


@pytest.fixture
def model() -> keras.Model:
    layers = [keras.layers.Input((6,)), keras.layers.Dense(5, name="wide"), keras.layers.Dense(2, name="out")]
    model = keras.Sequential(layers, name="net")
    model.compile("sgd", "mse")
    return model


def fit(model: keras.Model, steps: int) -> None:
    inputs, targets = np.ones((4 * steps, 6), np.float32), np.ones((4 * steps, 2), np.float32)
    model.fit(inputs, targets, batch_size=4, verbose=0, shuffle=False)


def calls(tool: FlopsTool, type: str, phase: str = "forward") -> dict[str, int]:
    """Executions of a type of op by module."""
    rows = tool.result.by("phase", "type", "module").rows()
    matching = [row for row in rows if (row[0], row[1]) == (phase, type)]
    return {row[2].rpartition("/")[2].partition("_")[0]: row[3] for row in matching}


def test_steps_of_fit_are_batches(model: keras.Model) -> None:
    steps, whole = Steps(), FlopsTool()
    part = select(FlopsTool(), start=2, end=5, steps=steps)
    with amanda.apply(whole, part):
        fit(model, steps=8)
    assert steps.number == 7
    assert calls(whole, "matmul") == {"wide": 8, "out": 8}
    assert calls(part, "matmul") == {"wide": 3, "out": 3}
    assert calls(part, "matmul_backward", "backward") == {"wide": 3, "out": 6}
    everything = {tuple(row[:4]): row[4] for row in whole.result.rows()}
    selected = {tuple(row[:4]): row[4] for row in part.result.rows()}
    in_graph = {key: number for key, number in everything.items() if number % 8 == 0}
    assert len(in_graph) > 40
    assert {key: selected.get(key) for key in in_graph} == {key: 3 * n // 8 for key, n in in_graph.items()}


@pytest.mark.parametrize("way", ["eager", "function", "fit"])
@pytest.mark.parametrize("module", ["dense_1", "*dense_1", "twice/dense_1", "second"])
def test_a_module_is_a_layer_by_its_name_or_path(way: str, module: str) -> None:
    """The scope of the second call of the layer "dense" is "dense_1" too."""

    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twice")
            self.first = keras.layers.Dense(6, name="dense")
            self.second = keras.layers.Dense(2, name="dense_1")

        def call(self, x: object) -> object:
            return self.second(self.first(self.first(x)))

    model = Twice()
    model.compile("sgd", "mse")
    part = select(FlopsTool(), type="matmul", module=module, phase="forward")
    with amanda.apply(part):
        {"eager": lambda: model(tf.ones((4, 6))), "fit": lambda: fit(model, steps=1),
         "function": lambda: tf.function(lambda x: model(x))(tf.ones((4, 6)))}[way]()  # fmt: skip
    assert [row[2:4] for row in part.result.by("phase", "type", "module").rows()] == [("second", 1)]


def test_steps_in_eager_mode_are_calls_of_the_model(model: keras.Model) -> None:
    steps = Steps()
    part = select(FlopsTool(), frequency=2, steps=steps)
    with amanda.apply(part):
        for _ in range(5):
            model(tf.ones((3, 6)))
    assert steps.number == 4
    assert calls(part, "matmul") == {"wide": 3, "out": 3}


def test_steps_of_a_session_are_its_runs() -> None:
    steps = Steps()
    with amanda.apply(steps), tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", (3, 3), use_resource=True)
        product = tf.matmul(tf.ones((2, 3)), weight)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(4):
            session.run(product)
    assert steps.number == 3  # what initialises the variable begins with another operation


@pytest.mark.slow
@pytest.mark.parametrize("module", ["net*/wide*", "*.wide*"])
def test_modules_and_types_select(model: keras.Model, module: str) -> None:
    part = select(FlopsTool(), module=module, type="MatMul")
    with amanda.apply(part):
        fit(model, steps=2)
    assert calls(part, "matmul") == {"wide": 2}
    assert {row[1] for row in part.result.rows()} == {"matmul", "matmul_backward"}


def test_a_replacement_cannot_give_way_in_a_graph() -> None:
    def replace(context: amanda.OpContext) -> None:
        if context.get_op_type() == "Relu":
            context.replace_op(lambda value: NotImplemented)

    tool = amanda.Tool()
    tool.add_inst_for_op(replace)
    with amanda.apply(tool), pytest.raises(AmandaError, match="does not have any more"):
        tf.function(tf.nn.relu)(tf.ones(3))
