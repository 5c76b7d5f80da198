"""Heuristics of eviction: the storage with the lowest score goes first.

Kirisame et al. 2021, "Dynamic Tensor Rematerialization", sec. 2, 4.1 and appendix C, and the simpler
heuristics that it compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from amanda.tools.remat._records import Storage

Heuristic = Callable[["Storage", float], float]
"""Function of a storage and its staleness, above 0; returns the score."""


class Cluster:
    """A set of a union-find forest: neighbouring storages that are gone, with the sum of their costs."""

    __slots__ = ("_parent", "cost")

    def __init__(self, cost: float) -> None:
        self._parent: Cluster | None = None
        self.cost = cost

    def root(self) -> Cluster:
        """Return the set's representative, which has the cost of all; halve the path to it."""
        one = self
        while one._parent is not None:
            if one._parent._parent is not None:
                one._parent = one._parent._parent
            one = one._parent
        return one

    def join(self, other: Cluster) -> None:
        """Unite two sets."""
        mine, theirs = self.root(), other.root()
        if mine is not theirs:
            theirs._parent = mine
            mine.cost += theirs.cost


def parents(storage: Storage) -> list[Storage]:
    """Return the storages that are gone and needed to make this one again."""
    refs = () if storage.maker is None else storage.maker.refs
    return [ref.storage for ref in refs if ref.storage.is_gone]


def children(storage: Storage) -> list[Storage]:
    """Return the storages that are gone and need this one to be made again."""
    consumers = storage.consumers.alive()
    return [product for operation in consumers for product in operation.products if product.is_gone]


def _clusters(storage: Storage) -> list[Cluster]:
    around = [*parents(storage), *children(storage)]
    return [one.cluster for one in around if one.cluster is not None]


def join_neighbours(storage: Storage) -> None:
    """Join the sets around a storage that has lost its memory."""
    if storage.is_gone:
        storage.cluster = Cluster(storage.cost)
        for cluster in _clusters(storage):
            storage.cluster.join(cluster)


def leave_neighbours(storage: Storage) -> None:
    """Subtract the cost of a storage that was made again; sets are never split: h_DTR^eq approximates."""
    if storage.cluster is not None:
        root = storage.cluster.root()
        root.cost = max(root.cost - storage.cost, 0.0)
        storage.cluster = None


def _evicted_cost(storage: Storage) -> float:
    """Return the cost of the evicted neighbourhood e*: evicted storages reached in either direction."""
    return _sum(storage, parents) + _sum(storage, children)


def _sum(storage: Storage, direction: Callable[[Storage], list[Storage]]) -> float:
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


def _h_dtr_eq(storage: Storage, staleness: float) -> float:
    around = {cluster.root() for cluster in _clusters(storage)}
    return (storage.cost + sum(root.cost for root in around)) / (storage.size * staleness)


HeuristicName = Literal["h_dtr", "h_dtr_eq", "h_dtr_local", "h_e_star", "msps", "lru", "size"]

HEURISTICS: dict[HeuristicName, Heuristic] = {
    # Cost of the storage and its evicted neighbourhood, over bytes and staleness.
    "h_dtr": lambda one, staleness: (one.cost + _evicted_cost(one)) / (one.size * staleness),
    # The same with the neighbourhood by union-find, which is fast.
    "h_dtr_eq": _h_dtr_eq,
    # Cost of the storage alone, over bytes and staleness.
    "h_dtr_local": lambda one, staleness: one.cost / (one.size * staleness),
    # Cost of the evicted neighbourhood alone: the reduced heuristic of the bound on linear networks.
    "h_e_star": lambda one, _: _evicted_cost(one),
    # Cost of the storage and of evicted ones before it, over bytes (Peng et al. 2020, "Capuchin").
    "msps": lambda one, _: (one.cost + _sum(one, parents)) / one.size,
    # The one that was read longest ago.
    "lru": lambda _, staleness: 1 / staleness,
    # The largest (GreedyRemat, Kumar et al. 2019).
    "size": lambda one, _: 1 / one.size,
}
"""Heuristics by name."""
