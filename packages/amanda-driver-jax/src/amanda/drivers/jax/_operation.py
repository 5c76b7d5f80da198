"""The result of `get_op` and `get_backward_op`: an operator of JAX by name."""

from functools import cache
from typing import Any


class Operation:
    """One operator, forward or backward; there is one object for each name.

    __name__: that of the primitive, "dot_general"; with "_transpose", its backward op.
    """

    __slots__ = ("__name__", "__weakref__")

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return operation, (self.__name__,)


@cache
def operation(name: str) -> Operation:
    """Return the operator of this name."""
    return Operation(name)


@cache
def backward_operation(name: str) -> Operation:
    """Return the backward op of an operator: what JAX runs is the transpose of the operator's derivative."""
    return operation(f"{name}_transpose")
