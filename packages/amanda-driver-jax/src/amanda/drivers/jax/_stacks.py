"""Slices of stacked weights: which slice of an array a scan reads at a round, or a row under vmap."""

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
    """A slice of an array.  number: its index along the axis, as a symbol.  size: extent of the axis."""

    array: Any
    number: Any
    axis: int
    size: int


class _ScanState(threading.local):
    """State of a thread.

    scanned_arrays: of each scan that is traced, innermost last.  slice_numbers: by the stack, of the slices
    that the op reads whose routine runs.
    """

    def __init__(self) -> None:
        self.scanned_arrays: list[Sequence[Any]] = []
        self.slice_numbers: Mapping[Any, tuple[int, ...]] = {}


_thread = _ScanState()
_SLICES: TensorMap[ArraySlice] = TensorMap()
"""The slice of which a scan's symbol is the value, by the symbol."""


class _NumberedSlices:
    """Slices of a scan's arrays with the round's number; neither is named in the paths of arguments."""

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
    """Patch `jax.lax.scan` to record, as a body is traced, which slice of which array each symbol is.

    The function within JAX's public `scan` is replaced, since programs may hold the public function.
    """
    recording_bodies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    # `jax.lax.scan` is a wrapper whose closure holds the function proper: the cell is exchanged.
    cells = dict(zip(loops.scan.__code__.co_freevars, loops.scan.__closure__ or (), strict=True))
    cell = cells["fun"]
    patches.on_restore(partial(setattr, cell, "cell_contents", cell.cell_contents))
    cell.cell_contents = _number_rounds(cell.cell_contents, recording_bodies)


def _number_rounds(
    original: Callable[..., Any], recording_bodies: weakref.WeakKeyDictionary[Any, Any]
) -> Any:
    """Wrap `scan`: a body that may read weights gets the number of the round, and records its slices."""

    @wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for `scan`: in a scope, records the slices if one has two axes or more."""
        arrays = jax.tree_util.tree_leaves(xs)
        has_matrices = any(is_tensor(array) and len(array.shape) > 2 for array in arrays)  # as slices
        if interceptor.active() is None or not has_matrices or not callable(f):
            return original(f, init, xs, *args, **kwargs)
        try:
            body = recording_bodies.get(f)
            if body is None:  # the same body for each scan of `f`, so that JAX's caches find its program
                body = recording_bodies.setdefault(f, _recording_body(f))
        except TypeError:  # `f` cannot be referred to weakly, or has no hash
            body = _recording_body(f)
        _thread.scanned_arrays.append(arrays)
        try:
            round_numbers = np.arange(arrays[0].shape[0], dtype=np.int32)
            return original(body, init, _NumberedSlices(xs, round_numbers), *args, **kwargs)
        finally:
            _thread.scanned_arrays.pop()

    return scan


def _recording_body(f: Any) -> Callable[..., Any]:
    """Return a body for `scan` that records the slices as it is traced, and then calls the body `f`."""
    # Weakly, as the result is kept by `f` in a weak dict and would keep its own key alive.
    try:
        reference = weakref.ref(f)
    except TypeError:
        reference = lambda: f  # type: ignore[assignment] # noqa: E731 - stands for a reference

    @wraps(f)
    def body(carry: Any, numbered: _NumberedSlices) -> Any:
        """Record which slice each symbol is; call the user's body without the round's number."""
        symbols = jax.tree_util.tree_leaves(numbered.slices)
        for symbol, array in zip(symbols, _thread.scanned_arrays[-1], strict=True):
            if isinstance(symbol, jax.core.Tracer):
                _SLICES[symbol] = ArraySlice(array, numbered.number, axis=0, size=array.shape[0])
        user_body: Any = reference()
        return user_body(carry, numbered.slices)

    return body


def slices_of(value: Any) -> tuple[Any, list[ArraySlice]]:
    """Return the whole array that a value is sliced from, or the value itself, and the slices between.

    The slice of the whole array is the first; that of a row under vmap is among them.
    """
    slices: list[ArraySlice] = []
    while isinstance(value, jax.core.Tracer):
        value = ORIGINALS.of(value)
        array_slice = _SLICES.get(value)
        if (
            array_slice is None
            and isinstance(value, batching.BatchTracer)
            and isinstance(value.batch_dim, int)
        ):
            row_count = value.val.shape[value.batch_dim]
            # vmap has no round number: the row's index is mapped along with the value.
            number = batching.BatchTracer(value._trace, np.arange(row_count, dtype=np.int32), 0)
            array_slice = ArraySlice(value.val, number, value.batch_dim, row_count)
        if array_slice is None:
            break
        slices.insert(0, array_slice)
        value = array_slice.array
    return value, slices


def copy_slice(result: Any, value: Any) -> None:
    """Record that a symbol is the same slice as another, in another element type; nothing if that is none."""
    array_slice = _SLICES.get(ORIGINALS.of(value))
    if array_slice is not None:
        _SLICES[ORIGINALS.of(result)] = array_slice


@contextmanager
def reading_slices(numbers_by_stack: Mapping[Any, tuple[int, ...]]) -> Iterator[None]:
    """Enter a context in which a routine is told, by `slice_numbers`, which slices of stacks its op reads."""
    outer_numbers, _thread.slice_numbers = _thread.slice_numbers, numbers_by_stack
    try:
        yield
    finally:
        _thread.slice_numbers = outer_numbers


def slice_numbers(stack: Any) -> tuple[int, ...] | None:
    """Return the numbers of the slice that an op reads, in its routines; None outside of routines."""
    return _thread.slice_numbers.get(stack)
