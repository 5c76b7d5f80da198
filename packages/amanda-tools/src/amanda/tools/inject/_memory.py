"""The memory that a program finds when it begins, as of parameters, where no fault is to stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import amanda
from amanda.tools.kit import tensors_of


class FoundMemory(amanda.Tool):
    """Copies memory that ops of a program read or write and that no op of the program has made.

    `restore` makes every byte of it what it was when the program first met it.
    """

    def __init__(self) -> None:
        self.clear()
        self.add_inst_for_op(self._analyse)

    def clear(self) -> None:
        """Drop all copies."""
        self._found: dict[Any, Callable[[], None]] = {}
        self._made: set[Any] = set()

    def restore(self) -> None:
        """Put everything back."""
        with amanda.disabled():
            for restore in self._found.values():
                restore()

    def outlasting(self, value: Any) -> Any:
        """Return the value with copies of the tensors in it that lie in memory which `restore` writes."""
        if isinstance(value, dict):
            return {key: self.outlasting(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.outlasting(one) for one in value)
        in_found = any(key in self._found for key, _ in _memories([value]))
        return value.clone() if in_found and hasattr(value, "clone") else value

    def _analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._find)
        context.insert_after_op(self._note_made)

    @amanda.observer
    def _find(self, *inputs: Any) -> None:
        for key, save in _memories(inputs):
            if key not in self._found and key not in self._made:
                self._found[key] = save()

    @amanda.observer
    def _note_made(self, *outputs: Any) -> None:
        self._made.update(key for key, _ in _memories(outputs) if key not in self._found)


def _memories(values: Any) -> Iterator[tuple[Any, Callable[[], Callable[[], None]]]]:
    """Yield the key of the memory of each value, also in lists, with the function that copies it."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _memories(value)
        elif (memory := tensors_of(value).memory(value)) is not None:
            yield memory
