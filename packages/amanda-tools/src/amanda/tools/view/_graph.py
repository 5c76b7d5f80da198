"""The ops and tensors of a trace, by columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.view._files import Source, by_column
from amanda.tools.view._tables import Ops

_WORDS = ("phase", "type", "name", "module", "source")
_OTHERS = ("id", "inputs", "outputs", "writes", "forward", "calls", "in_place", "attributes")
_TENSOR = ("shape", "dtype", "bytes", "kind", "name", "producer", "consumers", "alias_of")


def op_columns(ops: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a list for each field that any op has."""
    words = {
        name: ["" if value is None else str(value) for value in values]
        for name, values in by_column(_WORDS, ops).items()
    }
    further = by_column((name for name in _OTHERS if any(op.get(name) is not None for op in ops)), ops)
    return {**words, **further}


def graph(source: Source) -> dict[str, Any]:
    """Return the tensors of a trace, and the edges between its ops.

    An edge is (producer, consumer, tensor); one that comes from outside has -1 for a producer.
    Raises AmandaError for an index that refers to nothing.
    """
    tensors, count = source.list_of("tensors"), len(source.list_of("ops"))
    edges: list[int] = []
    for index, tensor in enumerate(tensors):
        producer = tensor.get("producer")
        for consumer in tensor.get("consumers") or []:
            for op in (consumer, 0 if producer is None else producer):
                if not isinstance(op, int) or not 0 <= op < count:
                    named = f"{source.name}: tensor {index} names op {op!r}"
                    raise AmandaError(f"{named}, but the ops are numbered 0 to {count - 1}")
            if (producer is not None or tensor.get("kind") == "input") and producer != consumer:
                edges += (-1 if producer is None else producer, consumer, index)
    return {"tensors": by_column(_TENSOR, tensors), "edges": edges}


def stages(source: Source, ops: Ops) -> dict[int, int]:
    """Return the stage of each op that a partition has put into one; its ops of one place are in order."""
    stage_of_op: dict[int, int] = {}
    for row in source.list_of("ops"):
        index = next((op for op in ops.about(row) if op not in stage_of_op), None)
        if index is not None and isinstance(row.get("stage"), int):
            stage_of_op[index] = row["stage"]
    return stage_of_op
