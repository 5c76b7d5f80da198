"""Faults on TensorFlow: eagerly, in functions and in sessions, the same ones from a seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import children
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.inject import Campaign, InjectTool


def injected(program: Callable[[], Any], **options: Any) -> tuple[Any, InjectTool]:
    tool = InjectTool(**options)
    with amanda.apply(tool):
        output = program()
    return output, tool


def raw(array: Any) -> Any:
    array = np.ascontiguousarray(array)
    return array.reshape(-1, 1).view(np.uint8).reshape(-1, array.itemsize)


TYPES = "float64 float32 float16 bfloat16 float8_e5m2 float8_e4m3fn int8 uint8 int32 int64 complex64 bool"


@pytest.mark.parametrize("name", TYPES.split())
def test_one_bit_of_one_element_is_flipped_in_every_type(name: str) -> None:
    x = tf.cast(tf.reshape(tf.range(6.0) / 2, (2, 3)), name)
    for seed in range(6):
        y, tool = injected(lambda: tf.reshape(x, (3, 2)), type="reshape", seed=seed)
        (hit,) = tool.result.injections
        difference = raw(x.numpy()) ^ raw(y.numpy())
        assert np.unpackbits(difference).sum() == 1
        (element,) = difference.any(1).nonzero()[0]
        assert np.unravel_index(element, (3, 2)) == hit.element
        assert int.from_bytes(difference[element].tobytes(), "little") == 1 << hit.bits[0]
        old, new = (complex(array.reshape(-1)[element]) for array in (x.numpy(), y.numpy()))
        assert (complex(hit.old), repr(complex(hit.new))) == (old, repr(new))


def eager(step: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    return lambda: np.array(step(tf.constant(x)))


def function(step: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    traced = tf.function(step)
    return lambda: np.array(traced(tf.constant(x)))


def session(step: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    with tf.Graph().as_default() as graph:
        data = tf.compat.v1.placeholder(tf.float32, x.shape)
        result = step(data)
    return lambda: tf.compat.v1.Session(graph=graph).run(result, {data: x})


MODES = [eager, function, session]
X = np.linspace(0.5, 2, 12, dtype=np.float32).reshape(3, 4)


def step(x: Any) -> Any:
    return tf.nn.relu(tf.matmul(x, tf.ones((4, 2))) * 2.0)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_outputs_and_inputs_are_changed_in_every_mode(mode: Any) -> None:
    program = mode(step, X)
    plain = program()
    y, tool = injected(program, type="relu", fault="value", value=50.0)
    (hit,) = tool.result.injections
    assert (hit.type, hit.tensor) == ("relu", "outputs[0]")
    wanted = plain.copy()
    wanted[hit.element] = 50
    assert y.tolist() == wanted.tolist()
    y, tool = injected(program, type="matmul", target="inputs", index=0, fault="zero", count=12)
    assert not y.any()
    assert program().tolist() == plain.tolist()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_a_seeded_campaign_repeats_exactly(mode: Any) -> None:
    program = mode(step, X)
    results = [
        Campaign(InjectTool(seed=4, type=["matmul", "mul", "relu"]), trials=8).run(program) for _ in range(2)
    ]
    assert results[0].to_dict() == results[1].to_dict()
    assert {trial.outcome for trial in results[0].trials} & {"sdc", "nan"}


@pytest.mark.parametrize("mode", [eager, function], ids=lambda mode: mode.__name__)
def test_gradients_and_weights_are_changed_and_variables_are_not(mode: Any) -> None:
    weight = tf.Variable(tf.ones((4, 2)))

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(x, weight))
        return tape.gradient(loss, weight)

    program = mode(gradient, X)
    plain = program()
    grad, tool = injected(program, target="weight_grads", fault="value", value=77.0)
    (hit,) = tool.result.injections
    assert hit.phase == "backward"
    wanted = plain.copy()
    wanted[hit.element] = 77
    assert grad.tolist() == wanted.tolist()
    product = mode(lambda x: tf.matmul(x, weight), X)
    y, tool = injected(product, target="weights", type="matmul", fault="value", value=5.0)
    (hit,) = tool.result.injections
    changed = np.ones((4, 2), np.float32)
    changed[hit.element] = 5
    assert y.tolist() == tf.matmul(X, changed).numpy().tolist()
    assert (weight.numpy() == 1).all()


def test_a_loop_has_faults_at_the_iterations_that_were_asked_for() -> None:
    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(6):
            x = tf.nn.relu(x)
        return x

    x = tf.ones(50)
    runs = [injected(lambda: loop(x), type="relu", start=1, frequency=2)[1].result for _ in range(2)]
    assert [one.execution for one in runs[0].injections] == [1, 3, 5]
    assert runs[0].rows() == runs[1].rows()


SCRIPT = """
import tensorflow as tf, amanda
from amanda.tools.inject import InjectTool
@tf.function
def f(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.relu(tf.matmul(x, x)))
    return tape.gradient(y, x)
rows = []
for target in ("outputs", "grad_inputs"):
    tool = InjectTool(target=target, seed=3, probability=0.2)
    with amanda.apply(tool):
        f(tf.ones((5, 5))), tf.ones((5, 5)) + 1
    rows.append(tool.result.rows())
assert all(rows)
print(rows)
"""


@pytest.mark.long
def test_another_process_has_the_same_faults() -> None:
    told = [children.run([sys.executable, "-c", SCRIPT], check=True).stdout for _ in range(2)]
    assert told[0] == told[1]


def test_random_generators_are_left_alone() -> None:
    def program() -> Any:
        tf.random.set_seed(3)
        return tf.random.normal((4,)) + tf.random.stateless_uniform((4,), (1, 2))

    plain = program()
    y, _ = injected(program, type="neg")
    assert y.numpy().tolist() == plain.numpy().tolist()
    tf.random.set_seed(3)
    injected(lambda: tf.zeros(4) + 1)
    assert (tf.random.normal((4,)) + tf.random.stateless_uniform((4,), (1, 2))).numpy().tolist() == (
        plain.numpy().tolist()
    )


def test_a_loop_of_a_graph_that_does_not_end_is_stopped_and_crashes_are_told_apart() -> None:
    @tf.function
    def countdown(left: Any) -> Any:
        while left != 0.0:
            left = left - 1.0
        return left

    stuck = InjectTool(type="sub", fault="value", value=0.5)
    result = Campaign(stuck, trials=2).run(lambda: countdown(tf.constant(3.0)))
    assert result.count("hang") == 2
    assert "executed more than" in result.trials[0].error
    table = tf.constant([[1.0, 2.0]])
    wrong = InjectTool(type="reshape", bits=[20])
    result = Campaign(wrong, trials=2).run(lambda: tf.gather(table, tf.reshape(tf.constant([0]), (1,))))
    assert result.count("crash") == 2
    assert "InvalidArgumentError" in result.trials[0].error


@pytest.mark.parametrize("mode", [eager, function, session])
@pytest.mark.parametrize(
    ("options", "count"),
    [({"fault": "multi_bit", "flips": 3}, 1), ({"fault": "stuck_at_1", "axis": -1, "bits": [30]}, 4),
     ({"fault": "wrong_row"}, 5), ({"fault": "nan", "axis": 0}, 5)],
)  # fmt: skip
def test_shapes_of_faults_are_those_of_other_frameworks(
    mode: Any, options: dict[str, Any], count: int
) -> None:
    x = np.random.default_rng(0).random((4, 5), np.float32) + 0.5
    program = mode(lambda data: tf.nn.relu(data), x)
    y, tool = injected(program, type="relu", **options)
    hits = tool.result.injections
    assert len(hits) == count
    elements = {tuple(map(int, place)) for place in np.argwhere(x.view(np.uint32) != y.view(np.uint32))}
    assert elements <= {hit.element for hit in hits}
    if options["fault"] == "wrong_row":
        (row,) = {hit.element[0] for hit in hits}
        assert sum(bool((y[row] == other).all()) for other in x) == 1
    if options["fault"] == "multi_bit":
        assert len(elements) == 1
        assert hits[0].bits == tuple(range(hits[0].bits[0], hits[0].bits[0] + 3))
