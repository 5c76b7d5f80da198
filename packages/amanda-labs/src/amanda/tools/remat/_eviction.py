"""Eviction: storages are dropped, the lowest score first, until the budget holds what is needed."""

from __future__ import annotations

import logging
import weakref
from heapq import heapify, heappop, heapreplace

from amanda.tools.remat._heuristics import Heuristic
from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._pytorch import Torch
from amanda.tools.remat._records import BudgetError, OpCounts, Operation, Ref, Storage

EXACT, PART = 128, 8
"""One order serves one eviction, and one more for each `PART` storages beyond `EXACT`."""
logger = logging.getLogger("amanda")


class Eviction:
    """Eviction of storages that can be made again, so that the live bytes stay within a budget.

    budget: bytes, None for no bound.  strict: raise BudgetError where it cannot be held.
    returned: storages that were made again.
    """

    def __init__(
        self, torch: Torch, ledger: Ledger, budget: int | None, heuristic: Heuristic, strict: bool
    ) -> None:
        self.torch, self.ledger, self.budget, self.strict = torch, ledger, budget, strict
        self._heuristic = heuristic
        self.returned: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._generation = 0
        self._order: list[tuple[float, int, weakref.ref[Storage]]] = []  # a heap
        self._left = self._most = 0  # storages that are taken from it

    def make_room(self, need: int, counts: OpCounts, certain: bool = True) -> None:
        """Evict until `need` more bytes fit in the budget, or nothing more can be evicted.

        certain: raise BudgetError or warn where they do not fit.
        """
        self.ledger.drain()
        if self.budget is None:
            return
        if self.ledger.bytes + need > self.budget:
            self._drop_unneeded()
        passed: set[Storage] = set()
        while self.ledger.bytes + need > self.budget:
            victim = self._victim(passed)
            if victim is None:
                if certain:
                    self._fall_short(need, counts)
                return
            if not self._evict(victim):
                passed.add(victim)

    def _drop_unneeded(self) -> None:
        """Drop the copies of storages that were made again and read for the last time."""
        for one in list(self.returned):
            if one.copy is None or one.maker is None:
                self.returned.discard(one)
            elif not (one.handles or one.locks) and one.maker.is_over:
                one.copy = None
        self.ledger.drain()

    def _victim(self, passed: set[Storage]) -> Storage | None:
        """Return the storage with the lowest score; None if nothing more can be evicted.

        Many storages are put in order once for several evictions: the score of the first is computed anew,
        and it is evicted, or put back where others are lower.
        """
        if self._left <= 0 or not self._order:
            self._put_in_order(passed)
        while self._order:
            score, number, reference = self._order[0]
            storage = reference()
            if storage is None or not self._is_candidate(storage, passed):
                heappop(self._order)
            elif (now := self._score(storage)) > score:
                heapreplace(self._order, (now, number, reference))
            else:
                heappop(self._order)
                self._left -= 1
                return storage
            if not self._order and self._left < self._most:
                self._put_in_order(passed)
        return None

    def _put_in_order(self, passed: set[Storage]) -> None:
        found = [one for one in self.ledger.storages() if self._is_candidate(one, passed)]
        self._order = [(self._score(one), i, weakref.ref(one)) for i, one in enumerate(found)]
        heapify(self._order)
        self._left = self._most = max((len(found) - EXACT) // PART, 1)

    def _score(self, storage: Storage) -> float:
        return self._heuristic(storage, self.ledger.clock - storage.touched + 1e-9)

    def _is_candidate(self, one: Storage, passed: set[Storage]) -> bool:
        return bool(one.maker and not one.locks and one.size and one not in passed and self._is_ours(one))

    def _is_ours(self, storage: Storage) -> bool:
        """Return True if only this tool holds a storage."""
        own = sum(handle.tensor is not None for handle in storage.handles.alive()) + (
            storage.copy is not None
        )
        return own > 0 and self.torch.uses(storage.address) == own

    def _fall_short(self, need: int, counts: OpCounts) -> None:
        assert self.budget is not None
        short = self.ledger.bytes + need - self.budget
        message = (
            f"{counts.type} at {counts.source} needs {need:,} bytes more than the {self.ledger.bytes:,} that "
            f"are alive with it and cannot be evicted; the budget is {self.budget:,}"
        )
        if self.strict:
            raise BudgetError(message)
        if not self.ledger.totals.short:
            logger.warning("the budget of memory is exceeded by %s bytes: %s", f"{short:,}", message)
        self.ledger.totals.short = max(self.ledger.totals.short, short)

    def _evict(self, storage: Storage) -> bool:
        maker = storage.maker
        if maker is None or not self.commit(maker):
            return False
        held = [handle for handle in storage.handles.alive() if handle.tensor is not None]
        for handle in held:
            handle.tensor = None
        storage.copy = None
        memory = storage.alive
        if memory is not None:  # somebody holds the storage itself
            for handle in held:
                self.torch.fill(handle, memory)
            storage.maker = None
            return False
        self.ledger.drain()
        maker.counts.evictions += 1
        maker.counts.evicted_bytes += storage.size
        return True

    def revoke(self) -> None:
        """Forget what was committed, since memory is about to be written."""
        self._generation += 1

    def commit(self, target: Operation) -> bool:
        """Return True if an op can be run again, now and later; hold the inputs that could go away."""
        good: set[Operation] = set()
        for operation in self._closure(target):
            if all(self._can_be_had(ref.storage, good) for ref in operation.refs):
                good.add(operation)
            else:
                for storage in operation.products:
                    if storage.alive is not None:
                        storage.maker = None
        if target not in good:
            return False
        for operation in good:
            operation.committed = self._generation
            for ref in operation.refs:
                if ref.storage.maker is None and ref.storage.copy is None:
                    self._hold(ref)
        return True

    def _closure(self, target: Operation) -> list[Operation]:
        """Return the ops that an op may need and that are not committed, in the order of execution."""
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

    def _hold(self, ref: Ref) -> None:
        """Hold a storage that cannot be made again, since others are made from it."""
        tensor = ref.tensor()
        if tensor is None or tensor._version != ref.version:
            tensor = self.torch.whole(ref.storage.alive)
        self.ledger.hold(ref.storage, tensor.detach())

    def settle(self, storage: Storage) -> None:
        """Cut the history of a storage whose history autograd has cut."""
        maker, storage.maker = storage.maker, None
        if maker is not None and maker.committed == self._generation and storage.copy is None:
            self.ledger.hold(storage, self.torch.whole(storage.alive))
