"""Questions about the tensors and ops of a framework, answered by one class for each framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import amanda
from amanda.tools.mapping import itemsize

Ask = Callable[[Any], Any]
"""A function from a tensor, such as `shape` and `dtype` of StandardMapping."""


class Description(NamedTuple):
    """Fields of a recorded tensor that are read off the tensor itself."""

    shape: tuple[int | None, ...] | None
    dtype: str | None
    device: str | None
    bytes: int | None


class Span(NamedTuple):
    """Place of a tensor's elements in memory, in elements of `width` bytes from the start of the memory.

    memory: tells the memory from all other that is in use.
    """

    memory: Hashable
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int


class Values:
    """Answers for a framework of which only the words of StandardMapping are known."""

    def __init__(self, shape: Ask, dtype: Ask) -> None:
        self._shape = shape
        self._dtype = dtype

    # ---- tensors ----

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, also for one of unknown rank."""
        return self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        """Return True for a tensor without elements, which refers to a variable, an iterator or the like."""
        return False

    def describe(self, tensor: Any) -> Description:
        """Return extents, element type, device and size."""
        shape, dtype = self._shape(tensor), self._dtype(tensor)
        size = None if shape is None or None in shape else prod(shape) * (itemsize(dtype) or 0)
        device = getattr(tensor, "device", None)
        return Description(shape, dtype, str(device) if device else None, size)

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

    def memory(self, tensor: Any) -> Any:
        """Return the object that owns the tensor's memory, of which there may be weak references."""
        return None

    def span(self, tensor: Any) -> Span | None:
        """Return the place of the elements in memory; None where that has no meaning."""
        return None

    # ---- ops ----

    def made(self, context: amanda.OpContext) -> str:
        """Return the kind of an op's outputs; "" for an op that reads out its first input."""
        return "activation" if context.is_forward() else "gradient"

    def brings_in(self, context: amanda.OpContext) -> bool:
        """Return True for an op whose outputs are new data from outside each time."""
        return False

    def is_symbolic(self, context: amanda.OpContext) -> bool:
        """Return True where the analysis is given symbols of a graph, instead of values."""
        return not context.namespace.matches("*/*/eager")

    def op_name(self, context: amanda.OpContext) -> str:
        """Return the framework's own name of the op that runs."""
        op = context.get_op() if context.is_forward() else context.get_backward_op()
        return str(getattr(op, "__name__", op))

    def written(self, context: amanda.OpContext) -> Sequence[int]:
        """Return positions of inputs that an op writes, besides those whose version changes."""
        return (0,) if context["in_place"] else ()

    def note_call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Note the indices of the tensors with which an op calls functions."""

    # ---- the backward pass, where its edges are known apart from the gradients ----

    numbers_nodes = False
    """True where autodiff numbers the nodes that it makes."""

    def in_backward(self) -> bool:
        """Return True if a backward pass is known to be under way in this thread."""
        return False

    def next_number(self) -> int | None:
        """Return the number that autodiff's next node will have."""
        return None

    def node_number(self) -> int | None:
        """Return the number of the node that runs; None for a node that accumulates a leaf's gradient."""
        return None

    def arrived(self, count: int, take: bool = True) -> list[list[int]] | None:
        """Return the recorded gradients that are added up to each of the op's; None where none is known.

        take: forget them.
        """
        return None

    def send(self, gradients: Sequence[int | None]) -> None:
        """Note the recorded gradients that leave the op, for the ops that they go to."""

    def accumulated(self) -> Any:
        """Return the tensor in which the op accumulates gradients; None for other ops."""
        return None


def values_of(framework: str, shape: Ask, dtype: Ask) -> Values:
    """Return the answers for a framework, of the module of this package that has its name if there is one."""
    name = f"{__package__}._{framework}"
    kind: type[Values] = import_module(name).FrameworkValues if find_spec(name) else Values
    return kind(shape, dtype)
