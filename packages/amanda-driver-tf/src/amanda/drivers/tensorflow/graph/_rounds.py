"""Rounds of loops: in loops the execution's number is a vector, that goes on with the round of each loop.

A loop that computes gradients counts from the last round of the loop that it belongs to back to the first,
so that what a round hands on is found by its own gradients, whatever runs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorflow.python.framework import ops

from ._nodes import INT64, constant, new_node

if TYPE_CHECKING:
    import tensorflow as tf

    from ._rewrite import Rewriter

LOOPS = ("While", "StatelessWhile")
_COUNTER, _TIMES = 0, 2
"""Of a loop's results its counter; of a gradient loop's inputs how often the other loop went round."""
_INT32 = 3


def enter(rewriter: Rewriter, op: tf.Operation, number: str) -> tuple[str, int]:
    """Make the nodes of the number that a loop takes; return it, and how it changes with each round."""
    body, made = rewriter.body, rewriter.insertions.made
    name = f"amanda/rounds{len(made)}"
    dead = body.syntax.dead_values
    waits = [f"^{number.partition(':')[0]}"] if dead else []  # they run in the same frame

    def add(node: Any, output: str = "output") -> str:
        made.append(node)
        return str(node.name) if dead else f"{node.name}:{output}:0"

    def add_constant(key: str, value: Any) -> str:
        return add(constant(f"{name}/{key}", value, waits))

    descends = _descends(op, body.captured)
    if descends:
        left = rewriter.read_at(op, _TIMES)
        times = add(new_node(f"{name}/times", "Cast", [left], SrcT=_INT32, DstT=INT64), "y")
        one = add_constant("one", np.array([-1], np.int64))
        first = add(new_node(f"{name}/first", "AddV2", [times, one], T=INT64), "z")
    else:
        first = add_constant("first", np.array([0], np.int64))
    axis = add_constant("axis", np.int32(0))
    if not body.depth_of(op):
        number = add(new_node(f"{name}/vector", "ExpandDims", [number, axis], T=INT64, Tdim=_INT32))
    whole = add(new_node(f"{name}/number", "ConcatV2", [number, first, axis], 2, T=INT64, Tidx=_INT32))
    return whole, -1 if descends else 1


def next_round(number: str, depth: int, step: int) -> tuple[list[Any], str]:
    """Nodes at the end of a loop's body that make the number of the next round, and how it is read."""
    change = constant("amanda/step", np.array([0] * depth + [step], np.int64))
    following = new_node("amanda/next_round", "AddV2", [number, "amanda/step:output:0"], T=INT64)
    return [change, following], "amanda/next_round:z:0"


def _descends(op: tf.Operation, captured: Callable[[Any], Any]) -> bool:
    """Return True if a loop goes through another one's rounds in reverse, as that of its gradients does."""
    if len(op.inputs) <= _TIMES:
        return False
    held = captured(op.inputs[_TIMES])
    times = op.inputs[_TIMES] if held is None else held
    source = times.op
    if source.type not in LOOPS or times.value_index != _COUNTER:
        return False
    return not _descends(source, captured if source.graph is op.graph else captured_by(source.graph))


def captured_by(graph: Any) -> Callable[[Any], Any]:
    """For a placeholder of a graph, the symbol of another graph that it stands for; None for others."""
    externals = {
        (internal.op, internal.value_index): external
        for external, internal in getattr(graph, "captures", ())
        if not isinstance(external, ops.EagerTensor)
    }
    return lambda tensor: externals.get((tensor.op, tensor.value_index))
