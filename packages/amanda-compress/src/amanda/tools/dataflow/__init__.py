"""Dataflow: the op that made each tensor, as far as ops have been analysed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import amanda
from amanda.backend import TensorMap

__all__ = ["Dataflow", "DataflowNode"]

# Bounds of a loop that never ends: makers that are kept, and ops that a search visits.
_MAX_MAKERS, _MAX_STEPS, _MAX_VISITED = 100_000, 200, 1000


@dataclass(eq=False)
class DataflowNode:
    """An op as it was analysed.

    op_id: of the op.  type, shapes: as StandardMapping has them; of a list of tensors the shape of the first.
    inputs: numbers of the tensors that the op reads, None for other values.  reads: all numbers, also of
    tensors in lists.  notes: what a tool knows of the op.
    """

    op_id: int
    type: str
    inputs: tuple[int | None, ...]
    shapes: tuple[tuple[int | None, ...] | None, ...]
    reads: tuple[int, ...]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> int | None:
        """The number of the first tensor that the op reads."""
        return next(iter(self.reads), None)


class Dataflow:
    """Number tensors at their first use, and remember the op that made each tensor.

    Call `node` in an analysis routine of each forward op, and `made` in one with `require_outputs=True`; the
    tool depends on StandardMapping.
    """

    def __init__(self) -> None:
        self._numbers: TensorMap[int] = TensorMap()
        self._makers: dict[int, DataflowNode] = {}
        self._next = count()

    def node(self, context: amanda.OpContext) -> DataflowNode:
        """Return a new node for the op that is about to run; number the tensors that it reads, if new."""
        shape, dtype = context["shape"], context["dtype"]
        lists: list[Sequence[Any]] = [  # of the tensors of each input
            value if isinstance(value, (list, tuple)) else [value] for value in context.get_inputs()
        ]
        # None for what is no tensor, which has no dtype.
        numbers = [[None if dtype(x) is None else self.number(x) for x in values] for values in lists]
        return DataflowNode(
            context.get_op_id(), context["type"],
            tuple(None if isinstance(value, (list, tuple)) else group[0]
                  for value, group in zip(context.get_inputs(), numbers, strict=True)),
            tuple(shape(values[0]) if values else None for values in lists),
            tuple(number for group in numbers for number in group if number is not None),
        )  # fmt: skip

    def made(self, node: DataflowNode, tensors: Iterable[Any]) -> None:
        """Record an op as the maker of its outputs, which get new numbers.

        Args:
            node: The result of `node` for the op.
            tensors: Outputs of the op, or what a routine returned in their place.
        """
        for tensor in tensors:
            number = self._renumbered(tensor)
            if number is not None:
                self._makers[number] = node
                # Numbers rise, so the maker that this one displaces is the oldest.
                self._makers.pop(number - _MAX_MAKERS, None)

    def number(self, tensor: Any) -> int | None:
        """Return the number of a tensor, a new one for a new tensor; None for other values."""
        number = self._numbers.get(tensor)
        return self._renumbered(tensor) if number is None else number

    def _renumbered(self, tensor: Any) -> int | None:
        """Give a tensor a new number, also if it has one, and return it; None for other values."""
        number = next(self._next)
        try:
            self._numbers[tensor] = number
        # A value that no weak reference can follow, such as a number of Python.
        except TypeError:
            return None
        return number

    def maker(self, number: int | None) -> DataflowNode | None:
        """Return the op that produced the tensor with this number; None if unknown."""
        return None if number is None else self._makers.get(number)

    def back(self, number: int | None) -> Iterator[tuple[int, DataflowNode | None]]:
        """Yield a tensor's number and its maker, then the first tensor that the maker reads, and so on.

        The last maker is None where none is known; in a loop that never ends the walk is cut.
        """
        for _ in range(_MAX_STEPS):
            if number is None:
                return
            node = self.maker(number)
            yield number, node
            number = None if node is None else node.data

    def nearest(self, numbers: Iterable[int | None], note: str) -> Any:
        """Return the note of a name at the nearest op that these tensors come from; None without one.

        Args:
            numbers: Numbers of the tensors, as `number` returns them.
            note: Name of the note.
        """
        waiting, visited = deque(numbers), set[int | None]()
        while waiting and len(visited) < _MAX_VISITED:
            number = waiting.popleft()
            node = None if number in visited else self.maker(number)
            visited.add(number)
            if node is not None:
                if note in node.notes:
                    return node.notes[note]
                waiting.extend(node.reads)
        return None
