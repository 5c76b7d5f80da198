"""What the zoo compares is enough to notice what a tool might change or leave behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.framework import ops

from . import models
from .observation import attributes, differences, distances, replaced
from .programs import PROGRAMS, EagerProgram, FunctionProgram, Program, SessionProgram
from .subject import Subject, images

pytestmark = pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours


def small(keras: Any) -> Any:
    layers = [
        keras.layers.Dense(3, name="dense"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
    ]
    return keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), *layers])


SMALL = Subject("small", small, lambda: images(2) / 255)


def changed_facts(program: Program, change: Callable[[Any], Any]) -> set[str]:
    """What differs when `change` is done to the program after each step, in its scope; without the step."""

    @contextmanager
    def scope() -> Iterator[None]:
        yield
        change(program)

    different = differences(program.observed().facts, program.observed(scope).facts)
    return {name.partition(": ")[2] or name for name in different}


@pytest.mark.parametrize("mode", PROGRAMS)
def test_steps_are_the_same_twice(mode: str) -> None:
    assert changed_facts(PROGRAMS[mode](SMALL), lambda _: None) == set()


@pytest.mark.parametrize("mode", PROGRAMS)
def test_a_step_trains_and_draws(mode: str) -> None:
    program = PROGRAMS[mode](SMALL)
    arrays = program.observed().arrays
    for name in ("evaluated", "outputs", "loss", "drawn", "gradient 0"):
        assert not np.array_equal(arrays[f"step 0: {name}"], arrays[f"step 1: {name}"]), name
    assert all(np.isfinite(value).all() for value in arrays.values())


@pytest.mark.parametrize("make", [EagerProgram, FunctionProgram])
def test_a_changed_variable_is_noticed(make: type[EagerProgram]) -> None:
    program = make(SMALL)
    name = next(name for name in program.named if name.endswith("dense/kernel"))
    different = changed_facts(program, lambda _: program.named[name].assign_add(tf.ones([12, 3])))
    assert {f"variable {name}", "outputs", "evaluated", "loss"} <= different


def test_a_changed_variable_of_a_session_is_noticed() -> None:
    program = SessionProgram(SMALL)
    name = next(name for name in program.named if "dense/kernel:" in name)

    def load(_: Any) -> None:
        with program.graph.as_default():
            program.named[name].load(np.ones([12, 3]), program.session)

    different = changed_facts(program, load)
    assert {f"variable {name}", "outputs", "evaluated", "loss"} <= different


def test_random_numbers_that_are_drawn_are_noticed() -> None:
    program = EagerProgram(SMALL)
    assert {"drawn", "the next eager draw"} <= changed_facts(program, lambda _: tf.random.uniform([1]))
    assert {"drawn", "variable generator"} == changed_facts(program, lambda _: program.generator.uniform([1]))
    assert changed_facts(program, lambda _: np.random.rand()) == {"numpy's random state"}


def test_an_op_more_in_a_graph_is_noticed() -> None:
    program = SessionProgram(SMALL)

    def add(_: Any) -> None:
        with program.graph.as_default():
            tf.constant(1)

    assert {"operations", "graph"} <= changed_facts(program, add)


def test_a_trace_more_is_noticed() -> None:
    program = FunctionProgram(SMALL)
    assert "traces of forward" in changed_facts(program, lambda _: program.forward(program.batch[:1]))


def test_what_is_left_on_a_layer_is_noticed() -> None:
    assert changed_facts(
        EagerProgram(SMALL), lambda program: setattr(program.model.layers[1], "mark", 1)
    ) == {"attributes of layers"}


@pytest.mark.parametrize(
    ("holder", "name"),
    [(session.BaseSession, "run"), (ops.Graph, "get_operations"), (ops, "convert_to_tensor")],
)
def test_a_patched_attribute_is_noticed(holder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes()
    assert replaced(before) == []
    original = getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda *args, **kwargs: original(*args, **kwargs))
    assert any(each.endswith(name) for each in replaced(before))


def test_a_distance_is_a_share_of_the_largest_magnitude() -> None:
    expected, array = np.array([2.0, 0.0]), np.array([2.0, 0.5])
    assert distances({"x": expected, "n": np.array([1])}, {"x": array, "n": np.array([2])}) == {"x": 0.25}


def test_every_model_of_the_zoo_has_a_name_of_its_own() -> None:
    names = [subject.name for subject in models.subjects()]
    assert len(names) == len(set(names)) >= 26
    assert set(names) >= models.SAMPLE
