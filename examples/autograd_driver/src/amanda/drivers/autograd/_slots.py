"""Parameters and modules.

Parameters are the arrays that a program differentiates. A step of training makes new arrays. What stays is
the place in the tree, such as `layers.0.weight`, and the code of the function that is differentiated: an
array in the same place is the same parameter to tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import unwrap
from typing import Any

import numpy as np

from amanda.backend import TreeSlot, TreeSlots, named_leaves
from autograd.tracer import getval

_SLOTS = TreeSlots("autograd")


def slot_of(value: Any) -> TreeSlot | None:
    """Return the parameter that an array is, in a box or not; None for another value."""
    return _SLOTS.get(getval(value))


def mark_parameters(tree: Any, function: Callable[..., Any] | None = None) -> Any:
    """Make parameters of the arrays in a tree, as if the program differentiated a function; return the tree.

    Without a function, new arrays are those of the function whose tree has the same places.
    Raises AmandaError where several functions have such a tree.
    """
    _SLOTS.put(dict(leaves(tree)), None if function is None else _code_of(function))
    return tree


def _code_of(function: Any) -> Any:
    """Return what stays of a function that a program makes anew in each step: its code, or its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(unwrap(function), "__code__", type(function))


def leaves(tree: Any, kind: type = np.ndarray) -> Iterator[tuple[str, Any]]:
    """Yield what is of a type in a tree, such as its arrays, with its path."""
    return named_leaves(tree, kind, lambda node: vars(node) if isinstance(node, Module) else getval(node))


class Module:
    """Base class for parts of a model that tools name by their paths; a subclass defines `forward`."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward`."""
        return self.forward(*args, **kwargs)
