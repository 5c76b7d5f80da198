"""Recognition of residual connections, and of attention in single ops."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from amanda.tools.kit import Dataflow, DataflowNode
from amanda.tools.mapping import MATRIX_PRODUCTS

# The other products have a weight, as `linear` and in compiled graphs `addmm`, or no batch of matrices.
SCORES = frozenset({"matmul", "einsum", "baddbmm"})
"""Types of products of queries and keys."""
LAYERS = frozenset({*MATRIX_PRODUCTS, "einsum"})
"""Types of products by which layers make queries, keys and values."""
_BETWEEN = frozenset(
    {"add", "sub", "mul", "div", "masked_fill", "where", "to", "clamp", "maximum", "reshape", "Identity",
     "clone", "contiguous", "dropout"}
)  # fmt: skip
"""Types of ops between the product of queries and keys and the softmax."""

_PARTS = 50  # the most parts of a concatenated tensor that are followed


@dataclass(frozen=True)
class Residual:
    """A residual connection: a sum of the output of a branch and the branch's input, or a projection of that.

    branch: position of the branch's output in the sum.  ops: of the branch, the last first.
    identity: number of the other tensor.
    """

    branch: int
    ops: tuple[DataflowNode, ...]
    identity: int


def residual_at(flow: Dataflow, node: DataflowNode) -> Residual | None:
    """Return the residual connection that an op ends, or None; the branch is the input with more ops."""
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
    ops = [op for _, op in ways[branch][: meeting[branch]] if op is not None]
    return Residual(branch, tuple(ops), ways[1 - branch][0][0])


def is_of_one_sequence(flow: Dataflow, product: DataflowNode) -> bool:
    """Return True unless the layers show that queries and keys come from different tensors."""
    queries, *keys = (_inputs_of_layers(flow, number) for number in product.reads[:2])
    return not (keys and queries and keys[0]) or not queries.isdisjoint(keys[0])


def _inputs_of_layers(flow: Dataflow, number: int) -> set[int | None]:
    """Return the inputs of the layers that made a tensor or its parts, since caches concatenate keys."""
    parts, layer_inputs, looked_at = [number], set[int | None](), 0
    while parts and looked_at < _PARTS:
        looked_at += 1
        for _, node in flow.back(parts.pop()):
            if node is not None and node.type in LAYERS:
                layer_inputs.add(node.data)
            elif node is not None and node.type == "cat":
                parts.extend(node.reads)
            else:
                continue
            break
    return layer_inputs


def scores_of(flow: Dataflow, node: DataflowNode) -> DataflowNode | None:
    """Return the product of queries and keys that a softmax reads, or None."""
    size = node.shapes[0]
    if size is None or len(size) not in (3, 4):
        return None
    number = node.inputs[0]
    for _ in range(12):
        maker = flow.maker(number)
        if maker is None or maker.type in SCORES:
            return maker
        if maker.type not in _BETWEEN:
            return None
        same = [
            i for i, shape in zip(maker.inputs, maker.shapes, strict=True) if shape == size and i is not None
        ]
        number = next(iter(same), maker.data)
    return None


def head_count(flow: Dataflow, product: DataflowNode, scores: tuple[int | None, ...]) -> int | None:
    """Return the number of heads that share an axis with the batch, from the shape in the queries' layer."""
    for _, node in flow.back(product.data):
        if node is not None and node.type in LAYERS and node.shapes[0]:
            batch = prod(extent or 1 for extent in node.shapes[0][:-1]) // (scores[1] or 1)
            return (scores[0] or 1) // batch if batch and (scores[0] or 0) % batch == 0 else None
    return None
