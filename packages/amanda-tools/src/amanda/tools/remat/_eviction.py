"""Eviction: storages are dropped, the lowest score first, until the budget holds what is needed."""

from __future__ import annotations

import logging

from amanda.tools.remat._heuristics import Heuristic
from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._pytorch import Torch
from amanda.tools.remat._records import BudgetError, OpCounts, Operation, Ref, Storage

logger = logging.getLogger("amanda")


class Eviction:
    """Eviction of storages that can be made again, so that the live bytes stay within a budget.

    budget: bytes, None for no bound.  strict: raise BudgetError where it cannot be held.
    """

    def __init__(
        self, torch: Torch, ledger: Ledger, budget: int | None, heuristic: Heuristic, strict: bool
    ) -> None:
        self.torch, self.ledger, self.budget, self.strict = torch, ledger, budget, strict
        self._heuristic = heuristic
        self._generation = 0

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
        for one in self.ledger.storages():
            if one.copy is not None and not (one.handles or one.locks) and one.maker and one.maker.is_over:
                one.copy = None
        self.ledger.drain()

    def _victim(self, passed: set[Storage]) -> Storage | None:
        """Return the storage with the lowest score."""
        scores = {
            one: self._heuristic(one, self.ledger.clock - one.touched + 1e-9)
            for one in self.ledger.storages()
            if one.maker and not one.locks and one.size and one not in passed and self._is_ours(one)
        }
        return min(scores, key=scores.__getitem__, default=None)

    def _is_ours(self, storage: Storage) -> bool:
        """Return True if only this tool holds a storage."""
        own = sum(handle.tensor is not None for handle in storage.handles) + (storage.copy is not None)
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
        held = [handle for handle in storage.handles if handle.tensor is not None]
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
