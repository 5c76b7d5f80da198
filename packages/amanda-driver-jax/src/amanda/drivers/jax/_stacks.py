"""Stacks of weights: a scan reads a slice at each round, a function that is mapped over one for each row."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Attributes, TensorMap
from jax._src.interpreters import batching
from jax._src.lax.control_flow import loops

from ._primitives import ORIGINALS
from ._traces import is_tensor


class Slice(NamedTuple):
    """A slice of an array.  number: its place along the axis, as a symbol.  size: of that axis."""

    array: Any
    number: Any
    axis: int
    size: int


class _Thread(threading.local):
    """stacks: the arrays that the scans under way go along.  numbers: of the slices that an op reads now."""

    def __init__(self) -> None:
        self.stacks: list[Sequence[Any]] = []
        self.numbers: Mapping[Any, tuple[int, ...]] = {}


_thread = _Thread()
_SLICES: TensorMap[Slice] = TensorMap()


class _Numbered:
    """Slices, with their number: paths of arguments do not show it."""

    def __init__(self, slices: Any, number: Any) -> None:
        self.slices, self.number = slices, number


class _Hidden:
    def __str__(self) -> str:
        return ""


jax.tree_util.register_pytree_with_keys(
    _Numbered,
    lambda one: (((_Hidden(), one.slices), (_Hidden(), one.number)), None),
    lambda _, children: _Numbered(*children),
)


def follow_scans(attributes: Attributes) -> None:
    """Record what scans slice, with the number of the round.

    JAX's public function calls another, which is replaced: programs have references to the public one.
    """
    bodies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    cells = dict(zip(loops.scan.__code__.co_freevars, loops.scan.__closure__ or (), strict=True))
    cell = cells["fun"]
    attributes.on_restore(partial(setattr, cell, "cell_contents", cell.cell_contents))
    cell.cell_contents = _numbered(cell.cell_contents, bodies)


def _numbered(original: Callable[..., Any], bodies: weakref.WeakKeyDictionary[Any, Any]) -> Any:
    @wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        stacks = jax.tree_util.tree_leaves(xs)
        may_hold = any(is_tensor(one) and len(one.shape) > 2 for one in stacks)  # stacked matrices, and more
        if interceptor.active() is None or not may_hold or not callable(f):
            return original(f, init, xs, *args, **kwargs)
        try:
            body = bodies.get(f) or bodies.setdefault(f, _body(f))  # the same, for JAX's caches
        except TypeError:
            body = _body(f)
        _thread.stacks.append(stacks)
        try:
            numbers = np.arange(stacks[0].shape[0], dtype=np.int32)
            return original(body, init, _Numbered(xs, numbers), *args, **kwargs)
        finally:
            _thread.stacks.pop()

    return scan


def _body(f: Any) -> Callable[..., Any]:
    """Return the body of a scan that records the slices as it is traced."""
    try:
        reference = weakref.ref(f)
    except TypeError:
        reference = lambda: f  # type: ignore[assignment] # noqa: E731 - stands for a reference

    @wraps(f)
    def body(carry: Any, numbered: _Numbered) -> Any:
        slices = jax.tree_util.tree_leaves(numbered.slices)
        for one, array in zip(slices, _thread.stacks[-1], strict=True):
            if isinstance(one, jax.core.Tracer):
                _SLICES[one] = Slice(array, numbered.number, 0, array.shape[0])
        function: Any = reference()
        return function(carry, numbered.slices)

    return body


def slices_of(value: Any) -> tuple[Any, list[Slice]]:
    """Return the array that a value is a part of, and the slices on the way from there to the value."""
    found: list[Slice] = []
    while isinstance(value, jax.core.Tracer):
        value = ORIGINALS.of(value)
        part = _SLICES.get(value)
        if part is None and isinstance(value, batching.BatchTracer) and isinstance(value.batch_dim, int):
            size = value.val.shape[value.batch_dim]
            number = batching.BatchTracer(value._trace, np.arange(size, dtype=np.int32), 0)
            part = Slice(value.val, number, value.batch_dim, size)
        if part is None:
            break
        found.insert(0, part)
        value = part.array
    return value, found


def pass_on(made: Any, value: Any) -> None:
    """Record that a symbol is the same slice as another, in another element type."""
    part = _SLICES.get(ORIGINALS.of(value))
    if part is not None:
        _SLICES[ORIGINALS.of(made)] = part


@contextmanager
def reading(numbers: Mapping[Any, tuple[int, ...]]) -> Iterator[None]:
    """Context in which an op reads these slices of stacks."""
    before, _thread.numbers = _thread.numbers, numbers
    try:
        yield
    finally:
        _thread.numbers = before


def numbers_of(stack: Any) -> tuple[int, ...] | None:
    """Return the numbers of the slice of a stack that an op reads, in its routines; None outside of these."""
    return _thread.numbers.get(stack)
