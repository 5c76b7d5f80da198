"""Parameters and modules.

Parameters are the arrays that a program differentiates. A step of training makes new arrays. What stays is
the place in the tree, such as `layers.0.weight`, and the function that is differentiated: an array in the
same place is the same parameter to tools.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from amanda.backend import TensorMap
from amanda.errors import AmandaError
from autograd.tracer import getval


class Slot:
    """A parameter, which is one array after another."""

    framework = "autograd"  # where tools find how it is read and written

    def __init__(self, path: str) -> None:
        self.path = path
        self.array: Callable[[], Any] = lambda: None


_by_array: TensorMap[Slot] = TensorMap()
_by_function: weakref.WeakKeyDictionary[Callable[..., Any], dict[str, Slot]] = weakref.WeakKeyDictionary()


def slot_of(value: Any) -> Slot | None:
    """Return the parameter that an array is, in a box or not; None for another value."""
    array = getval(value)
    return _by_array.get(array) if isinstance(array, np.ndarray) else None


def mark_parameters(tree: Any, function: Callable[..., Any] | None = None) -> Any:
    """Make parameters of the arrays in a tree, as if the program differentiated a function; return the tree.

    Without a function, new arrays are those of the function whose tree has the same places.
    """
    arrays = dict(leaves(tree))
    places: dict[str, Slot] = {}
    if function is not None:
        with suppress(TypeError):  # an object that has no hash, or no weak reference
            places = _by_function.setdefault(getattr(function, "__func__", function), places)
    elif "" not in arrays and not all(map(slot_of, arrays.values())):  # "": no tree, but one array
        places, *others = [known for known in _by_function.values() if known.keys() == arrays.keys()] or [{}]
        if others:
            raise AmandaError("several functions have such parameters; use mark_parameters(tree, function)")
    for path, array in arrays.items():
        slot = slot_of(array)
        if slot is None:
            slot = _by_array[array] = places.get(path, Slot(path))
            slot.array = weakref.ref(array)
        places.setdefault(path, slot)
    return tree


def _branches(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a dict, list, tuple or module, with their names."""
    tree = vars(tree) if isinstance(tree, Module) else tree
    is_sequence = isinstance(tree, (list, tuple))
    yield from enumerate(tree) if is_sequence else tree.items() if isinstance(tree, dict) else ()


def leaves(tree: Any, kind: type = np.ndarray, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is of a type in a tree, such as its arrays, with its path."""
    tree = getval(tree)
    if isinstance(tree, kind):
        yield path, tree
    for name, branch in _branches(tree):
        yield from leaves(branch, kind, f"{path}.{name}".lstrip("."))


class Module:
    """Base class for parts of a model that tools name by their paths; a subclass defines `forward`."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward`."""
        return self.forward(*args, **kwargs)
