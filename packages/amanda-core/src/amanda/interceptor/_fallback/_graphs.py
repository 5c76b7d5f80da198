"""Graphs of backward ops, and which execution made each."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class Mark:
    """The executions that made backward ops, found by the numbers of these."""

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
        Mark._alive -= 1

    @staticmethod
    def alive() -> int:
        """Return how many marks there are."""
        return Mark._alive


class Graphs:
    """A framework's graphs of backward ops, read by the names of attributes."""

    def __init__(
        self, tensors: type, leaf: type, maker: str, base: str, next: str, notes: str, number: str, key: str,
        met: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._tensors = tensors
        self._leaf = leaf
        self._maker = maker
        self._base = base
        self._next = next
        self._notes = notes
        self._number = number
        self._key = key
        self._on_node = met

    def mark(self, values: Any, mark: Mark, bases: bool = True) -> None:
        """Mark the ops that made these tensors, and what they are views of."""
        if isinstance(values, self._tensors):
            for tensor in (values, getattr(values, self._base) if bases else None):
                op = None if tensor is None else getattr(tensor, self._maker)
                if op is not None and mark.start <= getattr(op, self._number)() < mark.end:
                    getattr(op, self._notes).setdefault(self._key, mark)
                    self._sample_node(op)
        elif isinstance(values, (list, tuple)):
            for value in values:
                self.mark(value, mark, bases)

    def marked(self, ops: Iterable[Any]) -> list[tuple[Any, Mark, int]]:
        """Each op that leads on from these and comes from a known execution, its mark and its number."""
        waiting = deque(op for op in ops if op is not None)
        ops_by_id: dict[int, Any] = {}
        edges: list[tuple[int, int]] = []
        marks: dict[int, Mark] = {}
        while waiting:
            op = waiting.popleft()
            if id(op) in ops_by_id:
                continue
            ops_by_id[id(op)] = op
            if type(op) is self._leaf:
                continue
            mark = getattr(op, self._notes).get(self._key)
            if mark is not None:
                marks[id(op)] = mark
            self._sample_node(op)
            children = [child for child, *_ in getattr(op, self._next) if child is not None]
            edges += [(id(op), id(child)) for child in children]
            waiting += children
        self._mark_inner_ops(ops_by_id, edges, marks)
        return [
            (op, marks[key], 0 if type(op) is self._leaf else getattr(op, self._number)())
            for key, op in ops_by_id.items()
            if key in marks
        ]

    def leaving(self, trace: Any, writes: bool) -> Any:
        """For a program, whose executions leave this trace."""
        raise TypeError("programs are for the native interceptor")

    def _mark_inner_ops(
        self, ops_by_id: dict[int, Any], edges: list[tuple[int, int]], marks: dict[int, Mark]
    ) -> None:
        """Mark what lies inside an op; a leaf belongs to the op that used it first."""
        of_routines: dict[int, Mark] = {}
        spreading = True
        while spreading:
            spreading = False
            for parent, child in edges:
                mark = marks.get(parent) or of_routines.get(parent)
                if mark is None:
                    continue
                child_mark = marks.get(child)
                if type(ops_by_id[child]) is self._leaf:
                    if child_mark is None or mark.start < child_mark.start:
                        marks[child] = mark
                    continue
                number = getattr(ops_by_id[child], self._number)()
                if child_mark is None and mark.start <= number < mark.end:
                    marks[child] = mark
                    spreading = True
                elif child not in of_routines and mark.begin <= number < mark.start:
                    of_routines[child] = mark
                    spreading = True

    def _sample_node(self, op: Any) -> None:
        if id(op) // 16 % 61 == 0:
            self._on_node(op)
