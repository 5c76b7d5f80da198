"""A function's backward pass, started where other tools, or none, are in force than in its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda


@amanda.differentiable
def tripled(value: Any) -> Any:
    return value * 3


def squared(value: Any) -> Any:
    return value * value


ROUTINES: dict[str, tuple[Any, ...]] = {
    "differentiable": ("insert_after_op", "Sin", tripled),
    "isolated": ("insert_before_op", "Sin", squared),
    "replacing": ("replace_op", "Sin", squared),
}


@pytest.fixture
def weight() -> tf.Variable:
    return tf.Variable(2.0)


@pytest.fixture
def sine(weight: tf.Variable) -> Callable[[Any], Any]:
    return tf.function(lambda x: tf.sin(x * weight), autograph=False)


def gradient(forward: Any, sine: Any, weight: Any, backward: Any) -> float:
    """The gradient, with a forward and a backward pass in two contexts."""
    with forward(), tf.GradientTape() as tape:
        result = sine(tf.constant(1.0))
    with backward():
        return float(tape.gradient(result, weight))


@pytest.mark.parametrize("routine", ROUTINES)
def test_after_the_scope_gradients_are_those_of_what_ran(routine: str, weight: Any, sine: Any) -> None:
    tool = inserting(*ROUTINES[routine])
    scope = lambda: amanda.apply(tool)  # noqa: E731
    after = gradient(scope, sine, weight, nullcontext)
    assert after == gradient(scope, sine, weight, scope)
    assert after == gradient(scope, sine, weight, lambda: amanda.apply(amanda.Tool()))
    assert after != gradient(nullcontext, sine, weight, nullcontext)


@pytest.mark.parametrize("routine", ROUTINES)
def test_what_ran_outside_keeps_its_gradient_in_a_scope(routine: str, weight: Any, sine: Any) -> None:
    tool = inserting(*ROUTINES[routine])
    scope = lambda: amanda.apply(tool)  # noqa: E731
    gradient(scope, sine, weight, scope)
    vanilla = gradient(nullcontext, sine, weight, nullcontext)
    assert gradient(nullcontext, sine, weight, scope) == vanilla


def test_backward_routines_stay_silent_after_the_scope(weight: Any, sine: Any) -> None:
    tool = inserting(*ROUTINES["replacing"])
    analysed: list[str] = []
    tool.add_inst_for_op(lambda ctx: analysed.append(ctx.get_backward_op().type), backward=True)
    gradient(lambda: amanda.apply(tool), sine, weight, nullcontext)
    assert analysed == []


def test_the_switch_of_the_forward_pass_decides_the_gradient(weight: Any, sine: Any) -> None:
    with amanda.apply(inserting("insert_before_op", "Sin", squared)):
        isolated = gradient(nullcontext, sine, weight, nullcontext)
        taking_part = gradient(amanda.autodiff_enabled, sine, weight, nullcontext)
        assert taking_part == pytest.approx(4 * isolated)  # the derivative of the square at 2
        assert gradient(nullcontext, sine, weight, nullcontext) == isolated
        assert gradient(nullcontext, sine, weight, amanda.autodiff_enabled) == isolated
        assert gradient(amanda.autodiff_enabled, sine, weight, amanda.autodiff_enabled) == taking_part


@pytest.mark.parametrize(("only", "reported"), [("Sin", True), ("Relu", False)])
def test_it_is_said_that_second_gradients_pass_routines_by(
    only: str, reported: bool, weight: Any, sine: Any
) -> None:
    with amanda.apply(inserting("insert_before_op", only, squared)) as scope:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                result = sine(tf.constant(1.0))
            first = tape.gradient(result, weight)
        outer.gradient(first, weight)
    assert any(entry.what.startswith("second gradients") for entry in scope.report) == reported


@pytest.mark.parametrize("routine", ROUTINES)
def test_second_gradients_are_there_also_after_the_scope(routine: str, weight: Any, sine: Any) -> None:
    tool = inserting(*ROUTINES[routine])

    def second(forward: Any, backward: Any) -> float:
        with tf.GradientTape() as outer:
            with forward(), tf.GradientTape() as tape:
                result = sine(tf.constant(1.0))
            with backward():
                first = tape.gradient(result, weight)
        with backward():
            return float(outer.gradient(first, weight))

    scope = lambda: amanda.apply(tool)  # noqa: E731
    assert second(scope, nullcontext) == second(scope, scope)
    assert second(nullcontext, nullcontext) == pytest.approx(-np.sin(2.0))
