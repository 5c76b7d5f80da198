"""Inputs of an op, kept until it has run, and looked at only where an output is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple
from weakref import ref

from amanda.tools.kit import Dtype, OpTensor, leaves, op_tensors
from amanda.tools.nan._summary import Summary, held

_FLOATING = ("float", "bfloat", "half", "complex")
_UNKNOWN = -1
"""Version of an inference tensor, which does not count writes."""


def floating(values: Sequence[Any], dtype: Dtype) -> Iterator[OpTensor]:
    """Yield the floating and complex tensors among values; dtype: what StandardMapping writes."""
    return op_tensors(values, dtype, kinds=_FLOATING)


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


class _Reference(ref[Any]):
    """A weak reference of a tensor; version: how often the tensor has been written."""

    __slots__ = ("version",)
    version: int

    @property
    def is_written(self) -> bool:
        """Return True if the tensor has been written since, or may have been."""
        return self.version == _UNKNOWN or _version(self()) not in (None, self.version)


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
        kept = [_reference(one) for one in values]
        written = self._written
        if written is None and not any(isinstance(one, _Reference) for one in leaves(kept)):
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
        return value.clone() if hasattr(value, "clone") and any(floating([value], self._dtype)) else value

    def settle(self, kept: Kept) -> None:
        """Learn from an execution that has ended which inputs the op writes."""
        if self._written is None:
            self._written = frozenset(_written(kept.values))

    def floats(self, kept: Kept) -> Floats:
        """Look at the inputs of an execution, as they were before the op ran."""
        unseen = {i: 0 for i in _written(kept.values) if i not in kept.flags}
        values = [_value(one) for one in kept.values]
        return Floats.of(values, self._dtype, self._inf, {**unseen, **kept.flags})


def _reference(value: Any) -> Any:
    """Return a weak reference of a tensor that counts writes, any other value as it is."""
    if isinstance(value, (list, tuple)):
        return [_reference(one) for one in value]
    version = _version(value)
    if version is None:
        return value
    reference = _Reference(value)
    reference.version = version
    return reference


def _version(value: Any) -> int | None:
    try:
        return getattr(value, "_version", None)
    except RuntimeError:
        return _UNKNOWN


def _value(kept: Any) -> Any:
    if isinstance(kept, list):
        return [_value(one) for one in kept]
    return kept() if isinstance(kept, _Reference) else kept


def _written(values: Sequence[Any]) -> list[int]:
    return [i for i, one in enumerate(leaves(values)) if isinstance(one, _Reference) and one.is_written]
