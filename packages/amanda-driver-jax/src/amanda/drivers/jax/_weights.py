"""Weights: slots of a model, or arguments of a jitted function; arrays come and go in them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
from amanda.backend import TensorMap

from ._modules import Place, dotted, held_arrays, number_of
from ._primitives import ORIGINALS
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


_CONVERTED: TensorMap[Slot] = TensorMap()
"""Weights in another element type, by the arrays or symbols that have it."""


def follow_conversion(value: Any, made: Any, subjects: Sequence[Place]) -> None:
    """Record that an array was made of another, which may be a weight."""
    found = variable_of(value, subjects)
    if found is not None:
        _CONVERTED[ORIGINALS.of(made)] = found


def variable_of(value: Any, subjects: Sequence[Place]) -> Slot | None:
    """Return the slot of an array that the model holds which is called; None for others.

    Outside of models it is the slot of a leaf of an argument.
    """
    value = ORIGINALS.of(value)
    found = _CONVERTED.get(value)
    if found is not None:
        return found
    path, argument = _path(value, subjects), dotted(argument_name(value) or "")
    if path is not None:
        return slot(_root(subjects[0]), path)
    if subjects or "." not in argument:  # an argument that is one array may be anything
        return None
    return slot("", argument)


def _root(place: Place) -> str:
    """Return the class of a model, and its number among those of the class that these tools have met."""
    number = number_of(place)
    return f"{place.root} {number}" if number else place.root


def _path(array: Any, subjects: Sequence[Place]) -> str | None:
    model = subjects[0].module if subjects else None
    if model is None or not isinstance(array, (jax.Array, jax.core.Tracer)):
        return None
    return next((path for path, leaf in held_arrays(model) if ORIGINALS.of(leaf) is array), None)
