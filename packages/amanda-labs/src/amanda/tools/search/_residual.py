"""Residual blocks: which ops lie between the input of a block and the addition that ends it."""

from __future__ import annotations

from amanda.tools.kit import Dataflow, DataflowNode

_AROUND = 1000
"""Tensors among which the input of a residual block is looked for."""


def residual(flow: Dataflow, node: DataflowNode) -> tuple[int, frozenset[int]] | None:
    """Return where an addition reads the input of its other summand, and the ids of the ops in between."""
    if node.type != "add" or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    for shortcut in (0, 1):
        start, branch = node.inputs[shortcut], node.inputs[1 - shortcut]
        seen, ops = _behind(flow, branch, start)
        if start in seen and ops and node.shapes[0] == node.shapes[1]:
            return shortcut, frozenset(ops - _behind(flow, start)[1])
    return None


def _behind(flow: Dataflow, number: int | None, until: int | None = None) -> tuple[set[int | None], set[int]]:
    """Return the tensors that one was made of, back to another, and the ids of the ops that made them."""
    waiting, seen, ops = [number], set[int | None](), set[int]()
    while waiting and len(seen) < _AROUND:
        one = waiting.pop()
        maker = None if one in seen or one == until else flow.maker(one)
        seen.add(one)
        if maker is not None:
            ops.add(maker.op_id)
            waiting.extend(maker.reads)
    return seen, ops
