"""Rounds of loops: in loops the execution's number is a vector, that goes on with the round of each loop.

A loop that computes gradients counts from the last round of the loop that it belongs to back to the first,
so that what a round hands on is found by its own gradients, whatever runs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import ops

from ._traced import constant

if TYPE_CHECKING:
    import tensorflow as tf

    from ._body import Body

LOOPS = ("While", "StatelessWhile")
_COUNTER, _TIMES = 0, 2
"""Of a loop's results its counter; of a gradient loop's inputs how often the other loop went round."""
_INT32, _INT64 = 3, 9


def enter(
    body: Body, op: tf.Operation, number: str, read: Callable[[tf.Operation, int], str], made: list[Any]
) -> tuple[str, int]:
    """Return what a loop takes as the number, and how that changes with each round; `made` gets the nodes."""
    name = f"amanda/rounds{len(made)}"
    dead = body.syntax.dead_values
    waits = [f"^{number.partition(':')[0]}"] if dead else []  # they run in the same frame

    def add(key: str, type: str, inputs: list[str], output: str, **attributes: int) -> str:
        node = node_def_pb2.NodeDef(name=f"{name}/{key}", op=type, input=inputs)
        for attribute, value in attributes.items():
            if attribute == "N":
                node.attr[attribute].i = value
            else:
                node.attr[attribute].type = value
        made.append(node)
        return _written(node, output, dead)

    def add_constant(key: str, value: Any) -> str:
        node = constant(f"{name}/{key}", value)
        node.input.extend(waits)
        made.append(node)
        return _written(node, "output", dead)

    descends = _descends(op, body.captured)
    if descends:
        times = add("times", "Cast", [read(op, _TIMES)], "y", SrcT=_INT32, DstT=_INT64)
        first = add("first", "AddV2", [times, add_constant("one", np.array([-1], np.int64))], "z", T=_INT64)
    else:
        first = add_constant("first", np.array([0], np.int64))
    axis = add_constant("axis", np.int32(0))
    if not body.depth_of(op):
        number = add("vector", "ExpandDims", [number, axis], "output", T=_INT64, Tdim=_INT32)
    whole = add("number", "ConcatV2", [number, first, axis], "output", N=2, T=_INT64, Tidx=_INT32)
    return whole, -1 if descends else 1


def next_round(number: str, depth: int, step: int) -> tuple[list[Any], str]:
    """Nodes at the end of a loop's body that make the number of the next round, and how it is read."""
    change = constant("amanda/step", np.array([0] * depth + [step], np.int64))
    node = node_def_pb2.NodeDef(name="amanda/next_round", op="AddV2", input=[number, "amanda/step:output:0"])
    node.attr["T"].type = _INT64
    return [change, node], "amanda/next_round:z:0"


def _written(node: Any, output: str, dead_values: bool) -> str:
    return str(node.name) if dead_values else f"{node.name}:{output}:0"


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
