"""Memory that a program finds when it begins, such as parameters and buffers, copied and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import amanda
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import tree_iter, tree_map


class MemorySnapshot(amanda.Tool):
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
        return tree_map(self._copied, value, is_leaf=_is_leaf)

    def _copied(self, value: Any) -> Any:
        in_found = any(key in self._found for key, _ in _memories([value]))
        return tensors_of(value).duplicate(value) if in_found else value

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


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict) and type(value) not in (list, tuple)


def _memories(values: Any) -> Iterator[tuple[Any, Callable[[], Callable[[], None]]]]:
    """Yield the key of the memory of each value, also in lists, with the function that copies it."""
    found = (tensors_of(value).memory(value) for value in tree_iter(values))
    yield from (memory for memory in found if memory is not None)
