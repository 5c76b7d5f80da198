"""Graphs of backward ops, their marks, and counts by shape; and the types that native code alone fills.

Without native code plans run in Python, which needs no program, hook, reader of tensors or moments.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Resumption(NamedTuple):
    """State with which Python continues an execution that native code has begun.

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
    """Counts of executions by the shapes of their values.

    Args:
        limit: Number of different shapes that native code counts without a call of Python.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._calls: dict[Any, int] = {}

    def add(self, shapes: Any, calls: int = 1) -> None:
        """Count executions.

        Args:
            shapes: A tuple for the inputs, one for the outputs, ..., each with the shape of each value.
            calls: How many executions with these shapes.
        """
        self._calls[shapes] = self._calls.get(shapes, 0) + calls

    def items(self) -> list[tuple[Any, int]]:
        """Return pairs of shapes and the number of their executions, in the order of first executions."""
        return list(self._calls.items())

    def clear(self) -> None:
        """Set all counts to zero."""
        self._calls = {}

    def __len__(self) -> int:
        return len(self._calls)


class CallCache:
    """An op's plans; without native code there are no programs to cache beside them.

    Args:
        plans: Plans of the op by plan key.
        sized: Whether the forms of calls have the sizes of tensors.
    """

    def __init__(self, plans: dict[Any, Any], sized: bool = False) -> None:
        self.plans = plans

    def learn(self, key: int, program: "Program | None") -> None:
        """Do nothing: native code alone runs programs.

        Args:
            key: Key of a call's form.
            program: Program for calls of this form; None for no routines.
        """

    def forget(self) -> None:
        """Do nothing: there are no programs to drop."""

    def __len__(self) -> int:
        return 0


class _NativeAlone:
    """Base of types that exist here only for annotations and `isinstance`; creating one is a TypeError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"a {type(self).__name__} is for the native interceptor")


class Hook(_NativeAlone):
    """A callable for a framework: it runs a program's routines on a tuple of values."""

    def __call__(self, *values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Run the routines; return the values to use, or None if none changed."""
        raise NotImplementedError

    counts_alone: bool
    """True if every routine counts executions and no hook is left out, so that `count_again` needs no op."""

    @property
    def repeats(self) -> bool:
        """True if `count_again` does for all routines what a call would do."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """True if a call before an op would have no effect, so that a hook after it may do without."""
        raise NotImplementedError

    @staticmethod
    def count_again(hooks: "tuple[tuple[int, Hook], ...]", ops: list[Any] | None) -> None:
        """Count an execution at each hook as its last call did, without the values.

        Args:
            hooks: Each with the position of its op in `ops`.
            ops: The ops of a pass that has ended; None where each hook `counts_alone`.
        """
        raise NotImplementedError


class HookRegistrar(_NativeAlone):
    """Callable by which the framework registers a hook at a node; quick for a `Hook`.

    Args:
        other: Called for any other hook; returns the node's hooks, and a handle.
    """

    def __call__(self, hooks: dict[Any, Any] | None, hook: Any) -> tuple[dict[Any, Any], Any]:
        """Return the node's hooks with the new one, and a handle."""
        raise NotImplementedError

    @staticmethod
    def add(hooks: dict[Any, Any] | None, hook: Any) -> tuple[dict[Any, Any], Any]:
        """Add a hook to those of a node; return the hooks, and a handle.

        The handle has the attribute `hook`, and the methods `remove()` and `replace(hook)`.

        Args:
            hooks: Those of the node; None where it has none yet.
            hook: The new one.
        """
        raise NotImplementedError

    @staticmethod
    def register_all(
        marked: "list[tuple[Any, Mark, int]]", stack: Any, leaf: type, parameter: type, leaf_place: int,
        handles: list[tuple[Any, Any]],
    ) -> "list[tuple[Any, Mark, int]]":  # fmt: skip
        """Register the hooks that plans store for nodes; return the rest, whose hooks depend on more.

        Args:
            marked: Nodes with their marks and numbers.
            stack: Tools of the plans whose hooks are registered.
            leaf: Type of the nodes that accumulate the gradient of a `variable`.
            parameter: Type of the variables that have a place of their own among an op's leaves.
            leaf_place: Place of the first of these.
            handles: Gets pairs of a node and a handle.
        """
        raise NotImplementedError

    @staticmethod
    def remove_all(handles: list[tuple[Any, Any]]) -> None:
        """Remove hooks from nodes, and empty the list of pairs of a node and a handle."""
        raise NotImplementedError


class Program(_NativeAlone):
    """Routines around an op, which native code runs."""

    def hook(
        self, reader: "Reader", resume: Callable[..., Any], actions: Any, idle: Hook | None,
        shapes: Any = None,
    ) -> Hook:  # fmt: skip
        """Return a callable that runs the routines on a tuple of values.

        Args:
            reader: Reader of tensors of the framework.
            resume: Continues in Python after a result that native code cannot put in place.
            actions: Actions of the routines, which `resume` receives.
            idle: For a hook after an op, the hook before it, which `is_idle` and is left out; None without.
            shapes: Argument `shapes` for routines that take it; None where no routine does.
        """
        raise NotImplementedError


class Moments(_NativeAlone):
    """Statistics of the numbers of arrays, read in one pass; bits as `amanda.tools.stats.Bins` has them.

    numbers: those of `amanda.tools.stats.Statistics`, in their order.  counts: of each bin, int64 in bytes;
    None where nothing was counted.
    """

    numbers: tuple[Any, ...]
    counts: bytes | None

    def add(self, array: Any) -> bool:
        """Add the numbers of an array; return False unless they are contiguous floats or doubles."""
        raise NotImplementedError

    def merge(self, moments: Any) -> None:
        """Add the statistics of other moments with the same bins."""
        raise NotImplementedError

    @staticmethod
    def add_all(moments: tuple[Any, ...], arrays: tuple[Any, ...], lengths: tuple[int, ...]) -> list[int]:
        """Add the numbers of each array to its moments; return the positions of those that are not read.

        Args:
            moments: Of each array.
            arrays: Contiguous floats, doubles, integers or truth values are read.
            lengths: Number of elements that an array must have to be read; -1 for any.
        """
        raise NotImplementedError


def nonfinite(arrays: tuple[Any, ...]) -> list[int]:
    """Return the positions of arrays that hold NaN or Inf, or are not read: of all, without native code."""
    return list(range(len(arrays)))


class Gate:
    """A switch of routines: native code does not call a `GatedRoutine` while its gate is not open."""

    def __init__(self, open: bool = True) -> None:
        self.open = open


class GatedRoutine:
    """Base of observers that do nothing while a gate is not open; Python calls them in any case.

    Args:
        gate: The gate, which others may share.
    """

    def __init__(self, gate: Gate) -> None:
        pass


class FiniteCheck:
    """Base of two routines around an op, which native code calls only where an output is not finite.

    before: routine before the op; None: this one is.  skips: whether native code may skip the routine.
    copies: of the routine before an op, whether the op writes its first input.  copy: the bytes of that input
    from before the op, if the op has run.

    Args:
        before: Routine before the op, of the routine after it; None for the routine before the op.
        tally: Counts the executions that native code skips.
    """

    copy: bytearray | None = None

    def __init__(self, before: "FiniteCheck | None" = None, tally: ShapeCounter | None = None) -> None:
        self.before = before
        self.skips = self.copies = False


class MomentsObserver:
    """Base of observers instead of which native code adds the values' numbers to `Moments`.

    moments: for each value, None for a value that is no tensor; None: the routine is called, as Python does
    in any case.  length: number of elements, of all values, that native code measures; -1: any.
    executions: how many native code has measured.
    """

    moments: tuple[Moments | None, ...] | None = None
    length = -1
    executions = 0


class Reader(_NativeAlone):
    """A reader of tensors for native code."""

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, sized: bool = False) -> int:
        """Return 64 bits for the form of a call, by which programs are cached; 0 for an unknown form.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call; None for none.
            sized: Whether the sizes of tensors are part of the form.
        """
        raise NotImplementedError

    def can_substitute(self, original: Any, value: Any) -> bool:
        """Return True if native code may put a value in the place of a tensor.

        Args:
            original: Tensor of the program.
            value: Value that a routine returned.
        """
        raise NotImplementedError

    def host_memory(self, value: Any) -> tuple[int, int, bool] | None:
        """Return address and bytes of a tensor's numbers in host memory; None where only Python reads them.

        Then, whether these are the elements, each once: a view may have other numbers between them.
        """
        raise NotImplementedError

    def memory(self, value: Any) -> int:
        """Return a number for the memory of a plain tensor; 0 for any other value."""
        raise NotImplementedError

    def version(self, value: Any) -> int | None:
        """Return a number that changes when a tensor, or a tensor of a list, is written."""
        raise NotImplementedError


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
