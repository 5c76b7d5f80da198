"""The execution's number in loops: a vector of the number and the round of each loop.

A loop that computes gradients counts from the last round of its forward loop back to the first. So gradients
find the values of their own round, even if rounds run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorflow.python.framework import ops

from ._nodes import INT64, constant, new_node

if TYPE_CHECKING:
    import tensorflow as tf

    from ._rewrite import BodyRewriter

LOOPS = ("While", "StatelessWhile")
_COUNTER, _ROUND_COUNT = 0, 2
"""Index of the counter among a loop's results, and of the number of rounds among a gradient loop's inputs."""
_INT32 = 3


def add_loop_number(rewriter: BodyRewriter, op: tf.Operation, number: str) -> tuple[str, int]:
    """Add the nodes of the number for a loop; return the number's ref, and its change from round to round."""
    body, inserted_nodes = rewriter.body, rewriter.insertions.nodes
    name = f"amanda/rounds{len(inserted_nodes)}"
    has_dead_values = body.syntax.dead_values
    control_inputs = [f"^{number.partition(':')[0]}"] if has_dead_values else []  # they run in the same frame

    def add(node: Any, output: str = "output") -> str:
        inserted_nodes.append(node)
        return str(node.name) if has_dead_values else f"{node.name}:{output}:0"

    def add_constant(key: str, value: Any) -> str:
        return add(constant(f"{name}/{key}", value, control_inputs))

    is_reverse = _runs_in_reverse(op, body.captured)
    if is_reverse:
        count_ref = rewriter.read_at(op, _ROUND_COUNT)
        # The rounds of the forward loop are counted from 0, so the last one has the number of rounds less 1.
        round_count = add(new_node(f"{name}/times", "Cast", [count_ref], SrcT=_INT32, DstT=INT64), "y")
        minus_one = add_constant("one", np.array([-1], np.int64))
        first = add(new_node(f"{name}/first", "AddV2", [round_count, minus_one], T=INT64), "z")
    else:
        first = add_constant("first", np.array([0], np.int64))
    axis = add_constant("axis", np.int32(0))
    if not body.depth_of(op):
        number = add(new_node(f"{name}/vector", "ExpandDims", [number, axis], T=INT64, Tdim=_INT32))
    loop_number = add(new_node(f"{name}/number", "ConcatV2", [number, first, axis], 2, T=INT64, Tidx=_INT32))
    return loop_number, -1 if is_reverse else 1


def next_round(number: str, depth: int, step: int) -> tuple[list[Any], str]:
    """Return nodes at the end of a loop's body that compute the next round's number, and its ref."""
    change = constant("amanda/step", np.array([0] * depth + [step], np.int64))
    following = new_node("amanda/next_round", "AddV2", [number, "amanda/step:output:0"], T=INT64)
    return [change, following], "amanda/next_round:z:0"


def _runs_in_reverse(op: tf.Operation, captured: Callable[[Any], Any]) -> bool:
    """Return True if a loop goes through the rounds of another loop in reverse, as a loop of gradients."""
    if len(op.inputs) <= _ROUND_COUNT:
        return False
    captured_count = captured(op.inputs[_ROUND_COUNT])
    round_count = op.inputs[_ROUND_COUNT] if captured_count is None else captured_count
    source = round_count.op
    if source.type not in LOOPS or round_count.value_index != _COUNTER:
        return False
    return not _runs_in_reverse(source, captured if source.graph is op.graph else captured_by(source.graph))


def captured_by(graph: Any) -> Callable[[Any], Any]:
    """Return a lookup of the symbol of another graph that a placeholder stands for; None for others."""
    externals = {
        (internal.op, internal.value_index): external
        for external, internal in getattr(graph, "captures", ())
        if not isinstance(external, ops.EagerTensor)
    }
    return lambda tensor: externals.get((tensor.op, tensor.value_index))
