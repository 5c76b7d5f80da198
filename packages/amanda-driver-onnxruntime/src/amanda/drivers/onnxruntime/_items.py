"""The items of a rewritten graph: nodes, routines, and control flow; and the routines of an item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx

from amanda.backend import Action, Execution, Insertion
from amanda.errors import RoutineError

from ._values import names_read


class TypedInsertion(Insertion):
    """Routines whose results are cast to the types of the graph.

    dtypes: dtypes of the flat results; None for a sequence or an optional tensor.
    """

    __slots__ = ("dtypes",)

    dtypes: Sequence[Any]

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Run routines on read-only views; return the flat arrays that go back into the graph.

        Raises RoutineError for another number of results.
        """
        # Sessions own the memory of results and share the weights, so routines must not write into them.
        views = [_read_only(value) for value in flat]
        # A view that a routine returns unchanged stands for the original array.
        original_by_view_id = {id(view): value for view, value in zip(views, flat, strict=True)}
        results = super().run(execution, views, rounds)
        self.check_count(results, len(self.dtypes))
        try:
            results = [_as_dtype(value, dtype) for value, dtype in zip(results, self.dtypes, strict=True)]
        except Exception as error:  # NumPy makes no array of what a replacement has returned
            self.facts.annotate_error(error, self.actions[0])
            raise
        return [original_by_view_id.get(id(value), value) for value in results]

    def check_results(self, action: Action, before: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError if a routine changed a value without tensors, or of an unknown type."""
        if action.observer:
            return
        for position in [i for i in self.input_positions if i not in self.output_positions]:
            if not _is_same(values[position], before[position]):
                error = RoutineError(
                    f"{action} changed value {position} of {self.facts.name}, which holds no tensor, "
                    "or of a type that is not known before the model runs"
                )
                raise self.facts.annotate_error(error, action)

    def flat_results(self, values: Sequence[Any]) -> list[Any]:
        """Return the flat results among `values`: the elements of a list, but a sequence as a whole."""
        flat_results: list[Any] = []
        # None for a single value, the number of elements for a variadic input.
        length_by_position = dict(zip(self.input_positions, self.list_lengths, strict=True))
        remaining_dtypes = iter(self.dtypes)
        for position in self.output_positions:
            length = length_by_position[position]
            dtypes = [next(remaining_dtypes) for _ in range(1 if length is None else length)]
            value = values[position]
            # A list is one value where the graph has a sequence, and several where an input is variadic.
            is_sequence = length is None and dtypes[0] is None
            is_single = is_sequence or not isinstance(value, (list, tuple))
            flat_results += [value] if is_single else value
        return flat_results


def _is_same(value: Any, before: Any) -> bool:
    """Return True if a value, and each element of a list, is the object that it was before."""
    if isinstance(value, (list, tuple)) and isinstance(before, (list, tuple)):
        return len(value) == len(before) and all(map(_is_same, value, before))
    # By identity: `==` of arrays would compare elements, and a routine that changes nothing returns what it
    # got.
    return value is before


def _read_only(value: Any) -> Any:
    """Return read-only views of the arrays in a value; a value that is neither array nor list as it is."""
    if isinstance(value, list):
        return [_read_only(element) for element in value]
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _as_dtype(value: Any, dtype: Any) -> Any:
    """Return a value in a dtype; the value itself where `dtype` is None or is the value's own."""
    if dtype is None or (isinstance(value, np.ndarray) and value.dtype == dtype):
        return value
    astype = getattr(value, "astype", None)
    return np.asarray(value, dtype) if astype is None else astype(dtype)


@dataclass
class ComputedNode:
    """A node that a session runs."""

    node: onnx.NodeProto

    def all_reads(self) -> Iterable[str]:
        """Return the names of all values that the item reads, in its bodies too."""
        return names_read(self.node)

    def all_outputs(self) -> Iterable[str]:
        """Return the names of all values that the item computes."""
        return list(self.node.output)


@dataclass
class RoutineCall:
    """Routines that Python runs between two sessions.

    slot: the routines' slot in the rewriting's table.  reads, outputs: names of their inputs and results.
    waits_for: names of values that have to be computed before the routines run.
    """

    slot: int
    reads: list[str]
    outputs: list[str]
    waits_for: list[str]

    def all_reads(self) -> Iterable[str]:
        """Return the names of all values that the item reads, in its bodies too."""
        return self.reads

    def all_outputs(self) -> Iterable[str]:
        """Return the names of all values that the item computes."""
        return self.outputs


class GraphItem(Protocol):
    """An item of a rewritten graph: a `ComputedNode`, a `RoutineCall`, or a `ControlFlowNode`."""

    def all_reads(self) -> Iterable[str]:
        """Return the names of all values that the item reads, in its bodies too."""

    def all_outputs(self) -> Iterable[str]:
        """Return the names of all values that the item computes."""
