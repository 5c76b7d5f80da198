"""Backward ops of MindSpore: nodes of the graph of gradients."""

from amanda.backend import Operation

ACCUMULATE_GRAD = Operation("AccumulateGrad")
"""The operator that takes the gradient of a leaf."""


def backward_operation(node: str) -> Operation:
    """Return the operator that a node is, by the node's name "ReLUBackward": that of the op that made it."""
    return Operation(node if node.endswith("Grad") else f"{node}Backward")
