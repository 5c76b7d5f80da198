"""The storages of a scope within a budget: what is evicted, and how it comes back.

It comes back when it is read, ahead of writes that would make it impossible, and at the end.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from amanda import interceptor
from amanda.tools.remat._heuristics import Heuristic, join_neighbours, leave_neighbours
from amanda.tools.remat._history import History
from amanda.tools.remat._records import (
    BudgetError,
    Handle,
    Operation,
    Place,
    Ref,
    RematError,
    Scratch,
    Storage,
)

logger = logging.getLogger("amanda")


class Store(History):
    """Holds what autograd saves within a budget of bytes, None for no bound; any thread may call it.

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

    def make_room(self, need: int, place: Place, certain: bool = True) -> None:
        """Evict until `need` bytes fit in the budget, as far as anything can be evicted."""
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
                    self._fall_short(need, place)
                return
            if not self._evict(victim):
                passed.add(victim)

    def _drop_unneeded(self) -> None:
        """Drop the copies of what came back and was read for the last time."""
        for one in self.ledger.storages():
            if one.copy is not None and not (one.handles or one.locks) and one.maker and one.maker.is_over:
                one.copy = None
        self.ledger.drain()

    def _victim(self, passed: set[Storage]) -> Storage | None:
        """Return the storage with the lowest score."""
        scores = {
            one: self._heuristic(one, self.clock - one.touched + 1e-9)
            for one in self.ledger.storages()
            if one.maker and not one.locks and one.size and one not in passed and self._is_ours(one)
        }
        return min(scores, key=scores.__getitem__, default=None)

    def _is_ours(self, storage: Storage) -> bool:
        """Return True if nothing but this tool holds it."""
        own = sum(handle.tensor is not None for handle in storage.handles) + (storage.copy is not None)
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
        held = [handle for handle in storage.handles if handle.tensor is not None]
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
        """Return True if all that an op needs can be had, now and later; hold what could go away."""
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

    def unpack(self, handle: Handle) -> Any:
        """Return the tensor that a handle stands for, computed again if it was evicted."""
        with self._alone():
            storage = handle.storage
            if handle.tensor is not None:
                if storage is not None:
                    storage.touched = self.clock
                return _checked(handle)
            assert storage is not None
            memory = self.materialise(storage)
            return self.torch.view(memory, handle.geometry)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with interceptor.Suspension(), self.lock, self.torch.undisturbed():
            yield

    def materialise(self, target: Storage) -> Any:
        """Return the memory of a storage, made again with all that it takes.

        Raises RematError where an op gives something else than at first, or its inputs were written unseen.
        """
        self.ledger.drain()
        waiting = [target]
        locked: dict[Storage, set[Storage]] = {}
        try:
            while waiting:
                storage = waiting[-1]
                if storage.alive is not None:
                    _unlock(locked.pop(storage, set()))
                    waiting.pop()
                    continue
                maker = storage.maker
                if maker is None:
                    raise RematError(
                        "a tensor that is needed to compute evicted ones again was written unseen"
                    )
                missing = self._lock_inputs(maker, locked.setdefault(storage, set()))
                if missing is not None:
                    waiting.append(missing)
                else:
                    self._replay(maker, storage)
        finally:
            for each in locked.values():
                _unlock(each)
        target.touched = self.clock
        return target.alive

    @staticmethod
    def _lock_inputs(operation: Operation, locked: set[Storage]) -> Storage | None:
        """Lock what an op needs, as far as it is there; return the first that is not."""
        missing = None
        for ref in operation.refs:
            if ref.storage.alive is None:
                missing = missing or ref.storage
            elif ref.storage not in locked:
                ref.storage.locks += 1
                locked.add(ref.storage)
        return missing

    def _replay(self, operation: Operation, wanted: Storage) -> None:
        place = operation.place
        self.make_room(operation.size, place)
        begin = perf_counter()
        inputs = [self._input(one) for one in operation.inputs]
        results, saved = self.torch.replay(operation.compute, inputs, operation.settings)
        self.ledger.look(operation.size)
        for storage in operation.products:
            if storage.alive is None and (storage is wanted or storage.handles):
                index, is_saved = storage.slot
                self._return(storage, (saved if is_saved else results)[index : index + 1], place)
        place.rematerialisations += 1
        place.seconds += perf_counter() - begin
        self.clock += operation.cost

    def _return(self, storage: Storage, found: Sequence[Any], place: Place) -> None:
        memory = found[0].untyped_storage() if found else None
        if memory is None or memory.nbytes() != storage.size:
            raise RematError(
                f"{place.type} at {place.source} made {storage.size:,} bytes at first, and "
                f"{memory.nbytes() if memory is not None else 'none'} when it was run again"
            )
        leave_neighbours(storage)
        self._evicted.discard(storage)
        storage.touched = self.clock
        self.ledger.add(memory, storage, counts=True)
        self._keep(storage, self.torch.whole(memory))

    def _input(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._input, value))
        if isinstance(value, Scratch):
            geometry = value.geometry
            return self.torch.torch.zeros(geometry.size, dtype=geometry.dtype, device=value.device)
        if not isinstance(value, Ref):
            return value
        storage = value.storage
        given = value.tensor()
        is_written = storage.copy is not None and storage.copy._version != storage.version
        if is_written or (given is not None and given._version != value.version):
            raise RematError(
                f"a tensor of {storage.size:,} bytes that is needed to compute evicted ones again was "
                "written where no tool saw it; write it inside the scope, with instrumentation on"
            )
        storage.touched = self.clock
        made = self.torch.view(storage.alive, value.geometry)
        return made.requires_grad_() if value.requires_grad else made

    def before_write(self, tensors: Sequence[Any]) -> None:
        """Bring back what only the present values of tensors could restore, before these are written."""
        with self._alone():
            self._tidy()
            self.ledger.drain()
            for tensor in tensors:
                if not self.torch.is_plain(tensor):
                    continue
                memory = tensor.untyped_storage()
                record = self.ledger.written(memory)
                if record is None:
                    continue
                if record.maker is None and record.copy is not None:
                    self._restore_dependents(record, memory)
                record.copy = None
                if record.maker is not None:
                    join_neighbours(record)

    def _restore_dependents(self, record: Storage, memory: Any) -> None:
        self._generation += 1
        needed = [one for one in list(self._evicted) if one.handles]
        lost = [one for one in needed if one.maker is None or not self._commit(one.maker)]
        record.memory = weakref.ref(memory)
        with self._unbounded():
            for storage in lost:
                self.materialise(storage)
                storage.maker = None
        record.memory = None

    @contextmanager
    def _unbounded(self) -> Iterator[None]:
        """Context in which nothing is evicted: it might need what is about to be lost."""
        before, self.budget = self.budget, None
        try:
            yield
        finally:
            self.budget = before

    def restore(self) -> None:
        """Bring back all that was evicted, and follow nothing any more; every handle is its tensor."""
        with self._alone(), self._unbounded():
            for handle in list(self._handles):
                if handle.tensor is None and handle.storage is not None:
                    self._fill(handle, self.materialise(handle.storage))
            for handle in list(self._handles):
                handle.storage = None
            self._handles.clear()
            self.ledger.clear()


def _unlock(storages: set[Storage]) -> None:
    for storage in storages:
        storage.locks -= 1


def _checked(handle: Handle) -> Any:
    tensor = handle.tensor
    if handle.version is not None and tensor._version != handle.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{handle.version} instead"
        )
    return tensor
