"""Backward ops of MindSpore, which are autograd nodes."""

from amanda.backend import Operation

ACCUMULATE_GRAD = Operation("AccumulateGrad")
"""The backward op that receives the gradient of a leaf."""


def backward_operation(node: str) -> Operation:
    """Return the backward op of a node, such as "ReLUBackward" for a node named "ReLU"."""
    return Operation(node if node.endswith("Grad") else f"{node}Backward")
