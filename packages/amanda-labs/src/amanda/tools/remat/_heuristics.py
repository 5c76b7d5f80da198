"""Heuristics of eviction: the storage with the lowest score goes first.

Kirisame et al. 2021, "Dynamic Tensor Rematerialization", sec. 2, 4.1 and appendix C, and the simpler
heuristics that it compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from amanda.tools.remat._storage import Storage

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
        cluster = self
        while cluster._parent is not None:
            if cluster._parent._parent is not None:
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
    refs = () if storage.maker is None else storage.maker.refs
    return [ref.storage for ref in refs if ref.storage.is_gone]


def missing_consumers(storage: Storage) -> list[Storage]:
    """Return the storages that are gone and need this one to be made again."""
    consumers = storage.consumers.alive()
    return [product for operation in consumers for product in operation.products if product.is_gone]


def _neighbour_clusters(storage: Storage) -> list[Cluster]:
    """Return the clusters of the evicted storages that are inputs or consumers of a storage."""
    neighbours = [*missing_inputs(storage), *missing_consumers(storage)]
    return [neighbour.cluster for neighbour in neighbours if neighbour.cluster is not None]


def join_neighbours(storage: Storage) -> None:
    """Join the sets around a storage that has lost its memory."""
    if storage.is_gone:
        storage.cluster = Cluster(storage.cost)
        for cluster in _neighbour_clusters(storage):
            storage.cluster.join(cluster)


def leave_neighbours(storage: Storage) -> None:
    """Subtract the cost of a storage that was made again; sets are never split: h_DTR^eq approximates."""
    if storage.cluster is not None:
        root = storage.cluster.root()
        root.cost = max(root.cost - storage.cost, 0.0)
        storage.cluster = None


def _evicted_cost(storage: Storage) -> float:
    """Return the cost of the evicted neighbourhood e*: evicted storages reached in either direction."""
    return _reachable_cost(storage, missing_inputs) + _reachable_cost(storage, missing_consumers)


def _reachable_cost(storage: Storage, direction: Callable[[Storage], list[Storage]]) -> float:
    """Return the cost of the evicted storages that are reached in a direction; each op counts once."""
    visited, waiting, cost = {storage}, [storage], 0.0
    operations = set()
    while waiting:
        for storage_reached in direction(waiting.pop()):
            if storage_reached not in visited:
                visited.add(storage_reached)
                waiting.append(storage_reached)
                if storage_reached.maker not in operations:
                    operations.add(storage_reached.maker)
                    cost += storage_reached.cost
    return cost


def _h_dtr_eq(storage: Storage, staleness: float) -> float:
    clusters = {cluster.root() for cluster in _neighbour_clusters(storage)}
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
