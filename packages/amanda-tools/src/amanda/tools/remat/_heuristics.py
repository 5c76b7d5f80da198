"""Which storage is evicted first: the one with the lowest score.

Kirisame et al. 2021, "Dynamic Tensor Rematerialization", sec. 4.1, and the simpler ones it compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from amanda.tools.remat._neighbourhood import ancestors_cost, cluster_cost, evicted_cost

if TYPE_CHECKING:
    from amanda.tools.remat._operation import Storage

Heuristic = Callable[["Storage", float], float]
"""From a storage and its staleness, above 0, to its score."""


def h_dtr(storage: Storage, staleness: float) -> float:
    """Cost of the storage and its evicted neighbourhood, over bytes and staleness."""
    return (storage.cost + evicted_cost(storage)) / (storage.size * staleness)


def h_dtr_eq(storage: Storage, staleness: float) -> float:
    """The same with the neighbourhood by union-find, which is what there is time for."""
    return (storage.cost + cluster_cost(storage)) / (storage.size * staleness)


def h_dtr_local(storage: Storage, staleness: float) -> float:
    """Cost of the storage alone, over bytes and staleness."""
    return storage.cost / (storage.size * staleness)


def h_e_star(storage: Storage, staleness: float) -> float:
    """Cost of the evicted neighbourhood alone: the reduced heuristic of the bound on linear networks."""
    return evicted_cost(storage)


def msps(storage: Storage, staleness: float) -> float:
    """Cost of the storage and of what is gone before it, over bytes (Peng et al. 2020, "Capuchin")."""
    return (storage.cost + ancestors_cost(storage)) / storage.size


def lru(storage: Storage, staleness: float) -> float:
    """The one that was read longest ago."""
    return 1 / staleness


def size(storage: Storage, staleness: float) -> float:
    """The largest (GreedyRemat, Kumar et al. 2019)."""
    return 1 / storage.size


HEURISTICS: dict[str, Heuristic] = {
    "h_dtr": h_dtr, "h_dtr_eq": h_dtr_eq, "h_dtr_local": h_dtr_local, "h_e_star": h_e_star, "msps": msps,
    "lru": lru, "size": size,
}  # fmt: skip
"""Heuristics by name."""
