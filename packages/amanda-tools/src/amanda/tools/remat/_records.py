"""Storages and the ops that made them, as far as it takes to run an op again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError

if TYPE_CHECKING:
    from amanda.tools.remat._heuristics import Cluster


class RematError(AmandaError, RuntimeError):
    """An evicted tensor cannot be computed again as it was."""


class BudgetError(AmandaError, MemoryError):
    """The budget cannot be held, and the tool was told to be strict."""


@dataclass(eq=False, slots=True)
class OpCounts:
    """An op of the program, and what its storages came to.

    seconds: spent on running it again.  evicted_bytes: of all evictions of its storages.
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


@dataclass(eq=False, slots=True)
class Storage(_Weak):
    """Memory that tensors share: alive, or gone and made again by running `maker`.

    address, memory: of the framework's storage, which is referred to weakly; None where it is gone.
    maker: the op whose results lie in it; None where it cannot be run again.
    slot: which of its results, and True for one of those that autograd saved while the op ran.
    handles: what autograd holds of it through this tool.  copy: what this tool itself holds.
    version: of `copy` when it was taken, where others may write into it.
    touched: the clock when it was read last.  locks: ops under way that need it.
    """

    size: int
    address: int = 0
    memory: weakref.ref[Any] | None = None
    maker: Operation | None = None
    slot: tuple[int, bool] = (0, False)
    handles: weakref.WeakSet[Handle] = field(default_factory=weakref.WeakSet)
    consumers: weakref.WeakSet[Operation] = field(default_factory=weakref.WeakSet)
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
        """True for one that has no memory, and may have to be made again."""
        if self.maker is None or self.alive is not None:
            return False
        return bool(self.handles) or not self.maker.is_over

    @property
    def cost(self) -> float:
        """Of making it again, of what is alive."""
        return 0.0 if self.maker is None else self.maker.cost


@dataclass(eq=False, slots=True)
class Handle(_Weak):
    """The object that autograd keeps instead of a tensor.

    tensor: what it stands for, or None where its storage was evicted.  version: the tensor's, when saved.
    """

    tensor: Any
    version: int | None
    storage: Storage | None
    geometry: Any


@dataclass(eq=False, slots=True)
class Ref:
    """An input of an op that is remembered.  tensor: weakly, what was given; version: then."""

    storage: Storage
    geometry: Any
    requires_grad: bool
    version: int
    tensor: weakref.ref[Any]


@dataclass(eq=False, slots=True)
class Scratch:
    """An input that the op writes and does not read: any memory of that geometry will do."""

    geometry: Any
    device: Any


@dataclass(eq=False, slots=True)
class Operation(_Weak):
    """One execution of an op, to be run again.

    compute: from inputs to the op's result.  inputs: as given, with a Ref for each tensor.
    settings: under which it ran.  cost: seconds, or 1.  size: bytes of all that it made.
    committed: in which generation it was seen that all it needs can be had, and made sure that it stays so.
    saved: what autograd keeps for its backward op.
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
        self.refs += [one for one in flat(self.inputs) if isinstance(one, Ref)]
        for ref in self.refs:
            ref.storage.consumers.add(self)

    @property
    def products(self) -> list[Storage]:
        """The storages that it made and that somebody still refers to."""
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
        """True if its backward op has run for the last time, after those of all that read its results."""
        return bool(self.saved) and all(handle() is None for handle in self.saved)


def flat(values: Sequence[Any]) -> list[Any]:
    """Return values, those of lists and tuples among them too, however deep: quicker than `leaves`."""
    return [one for value in values for one in (flat(value) if type(value) in (list, tuple) else (value,))]
