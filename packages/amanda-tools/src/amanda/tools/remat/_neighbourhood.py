"""Which storages that are gone lie around one that is alive: what evicting it would make dearer.

Kirisame et al. 2021, "Dynamic Tensor Rematerialization", sec. 2 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda.tools.remat._operation import Storage


class Cluster:
    """A set of a union-find forest: storages that are gone and neighbours, with the sum of their costs."""

    __slots__ = ("_cost", "_parent")

    def __init__(self, cost: float) -> None:
        self._parent: Cluster | None = None
        self._cost = cost

    def root(self) -> Cluster:
        """The set's representative; the way to it is halved."""
        one = self
        while one._parent is not None:
            if one._parent._parent is not None:
                one._parent = one._parent._parent
            one = one._parent
        return one

    @property
    def cost(self) -> float:
        """Of making all of them again."""
        return self.root()._cost

    def join(self, other: Cluster) -> None:
        """Make one set of two."""
        mine, theirs = self.root(), other.root()
        if mine is not theirs:
            theirs._parent = mine
            mine._cost += theirs._cost

    def leave(self, cost: float) -> None:
        """Take one storage's cost out; sets are never split, which is the approximation of h_DTR^eq."""
        root = self.root()
        root._cost = max(root._cost - cost, 0.0)


def parents(storage: Storage) -> Iterator[Storage]:
    """Storages that are gone and needed to make this one again."""
    if storage.maker is not None:
        for ref in storage.maker.refs:
            if is_gone(ref.storage):
                yield ref.storage


def children(storage: Storage) -> Iterator[Storage]:
    """Storages that are gone and need this one to be made again."""
    for operation in list(storage.consumers):
        for product in operation.products:
            one = product()
            if one is not None and is_gone(one):
                yield one


def is_gone(storage: Storage) -> bool:
    """True if a storage has no memory, and may have to be computed again."""
    maker = storage.maker
    if maker is None or storage.alive is not None:
        return False
    return bool(storage.handles) or not maker.is_over


def join_neighbours(storage: Storage) -> None:
    """Join a storage that has lost its memory with its evicted neighbours."""
    if not is_gone(storage):
        return
    storage.cluster = Cluster(storage.cost)
    for direction in (parents, children):
        for other in direction(storage):
            if other.cluster is not None:
                storage.cluster.join(other.cluster)


def leave_neighbours(storage: Storage) -> None:
    """Remove a storage that has memory again from its evicted neighbours."""
    if storage.cluster is not None:
        storage.cluster.leave(storage.cost)
        storage.cluster = None


def cluster_cost(storage: Storage) -> float:
    """Cost of the sets of its neighbours."""
    roots = {
        one.cluster.root()
        for direction in (parents, children)
        for one in direction(storage)
        if one.cluster is not None
    }
    return sum(root.cost for root in roots)


def ancestors_cost(storage: Storage) -> float:
    """Cost of what has to be made again before this one could be."""
    return _sum(storage, parents)


def evicted_cost(storage: Storage) -> float:
    """Cost of the evicted neighbourhood e*: what is gone and reached through what is gone, either way."""
    return _sum(storage, parents) + _sum(storage, children)


def _sum(storage: Storage, direction: Callable[[Storage], Iterator[Storage]]) -> float:
    seen, waiting, cost = {storage}, [storage], 0.0
    operations = set()
    while waiting:
        for one in direction(waiting.pop()):
            if one not in seen:
                seen.add(one)
                waiting.append(one)
                if one.maker not in operations:
                    operations.add(one.maker)
                    cost += one.cost
    return cost
