"""Stacks of weights in one array: a scan reads a slice at each round, a mapped function one for each row."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Patches, TensorMap
from jax._src.interpreters import batching
from jax._src.lax.control_flow import loops

from ._primitives import ORIGINALS
from ._traces import is_tensor


class ArraySlice(NamedTuple):
    """A slice of an array.  number: its index along the axis, as a symbol.  size: of that axis."""

    array: Any
    number: Any
    axis: int
    size: int


class _ScanState(threading.local):
    """State of a thread.

    stacks: arrays that the scans under way slice.  numbers: of the slices that an op reads now.
    """

    def __init__(self) -> None:
        self.stacks: list[Sequence[Any]] = []
        self.numbers: Mapping[Any, tuple[int, ...]] = {}


_thread = _ScanState()
_SLICES: TensorMap[ArraySlice] = TensorMap()


class _NumberedSlices:
    """Slices with their number; neither is named in the paths of arguments."""

    def __init__(self, slices: Any, number: Any) -> None:
        self.slices, self.number = slices, number


class _HiddenKey:
    def __str__(self) -> str:
        return ""


jax.tree_util.register_pytree_with_keys(
    _NumberedSlices,
    lambda numbered: (((_HiddenKey(), numbered.slices), (_HiddenKey(), numbered.number)), None),
    lambda _, children: _NumberedSlices(*children),
)


def record_scans(patches: Patches) -> None:
    """Record the arrays that scans slice, with the number of the round.

    The function within JAX's public `scan` is replaced, since programs may hold the public function.
    """
    bodies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    # `jax.lax.scan` is a wrapper whose closure holds the function proper: the cell is exchanged.
    cells = dict(zip(loops.scan.__code__.co_freevars, loops.scan.__closure__ or (), strict=True))
    cell = cells["fun"]
    patches.on_restore(partial(setattr, cell, "cell_contents", cell.cell_contents))
    cell.cell_contents = _number_slices(cell.cell_contents, bodies)


def _number_slices(original: Callable[..., Any], bodies: weakref.WeakKeyDictionary[Any, Any]) -> Any:
    """Wrap `scan` so that its body also gets the number of the round."""

    @wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        stacks = jax.tree_util.tree_leaves(xs)
        may_hold = any(is_tensor(stack) and len(stack.shape) > 2 for stack in stacks)  # matrices, stacked
        if interceptor.active() is None or not may_hold or not callable(f):
            return original(f, init, xs, *args, **kwargs)
        try:
            body = bodies.get(f) or bodies.setdefault(f, _recording_body(f))  # the same, for JAX's caches
        except TypeError:
            body = _recording_body(f)
        _thread.stacks.append(stacks)
        try:
            numbers = np.arange(stacks[0].shape[0], dtype=np.int32)
            return original(body, init, _NumberedSlices(xs, numbers), *args, **kwargs)
        finally:
            _thread.stacks.pop()

    return scan


def _recording_body(f: Any) -> Callable[..., Any]:
    """Return the body of a scan that records the slices as it is traced."""
    # Weakly, as the body is kept by `f` in a weak dict and would keep its own key alive.
    try:
        reference = weakref.ref(f)
    except TypeError:
        reference = lambda: f  # type: ignore[assignment] # noqa: E731 - stands for a reference

    @wraps(f)
    def body(carry: Any, numbered: _NumberedSlices) -> Any:
        slices = jax.tree_util.tree_leaves(numbered.slices)
        for part, array in zip(slices, _thread.stacks[-1], strict=True):
            if isinstance(part, jax.core.Tracer):
                _SLICES[part] = ArraySlice(array, numbered.number, 0, array.shape[0])
        function: Any = reference()
        return function(carry, numbered.slices)

    return body


def slices_of(value: Any) -> tuple[Any, list[ArraySlice]]:
    """Return the whole array of a value, and the slices that lead from the array to the value."""
    slices: list[ArraySlice] = []
    while isinstance(value, jax.core.Tracer):
        value = ORIGINALS.of(value)
        part = _SLICES.get(value)
        if part is None and isinstance(value, batching.BatchTracer) and isinstance(value.batch_dim, int):
            size = value.val.shape[value.batch_dim]
            # vmap has no round number: the row's index is mapped along with the value.
            number = batching.BatchTracer(value._trace, np.arange(size, dtype=np.int32), 0)
            part = ArraySlice(value.val, number, value.batch_dim, size)
        if part is None:
            break
        slices.insert(0, part)
        value = part.array
    return value, slices


def copy_slice(result: Any, value: Any) -> None:
    """Record that a symbol is the same slice as another, in another element type."""
    part = _SLICES.get(ORIGINALS.of(value))
    if part is not None:
        _SLICES[ORIGINALS.of(result)] = part


@contextmanager
def reading_slices(numbers: Mapping[Any, tuple[int, ...]]) -> Iterator[None]:
    """Note, within the context, the slices of stacks that an op reads."""
    before, _thread.numbers = _thread.numbers, numbers
    try:
        yield
    finally:
        _thread.numbers = before


def slice_numbers(stack: Any) -> tuple[int, ...] | None:
    """Return the numbers of the slice that an op reads, in its routines; None outside of routines."""
    return _thread.numbers.get(stack)
