"""Parameters: places in the trees of arrays that programs differentiate.

A step of training makes new arrays. What stays is the place of an array in the tree, `layers.0.weight`, and the function
whose gradient the program asks for; an array at the same place is the same parameter to tools.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from amanda.backend import TensorMap
from amanda.drivers.autograd._boxes import plain


class Slot:
    """A parameter, which holds one array after another."""

    def __init__(self, path: str, array: np.ndarray[Any, Any]) -> None:
        self.path = path
        self.hold(array)

    def hold(self, array: np.ndarray[Any, Any]) -> None:
        """Take an array as the present value."""
        self._reference = weakref.ref(array)

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The present value."""
        array = self._reference()
        if array is None:
            raise LookupError(f"the array of parameter {self.path!r} has been freed")
        return array


class Slots:
    """The parameters of the process, by array and by place."""

    def __init__(self) -> None:
        self._by_array: TensorMap[Slot] = TensorMap()
        self._by_place: weakref.WeakKeyDictionary[Any, dict[str, Slot]] = weakref.WeakKeyDictionary()

    def get(self, value: Any) -> Slot | None:
        """Return the parameter whose value is an array, in a box or not."""
        array = plain(value)
        return self._by_array.get(array) if isinstance(array, np.ndarray) else None

    def of(self, args: Sequence[Any]) -> list[Slot]:
        """Return the parameters among the arguments of a call."""
        return [slot for value in args if (slot := self.get(value)) is not None]

    def add(self, tree: Any, owner: Callable[..., Any] | None = None) -> list[Slot]:
        """Make parameters of the arrays in a tree, and return them.

        owner: function that the program differentiates with respect to such a tree.
        """
        places = {} if owner is None else self._by_place.setdefault(owner, {})
        slots = []
        for path, array in leaves(tree):
            slot = self._by_array.get(array)
            if slot is None:
                slot = places.get(path)
                if slot is None:
                    slot = Slot(path, array)
                slot.hold(array)
                self._by_array[array] = slot
            slots.append(places.setdefault(path, slot) if owner is not None else slot)
        return slots


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays of nested dicts, lists, tuples and modules, with their paths."""
    tree = plain(tree)
    if isinstance(tree, np.ndarray):
        yield path, tree
        return
    if isinstance(tree, dict):
        branches = tree.items()
    elif isinstance(tree, (list, tuple)):
        branches = enumerate(tree)
    elif isinstance(tree, Module):
        branches = vars(tree).items()
    else:
        return
    for key, branch in branches:
        yield from leaves(branch, f"{path}.{key}".lstrip("."))


class Module:
    """Base class for parts of a model whose calls tools name by their paths, such as `layers.0`."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward`, which a subclass defines."""
        return self.forward(*args, **kwargs)

    def modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and those within, with their paths."""
        yield path, self
        for key, value in vars(self).items():
            for place, part in enumerate(value) if isinstance(value, (list, tuple)) else [("", value)]:
                if isinstance(part, Module):
                    yield from part.modules(f"{path}.{key}.{place}".strip("."))


SLOTS = Slots()


def mark_parameters(tree: Any) -> Any:
    """Make parameters of the arrays in a tree, for a program that does not differentiate them; return the tree."""
    SLOTS.add(tree)
    return tree
