"""Boxes, in which autograd's traces keep arrays: what lies in them, and values that take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from autograd.builtins import SequenceBox, container_untake
from autograd.core import sparse_add, sparse_object_types, vspace
from autograd.extend import defjvp, defjvp_argnums, defvjp, defvjp_argnum, defvjp_argnums, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Node, getval, isbox

from amanda.errors import RoutineError

Array = (np.ndarray, np.generic)


def is_tensor(value: Any) -> bool:
    """Return True for an array, a NumPy scalar, and for either in a box."""
    return isinstance(value, (*Array, ArrayBox))


def plain(value: Any) -> Any:
    """Return a value, or the values of a list, without boxes."""
    if isbox(value):
        return plain(getval(value))
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def nodes(value: Any) -> Iterator[Node]:
    """Yield the nodes of a value in each trace, the innermost trace first; those of each element of a list."""
    if type(value) in (list, tuple):
        for element in value:
            yield from nodes(element)
    while isbox(value):
        yield value._node
        value = value._value


def each(value: Any, read: Callable[[Any], Any]) -> Any:
    """Read something of a tensor, or of each tensor of a list; None for other values."""
    if is_tensor(value):
        return read(value)
    if type(value) in (list, tuple):
        return tuple(read(tensor) for tensor in value if is_tensor(tensor)) or None
    return None


def fitting(original: Any, value: Any) -> Any:
    """Return a copy of an array in the element type of a tensor."""
    original, array = plain(original), np.asarray(plain(value))
    if array.shape != np.shape(original):
        raise RoutineError(
            f"a routine returned shape {array.shape} where shape {np.shape(original)} was given; mark it "
            "@amanda.differentiable if it is meant to change shapes"
        )
    if np.iscomplexobj(array) != np.iscomplexobj(original):
        raise RoutineError(f"a routine returned {array.dtype} where {np.result_type(original)} was given")
    copy = array.astype(np.result_type(original))
    return copy if isinstance(original, np.ndarray) else copy[()]


@primitive
def straight_through(original: Any, value: Any) -> Any:
    """Return a copy of a value, whose gradient goes unchanged to the original."""
    return fitting(original, value)


defvjp(straight_through, lambda ans, original, value: lambda g: g, None)
defjvp(straight_through, lambda g, ans, original, value: g, None)


class ElementGradient:
    """Backward step of `element`, which belongs to no op."""

    def __init__(self, argnums: Any, answer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        self.index, self.space = args[1], vspace(args[0])

    def __call__(self, gradient: Any) -> Any:
        return (container_untake(gradient, self.index, self.space),)


@primitive
def element(sequence: Any, index: int) -> Any:
    """Return an element of an op's sequence of results."""
    return sequence[index]


defvjp_argnums(element, ElementGradient)
defjvp(element, "same")


@primitive
def sequence(kind: type, *elements: Any) -> Any:
    """Return elements as a sequence of a type."""
    return kind(*elements) if hasattr(kind, "_fields") else kind(elements)


defvjp_argnum(sequence, lambda argnum, ans, args, kwargs: lambda g: g[argnum - 1])
defjvp_argnums(sequence, lambda argnums, gs, ans, args, kwargs: _tangent(argnums, gs, ans))


def _tangent(argnums: Any, tangents: Any, answer: Any) -> Any:
    """Return the tangent of a sequence of which some elements have tangents."""
    given = dict(zip(argnums, tangents, strict=True))
    zeros = vspace(answer).zeros()
    return sequence(type(plain(answer)), *(given.get(i + 1, zero) for i, zero in enumerate(zeros)))


def elements(outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return an op's result as a list, and a function that puts such a list back into its form."""
    if isinstance(outputs, SequenceBox):
        values = [element(outputs, index) for index in range(len(outputs))]
    elif isinstance(outputs, (list, tuple)):
        values = list(outputs)
    else:
        return [outputs], lambda changed: changed[0]
    kind = type(plain(outputs))

    def rebuild(changed: list[Any]) -> Any:
        is_same = all(new is old for new, old in zip(changed, values, strict=True))
        return outputs if is_same else sequence(kind, *changed)

    return list(values), rebuild


def dense(gradient: Any) -> Any:
    """Return a gradient that stores each of its elements."""
    if type(gradient) in sparse_object_types:
        return sparse_add(vspace(gradient), None, gradient)
    return gradient
