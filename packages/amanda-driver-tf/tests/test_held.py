"""What traceable routines read of their tools: functions and sessions follow its changes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda
from amanda.drivers.tensorflow.graph import _routines
from amanda.testing import GraphDriverTests, GraphSample, Scaling

tf1 = tf.compat.v1
X = np.linspace(-1, 1, 6, dtype="f4").reshape(2, 3)


class InModule(Scaling):
    def set_up(self) -> None:
        class Module(tf.Module):
            def __call__(self, value: Any) -> Any:
                return value * self.scale

        self.module = Module()
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, output: Any) -> Any:
        return self.module(output)

    def hold(self, scale: Any) -> None:
        self.module.scale = scale


class InLayer(Scaling):
    """In a layer: code of Keras is between the routine and what reads."""

    def set_up(self) -> None:
        keras = importlib.import_module("keras")

        class Layer(keras.layers.Layer):
            def call(self, value: Any) -> Any:
                return value * self.scale

        self.layer = Layer()
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, output: Any) -> Any:
        return self.layer(output)

    def hold(self, scale: Any) -> None:
        self.layer.scale = scale


@tf.function
def doubled(value: Any) -> Any:
    return tf.tanh(tf.atanh(value / 100.0)) * 200.0


class Elsewhere:
    """An object whose property, of another package, computes."""

    half: float


def _twice(holder: Elsewhere) -> float:
    with tf.init_scope():
        return round(float(doubled(tf.constant(holder.half))), 3)


_twice.__module__ = "another_package"
Elsewhere.scale = property(_twice)  # type: ignore[attr-defined]


class InProperty(Scaling):
    def set_up(self) -> None:
        self.elsewhere = Elsewhere()
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, output: Any) -> Any:
        return output * self.elsewhere.scale

    def hold(self, scale: Any) -> None:
        self.elsewhere.half = float(scale) / 2


def function() -> tuple[Callable[[], Any], int]:
    """What computes tanh, and how often."""
    computed = tf.function(lambda x: tf.tanh(x))
    return lambda: computed(X).numpy(), 1


def nested() -> tuple[Callable[[], Any], int]:
    inner = tf.function(lambda x: tf.tanh(x))
    outer = tf.function(lambda x: tf.tanh(inner(x)))
    return lambda: outer(X).numpy(), 2


def branch() -> tuple[Callable[[], Any], int]:
    computed = tf.function(lambda x: tf.cond(x[0, 0] < 0, lambda: tf.tanh(x), lambda: x))
    return lambda: computed(X).numpy(), 1


def loop() -> tuple[Callable[[], Any], int]:
    @tf.function
    def computed(x):
        for _ in tf.range(3):
            x = tf.tanh(x)
        return x

    return lambda: computed(tf.constant(X)).numpy(), 3


def keras() -> tuple[Callable[[], Any], int]:
    library = importlib.import_module("keras")
    model = library.Sequential([library.layers.Input((3,)), library.layers.Activation("tanh")])
    return lambda: model.predict(X, verbose=0), 1


def session() -> tuple[Callable[[], Any], int]:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 3])
        y = tf.tanh(x)
    opened = tf1.Session(graph=graph)
    return lambda: opened.run(y, {x: X}), 1


def session_in_functions() -> tuple[Callable[[], Any], int]:
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 3])
        y = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v)), [0, x])[1]
    opened = tf1.Session(graph=graph)
    return lambda: opened.run(y, {x: X}), 3


PROGRAMS = [function, nested, branch, loop, keras, session, session_in_functions]


def by_hand(times: int, scale: float) -> Any:
    x = X
    for _ in range(times):
        x = np.tanh(x) * np.float32(scale)
    return x


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The routines that are traced, in order."""
    actions: list[Any] = []
    create = _routines.TracedRoutine.__init__

    def recording(self: Any, *args: Any) -> None:
        create(self, *args)
        actions.append(args[0].actions[0])

    monkeypatch.setattr(_routines.TracedRoutine, "__init__", recording)
    return actions


def reasons_of_traceable(scope: amanda.Scope) -> list[str]:
    """What the report says of traceable routines."""
    return [entry.reason for entry in scope.report if entry.what.startswith("traceable")]


def close(values: Any, expected: Any) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


class Program(GraphSample):
    op: ClassVar = "Tanh"

    def __init__(self, program: Callable[[], tuple[Callable[[], Any], int]], traces: list[Any]) -> None:
        self.run, self.times = program()
        self.traces = traces

    def check_scaled(self, scale: float) -> None:
        close(self.run(), by_hand(self.times, scale))

    def tensor(self, number: float) -> Any:
        return tf.constant(number)

    def copy_count(self) -> int:
        return len(self.traces)


class TestGraphDriver(GraphDriverTests):
    @pytest.fixture(params=[function, nested, session])
    def sample(self, request: pytest.FixtureRequest, traces: list[Any]) -> GraphSample:
        return Program(request.param, traces)

    @pytest.mark.parametrize("kind", [InModule, InLayer, InProperty])
    @pytest.mark.parametrize("tensors", [False, True])
    def test_what_objects_of_packages_hold_instead_is_read(
        self, sample: GraphSample, kind: type[Scaling], tensors: bool
    ) -> None:
        self.test_what_is_held_instead_is_read(sample, kind, tensors)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_set_anew_is_read_in_every_mode(program: Any, traces: list[Any]) -> None:
    sample = Program(program, traces)
    tool = Scaling(sample, 2.0)
    with amanda.apply(tool) as scope:
        for scale in (2.0, 2.0, 5.0, 5.0, 2.0):
            tool.hold(scale)
            sample.check_scaled(scale)
        assert len(traces) == 2 * (sample.times if program is nested else 1)
    tool.hold(3.0)
    sample.check_scaled(1.0)
    with amanda.apply(tool):
        sample.check_scaled(3.0)
        tool.hold(5.0)
        sample.check_scaled(5.0)
    assert len(traces) == 3 * (sample.times if program is nested else 1)
    assert not reasons_of_traceable(scope)


@pytest.mark.parametrize("program", [nested, loop, session_in_functions])
def test_what_changes_often_is_read_by_python(program: Any, traces: list[Any]) -> None:
    sample = Program(program, traces)
    tool = Scaling(sample, 0.0)
    unchanging = inserting("insert_after_op", "Tanh", amanda.traceable(lambda y: y + 0.0))
    counts = []
    with amanda.apply(tool, unchanging) as scope:
        for i in range(12):
            tool.hold(i / 4)
            sample.check_scaled(i / 4)
            counts.append(len([action for action in traces if action.tool is tool]))
    assert counts[8:] == [counts[7]] * 4
    assert counts[7] == 8 * counts[0]
    assert set(reasons_of_traceable(scope)) == {"what it reads changes often: held, so it runs as Python"}


def test_few_values_in_many_combinations_do_not_make_copies_without_end(traces: list[Any]) -> None:
    class Combined(amanda.Tool):
        def __init__(self) -> None:
            self.first, self.second, self.third = 0, 0, 0
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "Tanh":
                context.insert_after_op(self.scaled)

        @amanda.traceable
        def scaled(self, output: Any) -> Any:
            return output * (self.first + 4.0 * self.second + 16.0 * self.third)

    sample, tool = Program(function, traces), Combined()
    with amanda.apply(tool):
        for i in range(64):
            tool.first, tool.second, tool.third = i % 4, i // 4 % 4, i // 16
            sample.check_scaled(i)
    assert len(traces) == 32


@pytest.mark.parametrize("inside", [True, False], ids=["tape inside", "tape outside"])
def test_gradients_follow_what_is_set_anew(inside: bool, traces: list[Any]) -> None:
    class Gradients(Scaling):
        def set_up(self) -> None:
            self.add_inst_for_op(self.analyse_backward, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            """Forward there is nothing to do."""

        def analyse_backward(self, context: amanda.OpContext) -> None:
            if context.get_backward_op().type == "TanhGrad":
                context.insert_after_backward_op(self.scaled)

    def gradient(compute, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = compute(x)
        return tape.gradient(y, x)

    compute = tf.tanh if inside else tf.function(lambda x: tf.tanh(x))
    run = tf.function(lambda x: gradient(compute, x)) if inside else (lambda x: gradient(compute, x))
    x = tf.constant(X)
    bare, tool = run(x), Gradients(Program(function, traces), 2.0)
    with amanda.apply(tool):
        for scale in (2.0, 5.0, 2.0, 3.0):
            tool.hold(scale)
            close(run(x), bare * scale)


@pytest.mark.slow
def test_a_scale_that_a_callback_sets_holds_for_the_next_epoch(traces: list[Any]) -> None:
    tool = Scaling(Program(keras, traces), 1.0)

    def trained() -> tuple[Any, list[float]]:
        keras = importlib.import_module("keras")
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, activation="tanh")])
        model.compile("sgd", "mse")
        halving = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: tool.hold(tool.held / 2))
        history = model.fit(X, X[:, :1], epochs=4, verbose=0, shuffle=False, callbacks=[halving])
        return model.get_weights()[0], history.history["loss"]

    with amanda.apply(tool) as scope:
        results = trained()
    tool.hold(1.0)
    with amanda.apply(inserting("insert_after_op", "Tanh", lambda y: y * tool.held)):
        expected = trained()
    close(results[0], expected[0])
    close(results[1], expected[1])
    assert not reasons_of_traceable(scope)


class Numbering(Scaling):
    """Reads what its analysis, which comes after some routines have been traced, sets."""

    def set_up(self) -> None:
        self.held = 0.0

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "Tanh":
            self.held += 1.0
            context.insert_after_op(self.scaled)


def test_what_the_analysis_of_later_ops_sets_is_read_from_then_on(traces: list[Any]) -> None:
    sample = Program(nested, traces)
    tool = Numbering(sample, 0.0)
    with amanda.apply(tool) as scope:
        close(sample.run(), np.tanh(np.tanh(X)) * 2)
        for _ in range(2):
            sample.check_scaled(2.0)
    assert len(traces) == 4
    assert not reasons_of_traceable(scope)


def test_a_variable_is_read_by_python_when_it_is_assigned(traces: list[Any]) -> None:
    scale = tf.Variable(2.0)
    sample = Program(function, traces)
    tool = Scaling(sample, scale)
    with amanda.apply(tool) as scope:
        for number in (2.0, 5.0):
            scale.assign(number)
            sample.check_scaled(number)
    assert reasons_of_traceable(scope) == ["it cannot be traced: it reads a variable, so it runs as Python"]
