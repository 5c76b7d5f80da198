"""Boxes, in which autograd's traces hold arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from amanda.backend import complex_error, shape_error
from autograd.builtins import SequenceBox
from autograd.core import sparse_add, sparse_object_types
from autograd.extend import defjvp, defvjp, primitive, vspace
from autograd.tracer import Node, getval, isbox


def plain(value: Any) -> Any:
    """Return a value without boxes, or the values of a list."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return getval(value)


def nodes(value: Any) -> Iterator[Node]:
    """Yield the node of a value in each trace that has it in a box; those of each element of a list."""
    if type(value) in (list, tuple):
        for element in value:
            yield from nodes(element)
    while isbox(value):
        yield value._node
        value = value._value


@primitive  # type: ignore[untyped-decorator]
def straight_through(original: Any, value: Any) -> Any:
    """Return a copy of a value in the element type of a tensor, to which its gradient goes unchanged."""
    copy = np.array(value)
    if copy.shape != original.shape:
        raise shape_error(copy.shape, original.shape)
    if np.iscomplexobj(copy) != np.iscomplexobj(original):
        raise complex_error(copy.dtype, original.dtype)
    # An array without axes stays an array, and a scalar a scalar.
    return copy.astype(original.dtype)[... if isinstance(original, np.ndarray) else ()]


defvjp(straight_through, lambda ans, original, value: lambda g: g, None)
defjvp(straight_through, lambda g, ans, original, value: g, None)


def elements(outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return an op's result as a list, and a function that puts such a list back into its form."""
    if not isinstance(outputs, (SequenceBox, list, tuple)):
        return [outputs], lambda changed: changed[0]
    kind = type(getval(outputs))
    values, form = [outputs[index] for index in range(len(outputs))], getattr(kind, "_make", kind)
    return [*values], lambda changed: outputs if all(map(operator.is_, changed, values)) else form(changed)


def dense(gradient: Any) -> Any:
    """Return a gradient that stores each of its elements."""
    is_sparse = type(gradient) in sparse_object_types
    return sparse_add(vspace(gradient), None, gradient) if is_sparse else gradient
