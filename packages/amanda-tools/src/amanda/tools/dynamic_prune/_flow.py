"""Which op made a tensor of which, as far as ops have been analysed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import amanda

_KNOWN, _FAR, _AROUND = 100_000, 200, 1000


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


class Flow:
    """Numbers tensors as they are met, and remembers which op made each; it keeps no tensor alive."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._makers: dict[int, Node] = {}
        self._next = count()

    def node(self, context: amanda.OpContext) -> Node:
        """The op that is about to run."""
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

    def made(self, node: Node, tensors: Iterable[Any]) -> None:
        """Hear what an op has made, or what a routine gave in its place."""
        for tensor in tensors:
            number = self._renumbered(tensor)
            if number is not None:
                self._makers[number] = node
                self._makers.pop(number - _KNOWN, None)

    def number(self, tensor: Any) -> int | None:
        """The number of a tensor; a new one for one that is not known, None for what is no tensor."""
        held, number = self._numbers.get(id(tensor), (None, None))
        known = held is not None and held() is tensor
        return number if known else self._renumbered(tensor)

    def _renumbered(self, tensor: Any) -> int | None:
        key, number = id(tensor), next(self._next)
        try:
            held = weakref.ref(tensor, partial(self._forget, key))
        except TypeError:
            return None
        self._numbers[key] = held, number
        return number

    def _forget(self, key: int, _: Any) -> None:
        self._numbers.pop(key, None)

    def maker(self, number: int | None) -> Node | None:
        """The op that made a tensor, by its number."""
        return None if number is None else self._makers.get(number)

    def back(self, number: int | None) -> Iterator[tuple[int, Node | None]]:
        """A tensor and its maker, then the first tensor that this one reads, and so on."""
        for _ in range(_FAR):
            if number is None:
                return
            node = self.maker(number)
            yield number, node
            number = None if node is None else node.data

    def nearest(self, numbers: Iterable[int | None], note: str) -> Any:
        """What a tool has noted under a name of the nearest op that these tensors come from."""
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
