"""Patterns of ops: residual connections, and attention of several ops."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from amanda.tools.kit import Dataflow, DataflowNode

PRODUCTS = frozenset({"matmul", "einsum", "baddbmm"})
LAYERS = frozenset({"linear", "addmm", "matmul"})
_BETWEEN = frozenset(
    {"add", "sub", "mul", "div", "masked_fill", "where", "to", "clamp", "maximum", "reshape", "Identity",
     "clone", "contiguous", "dropout"}
)  # fmt: skip
"""Ops between the product of queries and keys and the softmax."""

_PARTS = 50  # of a tensor that was put together, at most


@dataclass(frozen=True)
class Residual:
    """An addition of what ops have made of a tensor to that tensor, or to a projection of it.

    branch: position of what they made.  ops: those of the branch, the last first.
    identity: number of the other.
    """

    branch: int
    ops: tuple[DataflowNode, ...]
    identity: int


def residual(flow: Dataflow, node: DataflowNode) -> Residual | None:
    """Return the branch, which has more ops, and the identity of a residual connection; None of other ops."""
    if node.type != "add" or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    if node.shapes[0] != node.shapes[1] or len(node.shapes[0] or ()) < 3:
        return None
    ways = [list(flow.back(number)) for number in node.inputs[:2]]
    first = {number: i for i, (number, _) in enumerate(ways[0])}
    meeting = next(((first[number], i) for i, (number, _) in enumerate(ways[1]) if number in first), None)
    if meeting is None or meeting[0] == meeting[1] == 0:
        return None
    branch = 0 if meeting[0] > meeting[1] else 1
    ops = [one for _, one in ways[branch][: meeting[branch]] if one is not None]
    return Residual(branch, tuple(ops), ways[1 - branch][0][0])


def is_of_one_sequence(flow: Dataflow, product: DataflowNode) -> bool:
    """Return True if queries and keys are computed from one tensor, as far as their layers show."""
    queries, *keys = (_layered(flow, number) for number in product.reads[:2])
    return not (keys and queries and keys[0]) or not queries.isdisjoint(keys[0])


def _layered(flow: Dataflow, number: int) -> set[int | None]:
    """Return the inputs of the layers that made a tensor, or its parts: caches append keys to older keys."""
    parts, found, looked_at = [number], set[int | None](), 0
    while parts and looked_at < _PARTS:
        looked_at += 1
        for _, node in flow.back(parts.pop()):
            if node is not None and node.type in LAYERS:
                found.add(node.data)
            elif node is not None and node.type == "cat":
                parts.extend(node.reads)
            else:
                continue
            break
    return found


def scores_of(flow: Dataflow, node: DataflowNode) -> DataflowNode | None:
    """Return the product of queries and keys that a softmax reads; None where it reads something else."""
    size = node.shapes[0]
    if size is None or len(size) not in (3, 4):
        return None
    number = node.inputs[0]
    for _ in range(12):
        made = flow.maker(number)
        if made is None or made.type in PRODUCTS:
            return made
        if made.type not in _BETWEEN:
            return None
        same = [
            i for i, shape in zip(made.inputs, made.shapes, strict=True) if shape == size and i is not None
        ]
        number = next(iter(same), made.data)
    return None


def head_count(flow: Dataflow, product: DataflowNode, scores: tuple[int | None, ...]) -> int | None:
    """Return the number of heads that share an axis with the batch, whose size the queries' layer shows."""
    for _, node in flow.back(product.data):
        if node is not None and node.type in LAYERS and node.shapes[0]:
            batch = prod(one or 1 for one in node.shapes[0][:-1]) // (scores[1] or 1)
            return (scores[0] or 1) // batch if batch and (scores[0] or 0) % batch == 0 else None
    return None
