"""What is remembered of storages and of the ops that made them, so that an op can run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from amanda.errors import AmandaError
from amanda.tools.remat._neighbourhood import Cluster


class RematError(AmandaError, RuntimeError):
    """What was evicted cannot be computed again as it was."""


class BudgetError(AmandaError, MemoryError):
    """The budget cannot be held, and the tool was told to be strict."""


@dataclass(eq=False, slots=True)
class Place:
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


class Storage:
    """Memory that tensors share: alive, or gone and made again by running `maker`.

    address, memory: of the framework's storage, which is referred to weakly; None where it is gone.
    maker: the op whose results lie in it; None where it cannot be run again.  slot: which of its results.
    handles: what autograd holds of it through this tool.  copy: what this tool itself holds.
    version: of `copy` when it was taken, where others may write into it.
    touched: the clock when it was read last.  locks: ops under way that need it.
    """

    __slots__ = (
        "__weakref__", "address", "cluster", "consumers", "copy", "handles", "locks", "maker", "memory",
        "size", "slot", "touched", "version",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = 0
        self.memory: weakref.ref[Any] | None = None
        self.maker: Operation | None = None
        self.slot: Slot | None = None
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.consumers: weakref.WeakSet[Operation] = weakref.WeakSet()
        self.copy: Any = None
        self.version: int | None = None
        self.touched = 0.0
        self.locks = 0
        self.cluster: Cluster | None = None

    @property
    def alive(self) -> Any:
        """The framework's storage; None where it is gone."""
        return None if self.memory is None else self.memory()

    def hold(self, tensor: Any) -> None:
        """Keep the memory alive by a tensor on it."""
        self.copy, self.version = tensor, tensor._version

    @property
    def is_written(self) -> bool:
        """True if the program has written into the copy since this tool holds it."""
        return self.copy is not None and self.copy._version != self.version

    @property
    def held(self) -> list[Handle]:
        """The handles that keep it alive."""
        return [handle for handle in self.handles if handle.tensor is not None]

    @property
    def cost(self) -> float:
        """Of making it again, of what is alive."""
        return 0.0 if self.maker is None else self.maker.cost


class Handle:
    """What autograd is given to keep instead of a tensor.

    tensor: what it stands for, or None where its storage was evicted.  version: the tensor's, when saved.
    """

    __slots__ = ("__weakref__", "geometry", "storage", "tensor", "version")

    def __init__(self, tensor: Any, version: int | None, storage: Storage | None, geometry: Any) -> None:
        self.tensor = tensor
        self.version = version
        self.storage = storage
        self.geometry = geometry


@dataclass(frozen=True, slots=True)
class Slot:
    """Which of an op's results: the outputs in order, or what autograd saved while it ran."""

    saved: bool
    index: int


class Ref(NamedTuple):
    """An input of an op that is remembered.  tensor: weakly, what was given; version: then."""

    storage: Storage
    geometry: Any
    requires_grad: bool
    version: int
    tensor: weakref.ref[Any]


class Scratch(NamedTuple):
    """An input that the op writes and does not read: any memory of that geometry will do."""

    geometry: Any
    device: Any


class Operation:
    """One execution of an op, to be run again.

    compute: from inputs to the op's result.  inputs: as given, with a Ref for each tensor.
    settings: under which it ran.  cost: seconds, or 1.  size: bytes of all that it made.
    committed: in which generation it was seen that all it needs can be had, and made sure that it stays so.
    saved: what autograd keeps for its backward op.
    """

    __slots__ = (
        "__weakref__", "committed", "compute", "cost", "inputs", "number", "place", "products", "refs",
        "saved", "settings", "size",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        place: Place,
        compute: Callable[[Sequence[Any]], Any],
        inputs: Sequence[Any],
        settings: Any,
    ) -> None:
        self.number = number
        self.place = place
        self.compute = compute
        self.inputs = inputs
        self.refs = [one for one in flat(inputs) if isinstance(one, Ref)]
        self.settings = settings
        self.cost = 0.0
        self.size = 0
        self.committed = -1
        self.products: list[weakref.ref[Storage]] = []
        self.saved: list[weakref.ref[Handle]] = []
        for ref in self.refs:
            ref.storage.consumers.add(self)

    @property
    def is_over(self) -> bool:
        """True if the backward op has run for the last time, after those of all readers."""
        return bool(self.saved) and all(handle() is None for handle in self.saved)


def flat(values: Sequence[Any]) -> list[Any]:
    """Values, those of lists and tuples among them too, however deep."""
    return [one for value in values for one in (flat(value) if type(value) in (list, tuple) else (value,))]
