"""Who reads the user's nodes: hidden nodes among the readers are left out.

TensorFlow fails where a reader has no Python object. So those tensors and operations that hidden nodes read
answer for themselves; all others, and TensorFlow's classes, stay as they are.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tensorflow.python.framework import ops

Readers = dict[Any, list[str]]


class _Known:
    """Names of a graph's own operations that read or wait for others, by what they read."""

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, tuple[int, Readers]] = weakref.WeakKeyDictionary()

    def of(self, graph: Any, read: Any) -> list[Any]:
        """The operations that read a tensor, by name and index, or wait for an operation, by name."""
        version, readers = self._by_graph.get(graph, (-1, {}))
        if version != graph.version:
            readers = defaultdict(list)
            for op in graph.get_operations():
                for tensor in op.inputs:
                    readers[tensor.op.name, tensor.value_index].append(op.name)
                for waited in op.control_inputs:
                    readers[waited.name].append(op.name)
            self._by_graph[graph] = graph.version, readers
        return [graph.get_operation_by_name(name) for name in readers.get(read, ())]


_known = _Known()


class _Waited(ops.Operation):  # type: ignore[misc]
    """An operation that hidden nodes wait for."""

    @property
    def _control_outputs(self) -> list[Any]:
        return _known.of(self.graph, self.name)


_Waited.__name__, _Waited.__qualname__ = ops.Operation.__name__, ops.Operation.__qualname__
_Waited.__module__ = ops.Operation.__module__


def hide_readers(graph: Any, tensors: Iterable[tuple[str, int]], operations: Iterable[str]) -> None:
    """Leave hidden readers out of who reads these tensors, and who waits for these operations."""
    reference = weakref.ref(graph)
    for name, index in tensors:
        tensor = graph.get_operation_by_name(name).outputs[index]
        tensor.consumers = lambda read=(name, index): _known.of(reference(), read)
    for name in operations:
        graph.get_operation_by_name(name).__class__ = _Waited
