"""Records of executions and of live tensors, for tools that record the dataflow between ops."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

_OPEN_LIMIT = 256
_NODE_RANGES_LIMIT = 256
_WRITES_LIMIT = 128
"""Most writes kept for one memory; a tensor that was not read since misses earlier writes."""


class LiveTensors:
    """Indices of live tensors, and writes into their memory.

    serial: number of the last write.  counted: executions that native code has counted.  busy: while it is
    not 0, Python records an execution.
    """

    counted = 0

    def __init__(self) -> None:
        self.serial = self.busy = 0
        # By id, as tensors compare element by element; an entry goes when its tensor does.
        self._live_by_id: dict[int, tuple[int, int, Callable[[], Any]]] = {}
        self._writes_by_address: dict[int, tuple[Any, list[tuple[int, int, Any]]]] = {}

    def __reduce__(self) -> tuple[type["LiveTensors"], tuple[()]]:
        return type(self), ()

    def find(self, tensor: Any) -> tuple[int, int, Callable[[], Any]] | None:
        """Return index, serial number of the write as of which, and a reference; None for an unknown tensor.

        Args:
            tensor: Tensor of any framework.
        """
        return self._live_by_id.get(id(tensor))

    def set(self, tensor: Any, index: int, root: int) -> None:
        """Set the index of a tensor as of the last write.

        Args:
            tensor: Tensor, which is kept by weak reference until its end, or strongly if it has none.
            index: The index.
            root: Index before the tensor was first written; -1 for a tensor that fits any.
        """
        live = self._live_by_id.get(id(tensor))
        reference = self._reference(tensor, id(tensor)) if live is None else live[2]
        self._live_by_id[id(tensor)] = index, self.serial, reference

    def _reference(self, tensor: Any, key: int) -> Callable[[], Any]:
        """Return a weak reference whose end drops the index; a strong one if no weak one is possible."""
        live_by_id = self._live_by_id
        try:
            # The id is free for another tensor as soon as this one is gone.
            return weakref.ref(tensor, lambda _: live_by_id.pop(key, None))
        except TypeError:  # no weak references: the tensor lives as long as this object
            return lambda: tensor

    def note_write(
        self, storage: Any, address: int, op: int, span: tuple[int, tuple[int, ...], tuple[int, ...], int]
    ) -> None:
        """Note that an op has written a part of a storage.

        Args:
            storage: The storage, which is kept by weak reference.
            address: Its address.
            op: Index of the op.
            span: Start, extents and strides in elements, and bytes of an element.
        """
        self.serial += 1
        writes_by_address = self._writes_by_address
        if address not in writes_by_address:
            reference = weakref.ref(storage, lambda _: writes_by_address.pop(address, None))
            writes_by_address[address] = reference, []
        writes = writes_by_address[address][1]
        writes.append((self.serial, op, span))
        # A loop may write a buffer without end.
        del writes[:-_WRITES_LIMIT]

    def writes(self, address: int, serial: int) -> list[tuple[int, int, Any]]:
        """Return serial number, op and span of writes into a storage, the newest first.

        Args:
            address: Address of the storage.
            serial: Serial number of the last write that is left out.
        """
        _, writes = self._writes_by_address.get(address, (None, []))
        return [write for write in reversed(writes) if write[0] > serial]


@dataclass(frozen=True)
class ExecutionRecord:
    """A recorded execution.  Of inputs and outputs the indices: None for no tensor, a tuple for a list.

    written: flat position, index and root of inputs after the op, or of the gradient of a leaf.
    forward: of a backward op, index of the execution whose backward op it is; -1 for none.
    calls, recomputations: executions that native code has counted.
    """

    index: int
    inputs: tuple[Any, ...]
    input_roots: tuple[Any, ...]
    outputs: tuple[Any, ...]
    output_roots: tuple[Any, ...]
    written: tuple[tuple[int, int, int], ...]
    forward: int = -1
    calls: int = 0
    recomputations: int = 0


class ExecutionRecords:
    """The recorded executions of an op, and those under way.

    accepts_any: whether an execution that fits no record counts as one more of the last.

    Args:
        live: The live tensors.
        ops: List of the indices of the recorded executions.
        written: Flat positions of the inputs that the op writes without a new version.
        forward: The records of the forward op of a backward op.
    """

    def __init__(
        self, live: LiveTensors, ops: list[int], written: tuple[int, ...],
        forward: "ExecutionRecords | None" = None,
    ) -> None:  # fmt: skip
        self.live = live
        self.accepts_any = False
        self._arguments = live, ops, written, forward
        self._open: list[tuple[int, Any]] = []
        self._node_ranges: list[tuple[int, int, int]] = []

    def __reduce__(self) -> tuple[type["ExecutionRecords"], tuple[Any, ...]]:
        return type(self), self._arguments

    def add(self, record: ExecutionRecord) -> None:
        """Add a record, for native code.

        Args:
            record: A record whose index is in `ops`.
        """

    def begin(self, execution: Any) -> None:
        """Begin an execution in this thread.

        Args:
            execution: Any object.
        """
        # By thread: one op may run on several threads at once.
        self._open.append((get_ident(), execution))
        # An op that raises never ends.
        del self._open[:-_OPEN_LIMIT]

    def current(self) -> Any:
        """Return the innermost execution of this thread; None without one."""
        thread = get_ident()
        return next((execution for ident, execution in reversed(self._open) if ident == thread), None)

    def end(self) -> Any:
        """Remove the innermost execution of this thread; return it, or None without one."""
        thread = get_ident()
        for i in reversed(range(len(self._open))):
            if self._open[i][0] == thread:
                return self._open.pop(i)[1]
        return None

    def add_nodes(self, first: int, end: int, index: int) -> None:
        """Note the numbers of the backward ops that an execution has made.

        Args:
            first: Number of the first.
            end: Number after the last.
            index: Index of the execution.
        """
        self._node_ranges.append((first, end, index))
        del self._node_ranges[:-_NODE_RANGES_LIMIT]

    def op_of_node(self, number: int) -> int | None:
        """Return the index of the execution that made a backward op; None if none of the last 256 did.

        Args:
            number: Number of the backward op.
        """
        # The latest first: autograd's numbers grow, and an op that ran again has newer nodes.
        for first, end, index in reversed(self._node_ranges):
            if first <= number < end:
                return index
        return None


_PASSES_LIMIT = 16


class SentGradients:
    """Indices of the gradients between the backward ops of a pass.

    Args:
        current_op: Function that returns the backward op that runs, or None.
        current_pass: Function that returns the number of its pass.
        leaf: Type of the ops that accumulate the gradient of a leaf.
    """

    def __init__(
        self, current_op: Callable[[], Any], current_pass: Callable[[], int], leaf: type[Any]
    ) -> None:
        self._current_op, self._current_pass, self._leaf = current_op, current_pass, leaf
        # By pass, op and position: nested and parallel passes run through ops of the same numbers.
        self._sent_by_pass: dict[int, dict[Hashable, list[int]]] = {}

    def __reduce__(self) -> tuple[type["SentGradients"], tuple[Any, ...]]:
        return type(self), (self._current_op, self._current_pass, self._leaf)

    def receive(self, count: int, take: bool) -> tuple[int | None, Sequence[Sequence[int]]]:
        """Return the number of the present backward op, and for each of its gradients the indices sent.

        The number is None for the op of a leaf.

        Args:
            count: Number of the gradients.
            take: Whether to drop the indices.
        """
        op = self._current_op()
        number = None if op is None or isinstance(op, self._leaf) else int(op._sequence_nr())
        sent_by_op = None if op is None else self._sent_by_pass.get(self._current_pass())
        if sent_by_op is None:
            return number, [()] * count
        find_summands = sent_by_op.pop if take else sent_by_op.get
        key = self._key(op)
        return number, [find_summands((key, position), ()) for position in range(count)]

    def send(self, indices: Sequence[Any]) -> Any:
        """Send the indices of the gradients that leave the present backward op to the next ones.

        Return the gradient of a leaf, else None.

        Args:
            indices: An int for each recorded gradient, any other object for none.
        """
        op = self._current_op()
        if op is None:
            return None
        sent_by_op = self._sent_by_pass.setdefault(self._current_pass(), {})
        for (next_op, position), index in zip(op.next_functions, indices, strict=False):
            if next_op is not None and isinstance(index, int):
                sent_by_op.setdefault((self._key(next_op), position), []).append(index)
        # A pass that fails never takes what was sent to its ops.
        while len(self._sent_by_pass) > _PASSES_LIMIT:
            del self._sent_by_pass[next(iter(self._sent_by_pass))]
        return op.variable.grad if isinstance(op, self._leaf) else None

    def _key(self, op: Any) -> Hashable:
        """Return a key of a backward op in its pass: those of leaves have no number."""
        return id(op.variable) if isinstance(op, self._leaf) else (type(op), op._sequence_nr())


class RepeatObserver:
    """Base of observers that native code calls where an execution repeats no record, and Python always.

    Args:
        records: The records of the op.
        after: Whether this is the routine after the op.
        gradients: The sent gradients, of the observers of a backward op.
    """

    recomputes = False

    def __init__(
        self, records: ExecutionRecords, after: bool = False, gradients: SentGradients | None = None
    ) -> None:
        self.records = records
