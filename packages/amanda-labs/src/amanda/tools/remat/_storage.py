"""Records of storages and of the ops that made them, the account of live bytes, and eviction heuristics."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from amanda.errors import AmandaError
from amanda.tools.kit import leaves


class RematError(AmandaError, RuntimeError, module="amanda.tools.remat"):
    """An evicted tensor cannot be computed again as it was."""


class BudgetError(AmandaError, MemoryError, module="amanda.tools.remat"):
    """The tool has `strict=True`, and the memory budget is too small."""


@dataclass(eq=False, slots=True)
class OpCounts:
    """An op of the program, with counts of evictions and repeated runs.

    seconds: spent in repeated runs.  evicted_bytes: sum over the evictions of its storages.
    """

    type: str
    module: str
    source: str
    evictions: int = 0
    evicted_bytes: int = 0
    rematerialisations: int = 0
    seconds: float = 0.0


class _WeaklyReferenced:
    """Base of records that are referred to weakly."""

    __slots__ = ("__weakref__",)


RecordT = TypeVar("RecordT")


class WeakList(Generic[RecordT]):
    """Records by weak references, in the order in which they were added; far cheaper than a WeakSet."""

    __slots__ = ("_capacity", "_references")

    def __init__(self) -> None:
        self._references: list[weakref.ref[RecordT]] = []
        self._capacity = 8

    def add(self, record: RecordT) -> None:
        """Add a record; now and then drop the references of those that are gone."""
        if len(self._references) >= self._capacity:
            self._references = [reference for reference in self._references if reference() is not None]
            # Doubling keeps the cost of a clean-up proportional to the records added since.
            self._capacity = 2 * len(self._references) + 8
        self._references.append(weakref.ref(record))

    def alive(self) -> list[RecordT]:
        """Return the records that are not gone."""
        return [record for reference in self._references if (record := reference()) is not None]

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._references)


class ProductSlot(NamedTuple):
    """Where a run of an op gives a storage: position among results, or among the tensors autograd saves."""

    position: int
    is_saved: bool


FIRST_RESULT = ProductSlot(0, is_saved=False)


@dataclass(eq=False, slots=True)
class Storage(_WeaklyReferenced):
    """Memory that tensors share; evicted memory is made again by running `maker`.

    address, memory: of the framework's storage, by a weak reference; `memory` is None after eviction.
    maker: the op that made the storage; None if the op cannot be run again.
    slot: where a repeated run of the op gives the storage.
    handles: by which autograd holds the storage.  consumers: recorded ops that read it.
    cluster: with its evicted neighbours, None while it is alive.  held_tensor: by which this tool holds it.
    held_version: of `held_tensor` when it was taken, to detect writes.
    last_read: the clock at the last read.  locks: number of recomputations under way that need the storage.
    """

    size: int
    address: int = 0
    memory: weakref.ref[Any] | None = None
    maker: ReplayableOp | None = None
    slot: ProductSlot = FIRST_RESULT
    handles: WeakList[Handle] = field(default_factory=WeakList)
    consumers: WeakList[ReplayableOp] = field(default_factory=WeakList)
    held_tensor: Any = None
    held_version: int | None = None
    last_read: float = 0.0
    locks: int = 0
    cluster: Cluster | None = None

    @property
    def live_memory(self) -> Any:
        """The framework's storage; None if it was freed."""
        return None if self.memory is None else self.memory()

    @property
    def is_gone(self) -> bool:
        """True if the memory is freed, and autograd or an unfinished backward pass may ask for it again."""
        if self.maker is None or self.live_memory is not None:
            return False
        # Once the backward pass is over nobody asks for the storage again, and its cost counts no more.
        return bool(self.handles) or not self.maker.backward_is_over

    @property
    def cost(self) -> float:
        """Cost of making the storage again from its inputs."""
        return 0.0 if self.maker is None else self.maker.cost


@dataclass(eq=False, slots=True)
class Handle(_WeaklyReferenced):
    """The object that autograd saves instead of a tensor.

    tensor: the saved tensor, None while its storage is evicted.  version: of the tensor when it was saved.
    storage: None for a tensor that is never evicted.
    """

    tensor: Any
    version: int | None
    storage: Storage | None
    geometry: Any


@dataclass(eq=False, slots=True)
class InputRef:
    """An input of a recorded op.  tensor: a weak reference to it; version: at the call."""

    storage: Storage
    geometry: Any
    requires_grad: bool
    version: int
    tensor: weakref.ref[Any]


@dataclass(eq=False, slots=True)
class ScratchInput:
    """An input that the op writes and does not read, so that any memory of the geometry serves."""

    geometry: Any
    device: Any


@dataclass(eq=False, slots=True)
class ReplayableOp(_WeaklyReferenced):
    """An execution of an op, which can run again.

    compute: function of the inputs that returns the op's result.  inputs: with an InputRef for each tensor,
    to whose storage the op is added as a consumer.
    settings: at the execution.  cost: seconds, or 1.  size: bytes of all storages that the op made.
    secured_generation: of the last `Eviction.secure_recomputation` that found that the op can run again.
    saved_handles: weak references to the handles that autograd saved for the backward op.
    """

    number: int
    counts: OpCounts
    compute: Callable[[Sequence[Any]], Any]
    inputs: Sequence[Any]
    settings: Any
    cost: float = 0.0
    size: int = 0
    secured_generation: int = -1
    input_refs: list[InputRef] = field(default_factory=list)
    saved_handles: list[weakref.ref[Handle]] = field(default_factory=list)
    _products: list[weakref.ref[Storage]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.input_refs += [value for value in leaves(self.inputs) if isinstance(value, InputRef)]
        for ref in self.input_refs:
            ref.storage.consumers.add(self)

    @property
    def products(self) -> list[Storage]:
        """The storages that the op made and that are still referred to."""
        return [storage for product in self._products if (storage := product()) is not None]

    def add_product(self, size: int, slot: ProductSlot) -> Storage:
        """Record a storage that the op has made, and return it."""
        storage = Storage(size, maker=self, slot=slot)
        self._products.append(weakref.ref(storage))
        return storage

    def cut_history(self) -> None:
        """Mark the storages of this op as ones that cannot be made again."""
        for storage in self.products:
            storage.maker = None

    @property
    def backward_is_over(self) -> bool:
        """True if autograd has freed the tensors that it saved for the backward op.

        The backward ops of all readers of the results have then run too.
        """
        # Autograd frees what a node has saved when the node has run.
        return bool(self.saved_handles) and all(handle() is None for handle in self.saved_handles)


@dataclass(slots=True)
class MemoryEntry:
    """Live memory in the account.

    size: bytes that count towards the budget.  record: the storage in this memory, None after a write.
    """

    memory: weakref.ref[Any]
    size: int
    record: Storage | weakref.ref[Storage] | None = None

    @property
    def storage(self) -> Storage | None:
        """The storage in the memory; None after a write, or if the record has gone."""
        record = self.record
        return record if record is None or isinstance(record, Storage) else record()


@dataclass(slots=True)
class MemoryTotals:
    """Maxima of a run.  peak: bytes alive at once.  short: bytes by which the budget was exceeded."""

    peak: int = 0
    short: int = 0


class Ledger:
    """The account of live memory: its bytes, and the Storage in each; callbacks report freed memory.

    totals: are kept up to date.  bytes: alive now.  clock: sum of the costs of all ops that ran.
    """

    def __init__(self, totals: MemoryTotals) -> None:
        self._entries: dict[int, MemoryEntry] = {}  # by address
        self._freed_entries: deque[tuple[int, weakref.ref[Any]]] = deque()  # until `remove_freed_memory`
        self.totals, self.bytes, self.clock = totals, 0, 0.0

    def find(self, memory: Any) -> MemoryEntry | None:
        """Return the entry of memory, or None."""
        # By the address in C++, which may belong to a newer storage by now: the object below tells.
        entry = self._entries.get(memory._cdata)
        # A new storage at a freed address has another object.
        return entry if entry is not None and entry.memory() is memory else None

    def add(self, memory: Any, storage: Storage, counts: bool) -> None:
        """Enter memory and its storage, or replace its storage; raise the peak.

        counts: the bytes of new memory count for the budget.  Memory that was freed leaves the account.
        """
        address, freed_entries = memory._cdata, self._freed_entries
        self.remove_freed_memory()
        entry = self.find(memory)
        if entry is None:

            def queue_freed(reference: weakref.ref[Any]) -> None:
                # Memory is freed at any time, on any thread, also within this class: only queue it here.
                freed_entries.append((address, reference))

            entry = MemoryEntry(weakref.ref(memory, queue_freed), memory.nbytes() if counts else 0)
            self._entries[address] = entry
            self.bytes += entry.size
            self.update_peak()
        entry.record = storage
        storage.address, storage.memory = address, entry.memory

    def update_peak(self, held_bytes: int = 0) -> None:
        """Raise the peak to the live bytes and `held_bytes`, which an op holds besides."""
        live_bytes = self.bytes + held_bytes
        if live_bytes > self.totals.peak:
            self.totals.peak = live_bytes

    def remove_freed_memory(self) -> None:
        """Remove memory that was freed since the last call, and join its storage with evicted neighbours."""
        while self._freed_entries:
            address, reference = self._freed_entries.popleft()
            entry = self._entries.get(address)
            # Else the address belongs to newer memory already.
            if entry is not None and entry.memory is reference:
                del self._entries[address]
                self.bytes -= entry.size
                if (storage := entry.storage) is not None:
                    storage.memory = None
                    join_evicted_neighbours(storage)

    def forget_written(self, memory: Any) -> Storage | None:
        """Drop and return the record of memory that is about to be written; None if there is no record."""
        entry = self.find(memory)
        storage = None if entry is None else entry.storage
        if entry is not None and storage is not None:
            entry.record = storage.memory = None
        return storage

    def keep_alive(self, storage: Storage, tensor: Any) -> None:
        """Keep the memory of a storage alive by a tensor in it."""
        storage.held_tensor, storage.held_version = tensor, tensor._version
        entry = self._entries.get(storage.address)
        if entry is not None and entry.record is storage:
            # The record holds the memory now, so the account of that memory must not hold the record.
            entry.record = weakref.ref(storage)

    def storages(self) -> list[Storage]:
        """Return the storages that are alive."""
        storages = [entry.storage for entry in list(self._entries.values())]
        return [storage for storage in storages if storage is not None]

    def clear(self) -> None:
        """Remove all memory from the account; the totals and the clock stay."""
        self._entries.clear()
        self.bytes = 0


Heuristic = Callable[["Storage", float], float]
"""Function of a storage and its staleness, above 0; returns the score."""


class Cluster:
    """A set of a union-find forest: evicted storages that need each other, with the sum of their costs."""

    __slots__ = ("_parent", "cost")

    def __init__(self, cost: float) -> None:
        self._parent: Cluster | None = None
        self.cost = cost

    def root(self) -> Cluster:
        """Return the set's representative, which has the cost of all; shorten the path to it."""
        cluster = self
        while cluster._parent is not None:
            if cluster._parent._parent is not None:
                # Path halving: later look-ups are nearly constant in time.
                cluster._parent = cluster._parent._parent
            cluster = cluster._parent
        return cluster

    def join(self, neighbour: Cluster) -> None:
        """Unite two sets, and add up their costs."""
        root, neighbour_root = self.root(), neighbour.root()
        if root is not neighbour_root:
            neighbour_root._parent = root
            root.cost += neighbour_root.cost


def missing_inputs(storage: Storage) -> list[Storage]:
    """Return the storages that are gone and needed to make this one again."""
    refs = () if storage.maker is None else storage.maker.input_refs
    return [ref.storage for ref in refs if ref.storage.is_gone]


def missing_consumers(storage: Storage) -> list[Storage]:
    """Return the storages that are gone and need this one to be made again."""
    consumers = storage.consumers.alive()
    return [product for operation in consumers for product in operation.products if product.is_gone]


def _neighbour_clusters(storage: Storage) -> list[Cluster]:
    """Return the clusters of the evicted storages that are inputs or consumers of a storage."""
    neighbours = [*missing_inputs(storage), *missing_consumers(storage)]
    return [neighbour.cluster for neighbour in neighbours if neighbour.cluster is not None]


def join_evicted_neighbours(storage: Storage) -> None:
    """Join a storage that is gone, and the sets of its evicted inputs and consumers; no effect for others."""
    if storage.is_gone:
        storage.cluster = Cluster(storage.cost)
        for cluster in _neighbour_clusters(storage):
            storage.cluster.join(cluster)


def leave_evicted_neighbours(storage: Storage) -> None:
    """Take a storage that was made again from its set, whose cost falls; sets are not split (h_DTR^eq)."""
    if storage.cluster is not None:
        root = storage.cluster.root()
        # Not below 0, which rounding or a set joined twice could give.
        root.cost = max(root.cost - storage.cost, 0.0)
        storage.cluster = None


def _evicted_cost(storage: Storage) -> float:
    """Return the cost of the evicted neighbourhood e*: evicted storages reached in either direction."""
    return _reachable_cost(storage, missing_inputs) + _reachable_cost(storage, missing_consumers)


def _reachable_cost(storage: Storage, find_neighbours: Callable[[Storage], list[Storage]]) -> float:
    """Return the cost of the evicted storages that are reached over neighbours; each op counts once."""
    visited, pending, cost = {storage}, [storage], 0.0
    counted_makers = set()
    while pending:
        for neighbour in find_neighbours(pending.pop()):
            if neighbour not in visited:
                visited.add(neighbour)
                pending.append(neighbour)
                if neighbour.maker not in counted_makers:
                    counted_makers.add(neighbour.maker)
                    cost += neighbour.cost
    return cost


def _h_dtr_eq(storage: Storage, staleness: float) -> float:
    """Return the cost of a storage and the sets around it, over bytes and staleness."""
    clusters = {cluster.root() for cluster in _neighbour_clusters(storage)}
    # Each set once, though several neighbours may be in it.
    return (storage.cost + sum(cluster.cost for cluster in clusters)) / (storage.size * staleness)


HeuristicName = Literal["h_dtr", "h_dtr_eq", "h_dtr_local", "h_e_star", "msps", "lru", "size"]

HEURISTICS: dict[HeuristicName, Heuristic] = {
    # Cost of the storage and its evicted neighbourhood, over bytes and staleness.
    "h_dtr": lambda storage, staleness: (storage.cost + _evicted_cost(storage)) / (storage.size * staleness),
    # The same with the neighbourhood by union-find, which is fast.
    "h_dtr_eq": _h_dtr_eq,
    # Cost of the storage alone, over bytes and staleness.
    "h_dtr_local": lambda storage, staleness: storage.cost / (storage.size * staleness),
    # Cost of the evicted neighbourhood alone: the reduced heuristic of the bound on linear networks.
    "h_e_star": lambda storage, _: _evicted_cost(storage),
    # Cost of the storage and of evicted ones before it, over bytes (Peng et al. 2020, "Capuchin").
    "msps": lambda storage, _: (storage.cost + _reachable_cost(storage, missing_inputs)) / storage.size,
    # The one that was read longest ago.
    "lru": lambda _, staleness: 1 / staleness,
    # The largest (GreedyRemat, Kumar et al. 2019).
    "size": lambda storage, _: 1 / storage.size,
}
"""Heuristics by name."""
