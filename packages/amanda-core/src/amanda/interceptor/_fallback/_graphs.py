"""Graphs of backward ops: the marks of executions there, and their release where they are deep."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class Mark:
    """The record of one execution at its backward ops, whose numbers tell which execution made them.

    Args:
        trace: The driver's record of the execution.
        begin: First number of backward ops that routines before the op made.
        start: First number of the op's own backward ops.
        end: Number after the last of the op's backward ops.
        order: 0 for the backward ops of an op, 1 for those of its backward ops, and so on.
        shapes: Shapes of the execution's values; None where no routine takes shapes.
    """

    _alive = 0

    def __init__(
        self, trace: Any, begin: int, start: int, end: int, order: int = 0, shapes: Any = None
    ) -> None:
        self.trace = trace
        self.begin = begin
        self.start = start
        self.end = end
        self.order = order
        self.shapes = shapes
        Mark._alive += 1

    def __del__(self) -> None:
        if "shapes" in vars(self):  # missing if a signal's handler has raised in __init__
            Mark._alive -= 1

    @staticmethod
    def alive() -> int:
        """Return the number of living marks."""
        return Mark._alive


class _Releases(threading.local):
    """Objects that wait to be freed on this thread: whichever drops the last reference frees a graph."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []  # objects that the running loop is to free
        self.is_running = False


class DeferredRelease:
    """Holds objects; when it is freed within the freeing of another's objects, they are freed after those.

    A chain of objects that hold each other by these is freed without recursion, however long it is.
    """

    _of_thread = _Releases()
    _objects: Any = None  # stays None if a signal's handler raises before `__init__` has stored them

    def __init__(self, objects: Any) -> None:
        self._objects = objects

    def __del__(self) -> None:
        """Free the objects, or leave them to the loop that already runs on this thread."""
        releases = self._of_thread
        releases.waiting.append(self._objects)
        self._objects = None
        if releases.is_running:  # the loop of an outer call frees the objects after this one returns
            return
        releases.is_running = True
        try:
            while releases.waiting:
                releases.waiting.pop()
        finally:
            releases.is_running = False


class Graphs:
    """Marks nodes in a framework's graphs of backward ops, and finds marked nodes.

    It reads tensors and nodes by the attributes that its arguments name.

    Args:
        tensors: Type of tensors.
        leaf: Type of the nodes that accumulate a leaf's gradient.
        maker: Attribute of a tensor: the node that made it.
        base: Attribute of a tensor: the tensor that it is a view of.
        next: Attribute of a node: its successors.
        notes: Attribute of a node: its dict of metadata.
        number: Attribute of a node: the method that returns its number.
        key: Key of a mark in the metadata.
        sampled: Called with a sample of the nodes.
        layout: Offsets by which native code reads a graph from memory.
    """

    def __init__(
        self, tensors: type, leaf: type, maker: str, base: str, next: str, notes: str, number: str, key: str,
        sampled: Callable[[Any], Any], layout: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self._tensor_type = tensors
        self._leaf_type = leaf
        self._node_attribute = maker
        self._base_attribute = base
        self._successors_attribute = next
        self._metadata_attribute = notes
        self._number_method = number
        self._mark_key = key
        self._on_sample = sampled

    def mark(self, values: Any, mark: Mark, bases: bool = True) -> None:
        """Mark the nodes of an execution that made some tensors.

        A node that has a mark keeps it.  Some of the nodes are passed to `sampled`.

        Args:
            values: Tensors, in nested lists and tuples; other values are skipped.
            mark: Record of the execution.
            bases: Whether the nodes of the tensors' bases are marked too.
        """
        if isinstance(values, self._tensor_type):
            base = getattr(values, self._base_attribute) if bases else None
            for tensor in (values, base):
                node = None if tensor is None else getattr(tensor, self._node_attribute)
                if node is not None and mark.start <= getattr(node, self._number_method)() < mark.end:
                    getattr(node, self._metadata_attribute).setdefault(self._mark_key, mark)
                    self._sample_node(node)
        elif isinstance(values, (list, tuple)):
            for value in values:
                self.mark(value, mark, bases)

    def marked(self, ops: Iterable[Any]) -> list[tuple[Any, Mark, int]]:
        """Return the nodes reachable from some nodes that belong to a marked execution, with mark and number.

        The number of a leaf is 0.  Some of the reachable nodes are passed to `sampled`.
        """
        mark_by_id: dict[int, Mark] = {}
        node_by_id, edges = self._visit(ops, mark_by_id)
        self._spread_marks(node_by_id, edges, mark_by_id)
        leaf_type, number_method = self._leaf_type, self._number_method
        return [
            (node, mark_by_id[node_id], 0 if type(node) is leaf_type else getattr(node, number_method)())
            for node_id, node in node_by_id.items()
            if node_id in mark_by_id
        ]

    def _visit(
        self, ops: Iterable[Any], mark_by_id: dict[int, Mark]
    ) -> tuple[dict[int, Any], list[tuple[int, int]]]:
        """Return the nodes reachable from some nodes, by id, and their edges: ids of node and successor.

        mark_by_id: gets the marks of those that have one.
        """
        unvisited = deque(node for node in ops if node is not None)
        node_by_id: dict[int, Any] = {}
        edges: list[tuple[int, int]] = []
        while unvisited:
            node = unvisited.popleft()
            if id(node) in node_by_id:
                continue
            node_by_id[id(node)] = node
            if type(node) is self._leaf_type:
                continue
            mark = getattr(node, self._metadata_attribute).get(self._mark_key)
            if mark is not None:
                mark_by_id[id(node)] = mark
            self._sample_node(node)
            successors = [
                successor
                for successor, *_ in getattr(node, self._successors_attribute)
                if successor is not None
            ]
            edges += [(id(node), id(successor)) for successor in successors]
            unvisited += successors
        return node_by_id, edges

    def form(self, ops: Iterable[Any]) -> int:
        """Return 0: graphs have no form that tells what hooks would count, as there are no hooks here."""
        return 0

    def behind(self, ops: Iterable[Any]) -> list[Any]:
        """Return these nodes and all behind them, in an order that depends on the form of the graph alone."""
        return list(self._visit(ops, {})[0].values())

    def marker(self, trace: Any, writes: bool) -> Any:
        """Raise TypeError: a marker lets a native program leave traces, and there are no programs here.

        Args:
            trace: The driver's record of the executions.
            writes: Whether the op writes into an input tensor.
        """
        raise TypeError("programs are for the native interceptor")

    def _spread_marks(
        self, node_by_id: dict[int, Any], edges: list[tuple[int, int]], mark_by_id: dict[int, Mark]
    ) -> None:
        """Add to `mark_by_id` the inner nodes of each marked op; a leaf belongs to the op that used it first.

        Marks spread also through nodes of routines, which belong to no op and are not added.
        """
        mark_by_routine_node: dict[int, Mark] = {}
        # A mark spreads to successors of its node. The edges are in no order: repeat until no mark spreads.
        is_spreading = True
        while is_spreading:
            is_spreading = False
            for node_id, successor_id in edges:
                mark = mark_by_id.get(node_id) or mark_by_routine_node.get(node_id)
                if mark is None:
                    continue
                successor, successor_mark = node_by_id[successor_id], mark_by_id.get(successor_id)
                if type(successor) is self._leaf_type:
                    if successor_mark is None or mark.start < successor_mark.start:
                        mark_by_id[successor_id] = mark
                    continue
                number = getattr(successor, self._number_method)()
                if successor_mark is None and mark.start <= number < mark.end:
                    mark_by_id[successor_id] = mark
                    is_spreading = True
                elif successor_id not in mark_by_routine_node and mark.begin <= number < mark.start:
                    mark_by_routine_node[successor_id] = mark
                    is_spreading = True

    def _sample_node(self, node: Any) -> None:
        """Call `sampled` if the node is one of the few in the sample."""
        # Addresses end in 4 zero bits, and one of 61 is sampled.  A prime, so that no path of a graph with a
        # regular shape is without samples.
        if id(node) // 16 % 61 == 0:
            self._on_sample(node)
