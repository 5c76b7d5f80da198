"""Questions about the tensors and ops of a framework, answered by one class for each framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import amanda
from amanda.tools.mapping import itemsize
from amanda.tools.trace._graph import Tensor

Ask = Callable[[Any], Any]
"""A function from a tensor, such as `shape` and `dtype` of StandardMapping."""


class Facts(NamedTuple):
    """Facts of an op besides the words of StandardMapping.

    name: the framework's own.  makes: kind of the outputs; "" for that of the first input.
    written: positions of inputs that the op writes, besides those whose version changes.
    brings_in: whether the outputs are new data from outside each time, as of an iterator.
    """

    name: str
    makes: str
    written: Sequence[int] = ()
    brings_in: bool = False


class Span(NamedTuple):
    """ProgramOp of a tensor's elements, in elements of `width` bytes from the start of the memory."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int


class Values:
    """Answers for a framework of which only the words of StandardMapping are known."""

    def __init__(self, shape: Ask, dtype: Ask) -> None:
        self._shape = shape
        self._dtype = dtype

    def is_symbolic(self, context: amanda.OpContext) -> bool:
        """Return True for an op of a graph, which is analysed on symbols."""
        return not context.is_eager()

    def facts(self, context: amanda.OpContext) -> Facts:
        """Return the facts of an op, forward or backward."""
        if context.is_backward():
            op = context.get_backward_op()
            return Facts(str(getattr(op, "__name__", op)), "gradient")
        op = context.get_op()
        return Facts(str(getattr(op, "__name__", op)), "activation", (0,) if context["in_place"] else ())

    def note_call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Note the indices of the tensors with which an op calls functions."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, also for one of unknown rank."""
        return self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        """Return True for a tensor without elements, which refers to a variable, an iterator or the like."""
        return False

    def describe(self, tensor: Any, **fields: Any) -> Tensor:
        """Return what to record of a tensor: extents, element type, device and size, and given fields."""
        shape, dtype = self._shape(tensor), self._dtype(tensor)
        width = itemsize(dtype)
        size = None if shape is None or None in shape or width is None else prod(shape) * width
        device = getattr(tensor, "device", None)
        return Tensor(-1, shape, dtype, str(device) if device else None, size, **fields)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and name of a tensor that no recorded op made."""
        return "input", self.name(tensor)

    def name(self, tensor: Any) -> str | None:
        """Return the framework's name of a tensor."""
        return None

    def outer(self, tensor: Any) -> Any:
        """Return the caller's tensor for a function's argument, or its index; None for other tensors."""
        return None

    def version(self, tensor: Any) -> int | None:
        """Return a number that changes when the tensor is written; None where there is none."""
        return None

    def memory(self, tensor: Any) -> tuple[Any, Span] | None:
        """Return the object that owns the tensor's memory, and the place in it; None where there is none."""
        return None

    def next_number(self) -> int | None:
        """Return the number that autodiff's next node will have; None where nodes have no numbers."""
        return None

    def arrived(self, count: int, take: bool = True) -> tuple[int | None, Sequence[Sequence[int]]]:
        """Return the number of the node that runs, and the recorded gradients of which each one is the sum.

        The number is None for a node that accumulates a leaf's gradient.  take: forget the gradients.
        """
        return None, [()] * count

    def send(self, gradients: Sequence[int | None]) -> Any:
        """Note the recorded gradients that leave an op, for the ops that they go to.

        Return the tensor in which the op has accumulated gradients; None for other ops.
        """
        return None


def values_of(framework: str, shape: Ask, dtype: Ask) -> Values:
    """Return the answers for a framework, of the module of this package that has its name if there is one."""
    name = f"{__package__}._{framework}"
    kind: type[Values] = import_module(name).FrameworkValues if find_spec(name) else Values
    return kind(shape, dtype)
