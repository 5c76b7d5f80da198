"""What is asked of the tensors of a framework: which is which, what they are, whose memory they share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

import amanda
from amanda.tools.mapping import itemsize

Forget = Callable[[Hashable], None]


class Description(NamedTuple):
    """The fields of a tensor that it tells of itself."""

    shape: tuple[int | None, ...] | None
    dtype: str | None
    device: str | None
    bytes: int | None


class Span(NamedTuple):
    """Where a tensor's elements are: the first, in elements of so many bytes from the memory's start.

    memory: names it among all that live.
    """

    memory: Hashable
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int


class Values:
    """Tensors of a framework of which only the words of StandardMapping are known."""

    def __init__(self, shape: Callable[[Any], Any], dtype: Callable[[Any], Any]) -> None:
        self._shape = shape
        self._dtype = dtype

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, also one of unknown rank."""
        return self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        """Return True if a tensor has no elements, but stands for a variable, an iterator or their like."""
        return False

    def key(self, tensor: Any) -> Hashable:
        """Tells a tensor from all others, as long as `hold` has not told that it is gone."""
        return id(tensor)

    def hold(self, tensor: Any, key: Hashable, forget: Forget) -> Any:
        """A weak reference; when the tensor is gone, `forget` is called, or `is_gone` tells."""
        try:
            return weakref.ref(tensor, lambda _: forget(key))
        except TypeError:
            return tensor

    def is_gone(self, held: Any) -> bool:
        """Return True if the tensor of a weak reference is freed."""
        return False

    def describe(self, tensor: Any) -> Description:
        """Extents, element type, device and size."""
        shape, dtype = self._shape(tensor), self._dtype(tensor)
        size = None if shape is None or None in shape else prod(shape) * (itemsize(dtype) or 0)
        device = getattr(tensor, "device", None)
        return Description(shape, dtype, str(device) if device else None, size)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Kind and name of a tensor that no recorded op made."""
        return "input", self.name(tensor)

    def made(self, context: amanda.OpContext) -> str:
        """Kind of what an op makes; "" for that of its first input, which it reads out."""
        return "activation" if context.is_forward() else "gradient"

    def brings_in(self, context: amanda.OpContext) -> bool:
        """Return True if an op gives new data from outside at each execution."""
        return False

    def name(self, tensor: Any) -> str | None:
        """The framework's name of a tensor."""
        return None

    def outer(self, tensor: Any) -> Any:
        """The caller's tensor that a function's argument stands for, or its index; None of others."""
        return None

    def is_symbolic(self, context: amanda.OpContext) -> bool:
        """Return True if the analysis is given symbols, whose values come later."""
        return not context.is_eager()

    def call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Take the indices of the tensors with which an op calls functions."""

    def op_name(self, context: amanda.OpContext) -> str:
        """The framework's own name of the op that runs."""
        op = context.get_op() if context.is_forward() else context.get_backward_op()
        return str(getattr(op, "__name__", op))

    def version(self, tensor: Any) -> int | None:
        """Return a counter that changes when a tensor is written; None without one."""
        return None

    def written(self, context: amanda.OpContext) -> Sequence[int]:
        """Positions of inputs that an op writes; versions tell of others."""
        return (0,) if context["in_place"] else ()

    def span(self, tensor: Any) -> Span | None:
        """Where its elements are; None where that has no meaning."""
        return None

    def hold_memory(self, tensor: Any) -> Any:
        """A weak reference to a tensor's memory: while it is held, no other memory has its name."""
        return None

    def is_memory_gone(self, held: Any) -> bool:
        """Return True if the memory of such a reference is freed."""
        return False

    # ---- the backward pass, where its edges are known apart from the gradients ----

    numbers_nodes = False
    """Whether autodiff counts the nodes that it makes."""

    def in_backward(self) -> bool:
        """Return True if a backward pass is known to run in this thread."""
        return False

    def next_number(self) -> int | None:
        """Return the number of autodiff's next node."""
        return None

    def node_number(self) -> int | None:
        """Return the number of the node that runs; None for a node that adds up a leaf's gradient."""
        return None

    def entering(self, count: int, take: bool = True) -> list[list[int]] | None:
        """The recorded gradients that are added up to each that enters the op; None: by themselves.

        take: whether they have arrived with that.
        """
        return None

    def leave(self, gradients: Sequence[int | None]) -> None:
        """Take the recorded gradients that leave the op."""

    def accumulated(self) -> Any:
        """The tensor in which the op adds gradients up; None of others."""
        return None
