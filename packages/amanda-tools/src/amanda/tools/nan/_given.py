"""Inputs of an op, kept until it has run, and looked at only where an output is not finite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple
from weakref import ref

from amanda.tools.kit import OpTensor, op_tensors, tensors_of
from amanda.tools.nan._summary import Summary, held

Dtype = Callable[[Any], str | None]
"""Returns the name of a tensor's element type, None of any other value."""

_FLOATING = ("float", "bfloat", "half", "complex")
_UNKNOWN = -1
"""Version of an inference tensor, which does not count writes."""


def floating(
    values: Sequence[Any], dtype: Dtype, leave: Callable[[OpTensor, str], None] | None = None
) -> Iterator[OpTensor]:
    """Yield the floating and complex tensors among values; dtype: what StandardMapping writes.

    leave: called with a tensor that cannot be read, and why.
    """
    return op_tensors(values, dtype, kinds=_FLOATING, leave=leave)


class Floats(NamedTuple):
    """The floating tensors that an execution read or made, by flat index.

    holds: flags of NaN and Inf, of the tensors that hold any.
    """

    tensors: Mapping[int, OpTensor] = {}
    holds: Mapping[int, int] = {}

    @classmethod
    def of(
        cls, values: Sequence[Any], dtype: Dtype, inf: bool, known: Mapping[int, int] | None = None
    ) -> Floats:
        """Look for NaN, and Inf if `inf`, in the tensors among values; known: flags of some of them."""
        known = known or {}
        tensors = {one.flat_index: one for one in floating(values, dtype)}
        found = {i: known[i] if i in known else held(one.tensor, inf) for i, one in tensors.items()}
        return cls(tensors, {i: flags for i, flags in found.items() if flags})

    @property
    def flags(self) -> int:
        """NAN, INF, both or neither, of all tensors together."""
        return reduce(or_, self.holds.values(), 0)

    def summaries(self, chosen: Iterable[int]) -> dict[int, Summary]:
        """Summarise some of the tensors."""
        return {i: Summary.of(self.tensors[i].tensor, self.tensors[i].dtype) for i in chosen}


class Kept(NamedTuple):
    """Inputs of one execution, tensors of PyTorch by weak references.

    flags: of NaN and Inf, by flat index, of the tensors that were looked at before the op.
    alive: the inputs themselves, where the op's caller may let go of them before the op has ended.
    """

    values: Sequence[Any]
    flags: Mapping[int, int]
    alive: Sequence[Any]


class Given:
    """Keeps the inputs of one op.

    An input that the op writes is looked at before the op runs.  Which those are, apart from the first of an
    op whose name says so, the first execution tells; so there all are looked at before.
    dtype: what StandardMapping writes.  inf: look for Inf, too.  in_place: the op writes its first input.
    is_eager: the caller of the op holds the inputs until it has ended.
    """

    def __init__(self, dtype: Dtype, inf: bool, in_place: bool, is_eager: bool) -> None:
        self._dtype, self._inf, self._in_place, self._is_eager = dtype, inf, in_place, is_eager
        self._written: frozenset[int] | None = None  # flat indices

    def keep(self, values: Sequence[Any]) -> Kept:
        """Keep the inputs of an execution that begins."""
        kept = _references(values)
        written = self._written
        if written is None and not any(isinstance(one, tuple) for one in _flat(kept)):
            written = self._written = frozenset()  # tensors that no op writes
        flags: dict[int, int] = {}
        if written is None or written:
            for one in floating(values, self._dtype):
                if written is None or one.flat_index in written:
                    flags[one.flat_index] = held(one.tensor, self._inf)
        if self._in_place and kept:
            kept[0] = self._copied(values[0])
        return Kept(kept, flags, () if self._is_eager else values)

    def _copied(self, value: Any) -> Any:
        """Return floating tensors that stay when the op writes into these."""
        if isinstance(value, (list, tuple)):
            return [self._copied(one) for one in value]
        return tensors_of(value).duplicate(value) if any(floating([value], self._dtype)) else value

    def settle(self, kept: Kept) -> None:
        """Learn from an execution that has ended which inputs the op writes."""
        if self._written is None:
            self._written = frozenset(_written(kept.values))

    def floats(self, kept: Kept, unread: Callable[[Sequence[Any]], Collection[int]]) -> Floats:
        """Look at the inputs of an execution, as they were before the op ran.

        unread: returns the positions of inputs that the execution does not read.
        """
        unseen = {i: 0 for i in _written(kept.values) if i not in kept.flags}
        values = [_value(value) for value in kept.values]
        for position in unread(values):
            values[position] = None
        return Floats.of(values, self._dtype, self._inf, {**unseen, **kept.flags})


def _references(values: Sequence[Any]) -> list[Any]:
    """Return weak references of tensors that count writes, lists for lists, any other value as it is."""
    kept: list[Any] = []
    for value in values:
        if type(value) in _NUMBERS:
            kept.append(value)
        elif isinstance(value, (list, tuple)):
            kept.append(_references(value))
        else:
            version = _version(value)
            kept.append(value if version is None else (ref(value), version))
    return kept


_NUMBERS = frozenset({int, float, bool, type(None), slice})


def _version(value: Any) -> int | None:
    if not hasattr(type(value), "_version"):  # TensorFlow takes its time to say that a tensor has none
        return None
    try:
        return getattr(value, "_version", None)
    except RuntimeError:
        return _UNKNOWN


def _value(kept: Any) -> Any:
    if isinstance(kept, list):
        return [_value(one) for one in kept]
    return kept[0]() if isinstance(kept, tuple) else kept


def _written(values: Sequence[Any]) -> list[int]:
    """Return the flat indices of tensors that have been written since, or may have been."""
    return [i for i, one in enumerate(_flat(values)) if isinstance(one, tuple) and _is_written(*one)]


def _is_written(tensor: ref[Any], version: int) -> bool:
    return version == _UNKNOWN or _version(tensor()) not in (None, version)


def _flat(kept: Sequence[Any]) -> Iterator[Any]:
    for one in kept:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one
