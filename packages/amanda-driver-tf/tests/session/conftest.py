"""A tool that is everywhere, and graphs to run it on."""

from __future__ import annotations

from collections import Counter

import pytest
import tensorflow as tf

import amanda


class Everywhere(amanda.Tool):
    """Gives back every value that it is given, at every point of every op."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.add_inst_for_op(self.before)
        self.add_inst_for_op(self.after, require_outputs=True)
        self.add_inst_for_op(self.before_backward, backward=True)
        self.add_inst_for_op(self.after_backward, backward=True, require_outputs=True)

    def before(self, context) -> None:
        self.counts[context.get_op().name] += 1
        context.insert_before_op(self.same, name=context.get_op().name)

    def after(self, context) -> None:
        context.insert_after_op(self.same, name=context.get_op().name + " after")

    def before_backward(self, context) -> None:
        context.insert_before_backward_op(self.same, name=context.get_backward_op().name)

    def after_backward(self, context) -> None:
        context.insert_after_backward_op(self.same, name=context.get_backward_op().name + " after")

    def same(self, *values, name):
        self.ran[name] += 1
        return values


@pytest.fixture
def everywhere() -> Everywhere:
    return Everywhere()


@pytest.fixture
def graph():
    """A graph in which operations are made, as in a program of TensorFlow 1."""
    with tf.Graph().as_default() as new_graph:
        yield new_graph
