"""Ops as they were analysed, and the ops that their inputs come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import amanda
from amanda.tools.kit import Dataflow

_FAR, _AROUND = 200, 1000


@dataclass(eq=False)
class Node:
    """An op as it was analysed.

    inputs: numbers of the tensors that it reads, None for what is no tensor.  shapes: theirs; of a list
    those of its first.  reads: all numbers, also of tensors in lists.  notes: what a tool knows of it.
    """

    type: str
    inputs: tuple[int | None, ...]
    shapes: tuple[tuple[int | None, ...] | None, ...]
    reads: tuple[int, ...]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> int | None:
        """The first tensor that it reads."""
        return next(iter(self.reads), None)


class Flow(Dataflow[Node]):
    """The ops that have made tensors, as nodes."""

    def node(self, context: amanda.OpContext) -> Node:
        """Return the op that is about to run."""
        shape, inputs = context["shape"], context.get_inputs()
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in inputs]
        numbers = [
            [self.number(one) if shape(one) is not None else None for one in values] for values in lists
        ]
        return Node(
            context["type"],
            tuple(None if isinstance(value, (list, tuple)) else one[0]
                  for value, one in zip(inputs, numbers, strict=True)),
            tuple(shape(values[0]) if values else None for values in lists),
            tuple(one for each in numbers for one in each if one is not None),
        )  # fmt: skip

    def back(self, number: int | None) -> Iterator[tuple[int, Node | None]]:
        """Yield a tensor and its maker, then the first tensor that this one reads, and so on."""
        for _ in range(_FAR):
            if number is None:
                return
            node = self.maker(number)
            yield number, node
            number = None if node is None else node.data

    def nearest(self, numbers: Iterable[int | None], note: str) -> Any:
        """Return what a tool has noted under a name of the nearest op that these tensors come from."""
        waiting, seen = deque(numbers), set[int | None]()
        while waiting and len(seen) < _AROUND:
            number = waiting.popleft()
            node = None if number in seen else self.maker(number)
            seen.add(number)
            if node is not None:
                if note in node.notes:
                    return node.notes[note]
                waiting.extend(node.reads)
        return None
