"""The ops and tensors of a trace, by columns: that is how the page is small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.view._files import Source

_OP = ("phase", "type", "name", "module", "source", "id", "inputs", "outputs", "writes", "forward", "calls",
       "in_place", "attributes")  # fmt: skip
_TENSOR = ("shape", "dtype", "bytes", "kind", "name", "producer", "consumers", "alias_of")
_WORDS = {"phase", "type", "name", "module", "source"}


def op_columns(ops: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a list for each field that any op has."""
    known = [name for name in _OP if name in _WORDS or any(op.get(name) is not None for op in ops)]
    return {name: [_word(op, name) if name in _WORDS else op.get(name) for op in ops] for name in known}


def _word(op: dict[str, Any], name: str) -> str:
    value = op.get(name)
    return "" if value is None else str(value)


def graph(source: Source) -> dict[str, Any]:
    """Return the tensors of a trace, and the edges between its ops.

    An edge is (producer, consumer, tensor); one that comes from outside has -1 for a producer.
    Raises AmandaError for an index that refers to nothing.
    """
    ops, tensors = source.list_of("ops"), source.list_of("tensors")
    edges: list[tuple[int, int, int]] = []
    for index, tensor in enumerate(tensors):
        producer = tensor.get("producer")
        for consumer in tensor.get("consumers") or []:
            _check(source, index, len(ops), consumer, *([] if producer is None else [producer]))
            if producer is not None or tensor.get("kind") == "input":
                edges.append((-1 if producer is None else producer, consumer, index))
    return {
        "tensors": {name: [tensor.get(name) for tensor in tensors] for name in _TENSOR},
        "edges": [number for edge in edges if edge[0] != edge[1] for number in edge],
    }


def _check(source: Source, tensor: int, count: int, *ops: Any) -> None:
    for op in ops:
        if not isinstance(op, int) or not 0 <= op < count:
            named = f"{source.name}: tensor {tensor} names op {op!r}"
            raise AmandaError(f"{named}, but the ops are numbered 0 to {count - 1}")
