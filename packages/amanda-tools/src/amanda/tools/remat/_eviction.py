"""Making room: what is evicted, and what has to be held for its return."""

from __future__ import annotations

import logging
import weakref

from amanda.tools.remat._heuristics import Heuristic
from amanda.tools.remat._history import History
from amanda.tools.remat._operation import BudgetError, Operation, Place, Storage

logger = logging.getLogger("amanda")


class Eviction(History):
    """Holds what autograd saves within a budget of bytes; None for no bound.

    strict: raise BudgetError where the budget cannot be held.
    short: the most bytes by which the budget was exceeded.
    """

    def __init__(self, budget: int | None, heuristic: Heuristic, strict: bool) -> None:
        super().__init__()
        self.budget = budget
        self.strict = strict
        self.short = 0
        self._heuristic = heuristic
        self._evicted: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._bounded = True

    def make_room(self, need: int, place: Place, certain: bool = True) -> None:
        """Evict until `need` bytes fit in the budget, as far as anything can be evicted."""
        self.ledger.drain()
        if self.budget is None or not self._bounded:
            return
        if self.ledger.bytes + need > self.budget:
            self._drop_unneeded()
        passed: set[Storage] = set()
        while self.ledger.bytes + need > self.budget:
            victim = self._victim(passed)
            if victim is None:
                if certain:
                    self._fall_short(need, place)
                return
            if not self._evict(victim):
                passed.add(victim)

    def _drop_unneeded(self) -> None:
        """Drop rematerialised storages that were read for the last time."""
        for one in self.ledger.storages():
            if one.copy is not None and not (one.handles or one.locks) and one.maker and one.maker.is_over:
                one.copy = None
        self.ledger.drain()

    def _victim(self, passed: set[Storage]) -> Storage | None:
        best, lowest = None, float("inf")
        for one in self.ledger.storages():
            if one.maker is None or one.locks or not one.size or one in passed or not self._is_ours(one):
                continue
            score = self._heuristic(one, self.clock - one.touched + 1e-9)
            if score < lowest or best is None:
                best, lowest = one, score
        return best

    def _is_ours(self, storage: Storage) -> bool:
        """Return True if nothing but this tool holds a storage."""
        own = len(storage.held) + (storage.copy is not None)
        return own > 0 and self.torch.uses(storage.address) == own

    def _fall_short(self, need: int, place: Place) -> None:
        assert self.budget is not None
        short = self.ledger.bytes + need - self.budget
        message = (
            f"{place.type} at {place.source} needs {need:,} bytes more than the {self.ledger.bytes:,} that "
            f"are alive with it and cannot be evicted; the budget is {self.budget:,}"
        )
        if self.strict:
            raise BudgetError(message)
        if not self.short:
            logger.warning("the budget of memory is exceeded by %s bytes: %s", f"{short:,}", message)
        self.short = max(self.short, short)

    def _evict(self, storage: Storage) -> bool:
        maker = storage.maker
        if maker is None or not self._commit(maker):
            return False
        held = storage.held
        for handle in held:
            handle.tensor = None
        storage.copy = None
        memory = storage.alive
        if memory is not None:  # somebody holds the storage itself
            for handle in held:
                self._fill(handle, memory)
            storage.maker = None
            return False
        self.ledger.drain()
        self._evicted.add(storage)
        maker.place.evictions += 1
        maker.place.evicted_bytes += storage.size
        return True

    def _commit(self, target: Operation) -> bool:
        """Return True if all inputs of an op can be had again; hold those that would be freed otherwise."""
        order = self._closure(target)
        good: set[Operation] = set()
        for operation in order:
            if all(self._can_be_had(ref.storage, good) for ref in operation.refs):
                good.add(operation)
            else:
                self._give_up(operation)
        if target not in good:
            return False
        for operation in good:
            operation.committed = self._generation
            for ref in operation.refs:
                if ref.storage.maker is None and ref.storage.copy is None:
                    self._hold(ref)
        return True

    def _closure(self, target: Operation) -> list[Operation]:
        """The ops that have not been committed among those that an op may need, in the order of execution."""
        seen, waiting = {target}, [target]
        while waiting:
            for ref in waiting.pop().refs:
                maker = ref.storage.maker
                if maker is not None and maker not in seen and maker.committed != self._generation:
                    seen.add(maker)
                    waiting.append(maker)
        return sorted(seen, key=lambda operation: operation.number)

    def _can_be_had(self, storage: Storage, good: set[Operation]) -> bool:
        maker = storage.maker
        if maker is None:
            return storage.alive is not None
        return maker in good or maker.committed == self._generation

    @staticmethod
    def _give_up(operation: Operation) -> None:
        for product in operation.products:
            if (storage := product()) is not None and storage.alive is not None:
                storage.maker = None
