"""Routines at one place of a graph, and the items that a rewritten graph is a row of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx

from amanda.backend import Action, Execution, Insertion
from amanda.errors import RoutineError

from ._names import reads


class TypedInsertion(Insertion):
    """Routines whose results have the types that the graph has there.

    dtypes: of the flat values that it gives back; None of a sequence or an optional tensor.
    """

    __slots__ = ("dtypes",)

    dtypes: Sequence[Any]

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the flat arrays that go back into the graph; routines are given read-only views."""
        lent = [_locked(one) for one in flat]
        own = {id(view): one for view, one in zip(lent, flat, strict=True)}
        results = super().run(execution, lent, rounds)
        if len(results) != len(self.dtypes):
            action = self.actions[0]
            error = RoutineError(
                f"{action} returned {len(results)} outputs; {self.facts.name} gives {len(self.dtypes)}"
            )
            raise self.facts.explain(error, action)
        results = [_typed(value, dtype) for value, dtype in zip(results, self.dtypes, strict=True)]
        return [own.get(id(one), one) for one in results]

    def check(self, action: Action, given: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError for a change of what holds no tensors, or is of a type that is not known."""
        fixed = () if action.observer else [i for i in self.input_positions if i not in self.output_positions]
        for position in fixed:
            if not _is_same(values[position], given[position]):
                error = RoutineError(
                    f"{action} changed value {position} of {self.facts.name}, which holds no tensor, "
                    "or of a type that is not known before the model runs"
                )
                raise self.facts.explain(error, action)

    def results(self, values: Sequence[Any]) -> list[Any]:
        """Return the values that are given back, each list of inputs as its elements; a sequence is one."""
        flat: list[Any] = []
        sizes, dtypes = dict(zip(self.input_positions, self.sizes, strict=True)), iter(self.dtypes)
        for position in self.output_positions:
            size = sizes[position]
            kinds = [next(dtypes) for _ in range(1 if size is None else size)]
            value = values[position]
            whole = (size is None and kinds[0] is None) or not isinstance(value, (list, tuple))
            flat += [value] if whole else value
        return flat


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other


def _locked(value: Any) -> Any:
    if isinstance(value, list):
        return [_locked(one) for one in value]
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _typed(value: Any, dtype: Any) -> Any:
    if dtype is None or (isinstance(value, np.ndarray) and value.dtype == dtype):
        return value
    astype = getattr(value, "astype", None)
    return np.asarray(value, dtype) if astype is None else astype(dtype)


@dataclass
class Compute:
    """A node that a session runs."""

    node: onnx.NodeProto

    def all_reads(self) -> Iterable[str]:
        """Names of the values that it reads, in its bodies too."""
        return reads(self.node)

    def makes(self) -> Iterable[str]:
        """Names of the values that it gives."""
        return list(self.node.output)


@dataclass
class Call:
    """Routines that Python runs between two sessions.

    slot: what runs.  reads: names of the values it is given.  gives: of those it gives.
    waits: of those that have been computed when it runs.
    """

    slot: int
    reads: list[str]
    gives: list[str]
    waits: list[str]

    def all_reads(self) -> Iterable[str]:
        """Names of the values that it is given."""
        return self.reads

    def makes(self) -> Iterable[str]:
        """Names of the values that it gives."""
        return self.gives


class Item(Protocol):
    """One item of a rewritten graph: a `Compute`, a `Call`, or a `Flow`."""

    def all_reads(self) -> Iterable[str]:
        """Names of the values that it reads."""

    def makes(self) -> Iterable[str]:
        """Names of the values that it gives."""
