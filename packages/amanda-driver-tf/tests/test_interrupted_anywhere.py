"""An exception at any call that Amanda makes leaves nothing of it behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from raising import InstalledPatches, failures
from tensorflow.python import pywrap_tfe

import amanda


@pytest.fixture(autouse=True, scope="module")
def _interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Tenfold(amanda.Tool):
    """Multiplies what relu gives, and every gradient that enters its backward op, by ten."""

    def __init__(self) -> None:
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Relu":
            context.insert_after_op(self.tenfold)

    def _backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().type == "ReluGrad":
            context.insert_before_backward_op(self.tenfold, grad_outputs=[0])

    def tenfold(self, *values: Any) -> Any:
        """Return the values times ten."""
        return [value * 10 for value in values]


X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
W = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def eager() -> Callable[[], list[Any]]:
    """A tape."""
    x, w = tf.constant(X), tf.Variable(W)

    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ w)
        return [y.numpy(), tape.gradient(y, w).numpy()]

    return run


def function() -> Callable[[], list[Any]]:
    """A function that computes a gradient."""
    w = tf.Variable(W)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ w)
        return y, tape.gradient(y, w)

    return lambda: [tensor.numpy() for tensor in step(tf.constant(X))]


def session() -> Callable[[], list[Any]]:
    """A session with a gradient."""
    with tf.Graph().as_default() as graph:
        x, w = tf.compat.v1.placeholder(tf.float32, [2, 3]), tf.constant(W)
        y = tf.nn.relu(x @ w)
        fetched = [y, tf.gradients(y, w)[0]]
    opened = tf.compat.v1.Session(graph=graph)
    return lambda: list(opened.run(fetched, {x: X}))


# Python drops what is raised while a generator that nobody needs any more is closed.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("program", [eager, function, session])
def test_nothing_stays_behind(
    program: Callable[[], Callable[[], list[Any]]], error: type[BaseException]
) -> None:
    run = program()
    bare, patches = _bits(run()), InstalledPatches(run)
    with amanda.apply(Tenfold()):
        tenfold = _bits(run())

    def check() -> list[str]:
        leftovers = patches.left()
        if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            leftovers.append("a tape that still records")
        if _bits(run()) != bare:
            leftovers.append("values")
        with amanda.apply(Tenfold()):
            if _bits(run()) != tenfold:
                leftovers.append("values in a later scope")
        return leftovers

    assert tenfold != bare
    assert failures(run, check, Tenfold, error, 12) == {}
    analysed_tool = Tenfold()
    assert failures(run, check, lambda: analysed_tool, error, 6) == {}


def _bits(values: list[Any]) -> list[bytes]:
    return [value.tobytes() for value in values]
