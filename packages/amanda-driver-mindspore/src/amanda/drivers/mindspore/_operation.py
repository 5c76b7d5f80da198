"""The result of `get_op` and `get_backward_op`: an operator of MindSpore by name."""

from functools import cache
from typing import Any


class Operation:
    """One operator, forward or backward; there is one object for each name.

    __name__: "relu", "add", "bias_add"; with "Backward", a node of the graph of gradients: "ReLUBackward".
    """

    __slots__ = ("__name__", "__weakref__")

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    def __str__(self) -> str:
        return self.__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return operation, (self.__name__,)


@cache
def operation(name: str) -> Operation:
    """The operator of this name."""
    return Operation(name)


@cache
def backward_operation(node: str) -> Operation:
    """The operator that a node of the graph of gradients is, by the node's name: that of what made it."""
    return operation(node if node.endswith("Grad") else f"{node}Backward")


ACCUMULATE_GRAD = operation("AccumulateGrad")
"""The operator that takes the gradient of a leaf."""
