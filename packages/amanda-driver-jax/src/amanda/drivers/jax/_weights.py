"""Weights: slots of a model, or arguments of a jitted function; arrays come and go in them."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax

from ._modules import Place, dotted, held_arrays, number_of
from ._taps import ORIGINALS
from ._traces import argument_name

CONVERSIONS = frozenset({"convert_element_type", "copy", "copy_p"})
"""Primitives whose result is the same weight, in another element type."""


class Slot:
    """The place of a weight in a model, or in the arguments of a function: it stays from call to call.

    root: class of the model; "" for arguments.  path: "layers.0.kernel", "params.dense.kernel".
    framework: for tools, which ask it of tensors.
    """

    __slots__ = ("__weakref__", "path", "root")
    framework = "jax"

    def __init__(self, root: str, path: str) -> None:
        self.root, self.path = root, path

    def __repr__(self) -> str:
        return f"<weight {self.path}{' of ' * bool(self.root)}{self.root}>"


@cache
def slot(root: str, path: str) -> Slot:
    """Return the slot of a path; there is one object for each."""
    return Slot(root, path)


class Converted:
    """Weights in another element type, as long as these arrays or symbols live."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[weakref.ref[Any], Slot]] = {}

    def follow(self, value: Any, made: Any, subjects: Sequence[Place]) -> None:
        """Record that an array was made of another, which may be a weight."""
        found = variable_of(value, subjects)
        if found is not None:
            made = ORIGINALS.of(made)
            self._slots[id(made)] = weakref.ref(made, partial(self._forget, id(made))), found

    def of(self, value: Any) -> Slot | None:
        """Return the slot that an array was converted from the weight of."""
        known = self._slots.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def _forget(self, key: int, _: Any) -> None:
        self._slots.pop(key, None)


CONVERTED = Converted()


def variable_of(value: Any, subjects: Sequence[Place]) -> Slot | None:
    """Return the slot of an array that the model holds which is called; None for others.

    Outside of models it is the slot of a leaf of an argument.
    """
    value = ORIGINALS.of(value)
    found = CONVERTED.of(value)
    if found is not None:
        return found
    path, argument = _path(value, subjects), dotted(argument_name(value) or "")
    if path is not None:
        return slot(_root(subjects[0]), path)
    if subjects or "." not in argument:  # an argument that is one array may be anything
        return None
    return slot("", argument)


def path_of(subjects: Sequence[Place]) -> Callable[[Any], str | None]:
    """Return what gives the path of a weight."""
    return lambda variable: variable.path


def _root(place: Place) -> str:
    """Return the class of a model, and its number among those of the class that these tools have met."""
    number = number_of(place)
    return f"{place.root} {number}" if number else place.root


def _path(array: Any, subjects: Sequence[Place]) -> str | None:
    model = subjects[0].module if subjects else None
    if model is None or not isinstance(array, (jax.Array, jax.core.Tracer)):
        return None
    return next((path for path, leaf in held_arrays(model) if ORIGINALS.of(leaf) is array), None)
