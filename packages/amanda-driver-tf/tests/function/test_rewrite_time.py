"""A rewrite takes as long as the graph is large, and no time to optimize what routines keep apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import amanda

X = tf.ones([4])


class Around(amanda.Tool):
    """A routine before and after so many ops, the first ones."""

    def __init__(self, most: int = 1000) -> None:
        self.remaining = most
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if self.remaining:
            self.remaining -= 1
            context.insert_before_op(self.routine)
            context.insert_after_op(self.routine)

    def routine(self, *values: object) -> None:
        return None


def chain(length: int):
    """So many functions of x, each with an Identity behind it, which an optimizer takes away."""

    @tf.function
    def function(x):
        for _ in range(length):
            x = tf.identity(tf.tanh(x))
        return x

    return function


def identities_run(tool: amanda.Tool) -> int:
    """How many of the Identity ops of a chain of four TensorFlow runs under a tool."""
    function = chain(4)
    with amanda.apply(tool), context.collect_graphs(optimized=True) as graphs:
        function(X)
    return sum(node.op == "Identity" and "Identity" in node.name for node in graphs[-1].node)


@pytest.fixture
def options() -> Iterator[None]:
    yield
    tf.config.optimizer.set_experimental_options({"constant_folding": None})


def calls_of_python(function) -> int:
    """Calls of Python functions while one is called under a new tool."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    with amanda.apply(Around()):
        sys.setprofile(profile)
        try:
            function(X)
        finally:
            sys.setprofile(None)
    return count


def test_twice_the_graph_takes_twice_the_work() -> None:
    small, large = chain(50), chain(100)
    small(X), large(X)
    calls_of_python(small)
    assert calls_of_python(large) < 2.1 * calls_of_python(small)


def test_a_copy_is_not_optimized_where_routines_keep_all_operators_apart() -> None:
    options = context.context().function_call_options
    assert identities_run(Around()) > 4
    assert context.context().function_call_options is options


def test_a_copy_is_optimized_where_most_operators_are_as_they_were() -> None:
    assert identities_run(Around(1)) == 0


@pytest.mark.usefixtures("options")
def test_what_the_user_says_of_optimization_holds() -> None:
    tf.config.optimizer.set_experimental_options({"constant_folding": True})
    assert identities_run(Around()) == 0
