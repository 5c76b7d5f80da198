"""Records of storages and of the ops that made them, from which an op can run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amanda.errors import AmandaError
from amanda.tools.kit import leaves

if TYPE_CHECKING:
    from amanda.tools.remat._heuristics import Cluster


class RematError(AmandaError, RuntimeError):
    """An evicted tensor cannot be computed again as it was."""


class BudgetError(AmandaError, MemoryError):
    """The budget cannot be held, and the tool is strict."""


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


class _Weak:
    """Base of records that are referred to weakly."""

    __slots__ = ("__weakref__",)


RecordT = TypeVar("RecordT")


class WeakList(Generic[RecordT]):
    """Records by weak references, in the order in which they were added; far cheaper than a WeakSet."""

    __slots__ = ("_most", "_references")

    def __init__(self) -> None:
        self._references: list[weakref.ref[RecordT]] = []
        self._most = 8

    def add(self, record: RecordT) -> None:
        """Add a record; now and then drop the references of those that are gone."""
        if len(self._references) >= self._most:
            self._references = [one for one in self._references if one() is not None]
            self._most = 2 * len(self._references) + 8
        self._references.append(weakref.ref(record))

    def alive(self) -> list[RecordT]:
        """Return the records that are not gone."""
        return [record for one in self._references if (record := one()) is not None]

    def __bool__(self) -> bool:
        return any(one() is not None for one in self._references)


@dataclass(eq=False, slots=True)
class Storage(_Weak):
    """Memory that tensors share: alive, or gone and made again by running `maker`.

    address, memory: of the framework's storage, which is referred to weakly; None where it is gone.
    maker: the op whose results lie in it; None where it cannot be run again.
    slot: which of its results, and True for one of those that autograd saved while the op ran.
    handles: those by which autograd holds the storage.  copy: a tensor by which this tool holds it.
    version: of `copy` when it was taken, to detect writes.
    touched: the clock at the last read.  locks: number of repeated runs under way that need the storage.
    """

    size: int
    address: int = 0
    memory: weakref.ref[Any] | None = None
    maker: Operation | None = None
    slot: tuple[int, bool] = (0, False)
    handles: WeakList[Handle] = field(default_factory=WeakList)
    consumers: WeakList[Operation] = field(default_factory=WeakList)
    copy: Any = None
    version: int | None = None
    touched: float = 0.0
    locks: int = 0
    cluster: Cluster | None = None

    @property
    def alive(self) -> Any:
        """The framework's storage; None where it is gone."""
        return None if self.memory is None else self.memory()

    @property
    def is_gone(self) -> bool:
        """True for a storage without memory that may have to be made again."""
        if self.maker is None or self.alive is not None:
            return False
        return bool(self.handles) or not self.maker.is_over

    @property
    def cost(self) -> float:
        """Cost of making the storage again from its inputs."""
        return 0.0 if self.maker is None else self.maker.cost


@dataclass(eq=False, slots=True)
class Handle(_Weak):
    """The object that autograd saves instead of a tensor.

    tensor: the saved tensor, None while its storage is evicted.  version: the tensor's, when saved.
    """

    tensor: Any
    version: int | None
    storage: Storage | None
    geometry: Any


@dataclass(eq=False, slots=True)
class Ref:
    """An input of a recorded op.  tensor: a weak reference to it; version: at the call."""

    storage: Storage
    geometry: Any
    requires_grad: bool
    version: int
    tensor: weakref.ref[Any]


@dataclass(eq=False, slots=True)
class Scratch:
    """An input that the op writes and does not read, so that any memory of the geometry serves."""

    geometry: Any
    device: Any


@dataclass(eq=False, slots=True)
class Operation(_Weak):
    """One execution of an op, which can run again.

    compute: from inputs to the op's result.  inputs: with a Ref for each tensor.
    settings: those at the execution.  cost: seconds, or 1.  size: bytes of all storages that the op made.
    committed: the generation in which `Eviction.commit` ensured that the op can run again.
    saved: weak references to the handles that autograd saved for the backward op.
    """

    number: int
    counts: OpCounts
    compute: Callable[[Sequence[Any]], Any]
    inputs: Sequence[Any]
    settings: Any
    cost: float = 0.0
    size: int = 0
    committed: int = -1
    refs: list[Ref] = field(default_factory=list)
    saved: list[weakref.ref[Handle]] = field(default_factory=list)
    _products: list[weakref.ref[Storage]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.refs += [one for one in leaves(self.inputs) if isinstance(one, Ref)]
        for ref in self.refs:
            ref.storage.consumers.add(self)

    @property
    def products(self) -> list[Storage]:
        """The storages of the op's results that are still referred to."""
        return [storage for product in self._products if (storage := product()) is not None]

    def makes(self, size: int, slot: tuple[int, bool]) -> Storage:
        """Return the record of a new storage among the op's results."""
        storage = Storage(size, maker=self, slot=slot)
        self._products.append(weakref.ref(storage))
        return storage

    def forget(self) -> None:
        """Cut the history of the storages that the op has made: they cannot be made again."""
        for storage in self.products:
            storage.maker = None

    @property
    def is_over(self) -> bool:
        """True if the backward op has run for the last time, after those of all readers of the results."""
        return bool(self.saved) and all(handle() is None for handle in self.saved)
