"""The execution of plans: graphs of backward ops, tallies, and the types that native code alone fills.

Without native code plans run in Python, which needs no program, hook, reader of tensors or moments.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Resumption(NamedTuple):
    """Where Python goes on with an execution that native code has begun.

    plan: the plan that native code has followed; the call may look different by now.
    step: the last step whose routine has run; -1: none has.
    returned: the result of that routine, which native code cannot put in place; None: no change.
    outputs: the result of the op, with changes by routines; NotImplemented: the op has not run.
    inputs: the inputs, where routines have changed some; else None.
    """

    plan: Any
    step: int
    returned: Any
    outputs: Any
    inputs: list[Any] | None


class ShapeCounter:
    """Executions by the shapes of their values."""

    def __init__(self, limit: int = 1024) -> None:
        self._calls: dict[Any, int] = {}

    def add(self, shapes: Any) -> None:
        """Count an execution; a tuple for each side, of a shape for each value."""
        self._calls[shapes] = self._calls.get(shapes, 0) + 1

    def items(self) -> list[tuple[Any, int]]:
        """Pairs of shapes and how many executions had them, in the order of the first."""
        return list(self._calls.items())

    def clear(self) -> None:
        """Forget the executions."""
        self._calls = {}

    def __len__(self) -> int:
        return len(self._calls)


class CallCache:
    """An op's plans; a program of its calls is nothing that Python could run faster."""

    def __init__(self, plans: dict[Any, Any], sized: bool = False) -> None:
        self.plans = plans

    def learn(self, key: int, program: "Program | None") -> None:
        """Learn nothing: native code alone runs programs."""

    def forget(self) -> None:
        """Forget what was learned; the plans stay."""

    def __len__(self) -> int:
        return 0


class _NativeAlone:
    """Base of types that exist here for annotations and `isinstance` alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"a {type(self).__name__} is for the native interceptor")


class Hook(_NativeAlone):
    """The routines of a program on a tuple of values that a framework calls it with."""

    def __call__(self, *values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Run them."""
        raise NotImplementedError


class Program(_NativeAlone):
    """Routines around an op, which native code runs."""

    def hook(self, reader: "Reader", resume: Callable[..., Any], actions: Any, shapes: Any = None) -> Hook:
        """Return a callable that runs the routines on a tuple of values."""
        raise NotImplementedError


class Moments(_NativeAlone):
    """Statistics of the numbers of arrays, read in one pass; bits as `amanda.tools.stats.Bins` has them.

    numbers: those of `amanda.tools.stats.Statistics`, in their order.  counts: of each bin, int64 in bytes;
    None where nothing was counted.
    """

    numbers: tuple[Any, ...]
    counts: bytes | None

    def add(self, array: Any) -> bool:
        """Take in numbers; return False if they are no float or double in one piece of memory."""
        raise NotImplementedError

    def merge(self, moments: Any) -> None:
        """Take in what another one, of the same bins, has taken in."""
        raise NotImplementedError


class Reader(_NativeAlone):
    """A reader of tensors for native code."""

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, sized: bool = False) -> int:
        """Return 64 bits that decide what a call comes to; 0 where that cannot be told."""
        raise NotImplementedError

    def can_substitute(self, original: Any, value: Any) -> bool:
        """Return True if native code may put a value in the place of a tensor."""
        raise NotImplementedError

    def memory(self, value: Any) -> int:
        """Return what tells the memory of a plain tensor; 0 of anything else."""
        raise NotImplementedError

    def version(self, value: Any) -> int | None:
        """Return what changes when a tensor, or one of a list, is written."""
        raise NotImplementedError


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
        sampled: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._tensors = tensors
        self._leaf = leaf
        self._maker = maker
        self._base = base
        self._next = next
        self._notes = notes
        self._number = number
        self._key = key
        self._sampled = sampled

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

    def marker(self, trace: Any, writes: bool) -> Any:
        """Raise TypeError: executions of a program leave traces by it, and there are no programs."""
        raise TypeError("programs are for the native interceptor")

    def _mark_inner_ops(
        self, ops_by_id: dict[int, Any], edges: list[tuple[int, int]], marks: dict[int, Mark]
    ) -> None:
        """Mark what lies inside an op; a leaf belongs to the op that used it first."""
        of_routines: dict[int, Mark] = {}
        # A mark spreads to successors of its op. The edges are in no order: passes repeat until none spreads.
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
        # A prime: no regular shape of a graph keeps a path clear of samples. Addresses end in 4 zero bits.
        if id(op) // 16 % 61 == 0:
            self._sampled(op)
