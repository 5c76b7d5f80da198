"""The readers of the user's nodes, without hidden nodes.

TensorFlow fails where a reader has no Python object. So the tensors and operations that hidden nodes read get
patched attributes; all others, and TensorFlow's classes, stay as they are.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tensorflow.python.framework import ops

Readers = dict[Any, list[str]]


class _VisibleReaders:
    """The visible readers of each tensor and operation of a graph, updated when the graph grows."""

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, tuple[int, Readers]] = weakref.WeakKeyDictionary()

    def readers_of(self, graph: Any, read: Any) -> list[Any]:
        """Return the operations that read a tensor (name and index), or wait for an operation (name)."""
        version, readers = self._by_graph.get(graph, (-1, {}))
        if version != graph.version:
            readers = defaultdict(list)
            for op in graph.get_operations():
                for tensor in op.inputs:
                    readers[tensor.op.name, tensor.value_index].append(op.name)
                for control_input in op.control_inputs:
                    readers[control_input.name].append(op.name)
            self._by_graph[graph] = graph.version, readers
        return [graph.get_operation_by_name(name) for name in readers.get(read, ())]


_visible_readers = _VisibleReaders()


class _OperationReadByHidden(ops.Operation):  # type: ignore[misc]
    """An operation that hidden nodes wait for, whose `_control_outputs` lists visible nodes."""

    @property
    def _control_outputs(self) -> list[Any]:
        return _visible_readers.readers_of(self.graph, self.name)


_OperationReadByHidden.__name__ = ops.Operation.__name__
_OperationReadByHidden.__qualname__ = ops.Operation.__qualname__
_OperationReadByHidden.__module__ = ops.Operation.__module__


def hide_readers(graph: Any, tensors: Iterable[tuple[str, int]], operations: Iterable[str]) -> None:
    """Make these tensors and operations list their visible readers alone."""
    reference = weakref.ref(graph)
    for name, index in tensors:
        tensor = graph.get_operation_by_name(name).outputs[index]
        tensor.consumers = lambda read=(name, index): _visible_readers.readers_of(reference(), read)
    for name in operations:
        graph.get_operation_by_name(name).__class__ = _OperationReadByHidden
