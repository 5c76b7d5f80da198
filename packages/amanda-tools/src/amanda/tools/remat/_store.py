"""The storages of a scope: which are there, which are evicted, and how these come back."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from amanda import interceptor
from amanda.tools.remat._heuristics import Heuristic
from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._neighbourhood import join_neighbours, leave_neighbours
from amanda.tools.remat._operation import (
    BudgetError,
    Handle,
    Operation,
    Place,
    Ref,
    RematError,
    Scratch,
    Slot,
    Storage,
)
from amanda.tools.remat._pytorch import Torch

logger = logging.getLogger("amanda")


class Store:
    """Holds what autograd saves within a budget of bytes; None for no bound.

    strict: raise BudgetError where the budget cannot be held.
    clock: the cost of all that ran.  short: the most bytes by which the budget was exceeded.
    """

    def __init__(self, budget: int | None, heuristic: Heuristic, strict: bool) -> None:
        self.torch = Torch()
        self.budget = budget
        self.strict = strict
        self.clock = 0.0
        self.short = 0
        self.lock = threading.RLock()
        self.ledger = Ledger(join_neighbours)
        self._heuristic = heuristic
        self._generation = 0
        self._numbers = 0
        self._evicted: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._bounded = True
        self._busy = False

    # ---- ops that run ----

    def meet(self, tensor: Any) -> Storage:
        """What is known of a tensor's storage; a new one is as given, and cannot be made again."""
        memory = self.torch.memory(tensor)
        entry = self.ledger.find(memory)
        if entry is None:
            storage = Storage(memory.nbytes())
            self.ledger.add(memory, storage, counts=False)
        elif (known := entry.storage) is None:
            storage = entry.record = Storage(memory.nbytes())
            storage.address, storage.memory = memory._cdata, entry.memory
        else:
            storage = known
            if storage.maker is not None and not tensor.requires_grad:
                self._settle(storage)
        storage.touched = self.clock
        return storage

    def begin(self, place: Place, compute: Any, inputs: Sequence[Any], scratch: Sequence[int]) -> Operation:
        """Remember an op that is about to run."""
        self._tidy()
        kept = [self._scratch(one) if i in scratch else self._referred(one) for i, one in enumerate(inputs)]
        self._numbers += 1
        return Operation(self._numbers, place, compute, kept, self.torch.settings(inputs))

    def _tidy(self) -> None:
        """Once the last graph has gone, hold nothing for it: no memory, and no history of what is left."""
        if self._handles:
            self._busy = True
        elif self._busy:
            self._busy = False
            for storage in self.ledger.storages():
                storage.copy = storage.maker = None

    def _scratch(self, tensor: Any) -> Scratch:
        return Scratch(self.torch.geometry(tensor), tensor.device)

    def _referred(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._referred, value))
        if not isinstance(value, self.torch.torch.Tensor):
            return value
        geometry = self.torch.geometry(value)
        return Ref(self.meet(value), geometry, value.requires_grad, value._version, weakref.ref(value))

    def save(self, operation: Operation, tensor: Any, index: int) -> Handle:
        """What autograd shall keep of a tensor that it saves while an op runs, as the index-th."""
        version = None if tensor.is_inference() else tensor._version
        if not self.torch.is_plain(tensor):
            return Handle(tensor.detach(), version, None, None)
        memory = self.torch.memory(tensor)
        entry = self.ledger.find(memory)
        if entry is None:
            storage = self._made(operation, memory, Slot(True, index))
        else:
            storage = entry.storage or self.meet(tensor)
        handle = Handle(tensor.detach(), version, storage, self.torch.geometry(tensor))
        storage.handles.add(handle)
        operation.saved.append(weakref.ref(handle))
        self._handles.add(handle)
        return handle

    def finish(self, operation: Operation, result: Any, pure: bool) -> None:
        """Remember what an op has made; it is not run again if it was not pure."""
        for index, one in enumerate(self.torch.results(result)):
            if isinstance(one, self.torch.torch.Tensor) and self.torch.is_plain(one):
                memory = self.torch.memory(one)
                if self.ledger.find(memory) is None:
                    self._made(operation, memory, Slot(False, index))
        made = [one for product in operation.products if (one := product()) is not None]
        operation.size = sum(one.size for one in made)
        self.clock += operation.cost
        for storage in made:
            storage.touched = self.clock
            if not pure:
                storage.maker = None

    def _made(self, operation: Operation, memory: Any, slot: Slot) -> Storage:
        storage = Storage(memory.nbytes())
        storage.maker, storage.slot = operation, slot
        operation.products.append(weakref.ref(storage))
        self.ledger.add(memory, storage, counts=True)
        return storage

    def forget(self, operation: Operation) -> None:
        """An op has failed: what it saved so far cannot be made again."""
        for product in operation.products:
            if (storage := product()) is not None:
                storage.maker = None

    # ---- room ----

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
        """Let go of what came back and was read for the last time."""
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
        """Whether nothing but this tool holds it."""
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

    # ---- eviction ----

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
        """Whether all that an op needs can be had, now and later; what could go away otherwise is held."""
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

    def _hold(self, ref: Ref) -> None:
        """Hold what cannot be made again, since it is needed to make others."""
        storage = ref.storage
        tensor = ref.tensor()
        if tensor is not None and tensor._version == ref.version:
            self._keep(storage, tensor.detach())
        else:
            self._keep(storage, self.torch.whole(storage.alive))

    def _keep(self, storage: Storage, tensor: Any) -> None:
        storage.hold(tensor)
        self.ledger.loosen(storage)

    def _fill(self, handle: Handle, memory: Any) -> None:
        handle.tensor = self.torch.view(memory, handle.geometry)
        handle.version = handle.tensor._version

    def _settle(self, storage: Storage) -> None:
        """Make no more of a storage than what it is: its history is cut, as autograd's was."""
        maker, storage.maker = storage.maker, None
        if maker is not None and maker.committed == self._generation and storage.copy is None:
            self._keep(storage, self.torch.whole(storage.alive))

    # ---- return ----

    def unpack(self, handle: Handle) -> Any:
        """The tensor that a handle stands for, computed again if it was evicted."""
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
        """The memory of a storage, made again with all that it takes.

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
        """Keep what an op needs, as far as it is there; the first that is not."""
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
        for product in operation.products:
            storage = product()
            if storage is None or storage.alive is not None:
                continue
            if storage is wanted or storage.handles:
                assert storage.slot is not None
                found = saved if storage.slot.saved else results
                self._return(storage, found[storage.slot.index : storage.slot.index + 1], place)
        place.rematerialisations += 1
        place.seconds += perf_counter() - begin
        self.clock += operation.cost

    def _return(self, storage: Storage, found: Sequence[Any], place: Place) -> None:
        memory = self.torch.memory(found[0]) if found else None
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
            return self.torch.scratch(value.geometry, value.device)
        if not isinstance(value, Ref):
            return value
        storage = value.storage
        given = value.tensor()
        if storage.is_written or (given is not None and given._version != value.version):
            raise RematError(
                f"a tensor of {storage.size:,} bytes that is needed to compute evicted ones again was "
                "written where no tool saw it; write it inside the scope, with instrumentation on"
            )
        storage.touched = self.clock
        made = self.torch.view(storage.alive, value.geometry)
        return made.requires_grad_() if value.requires_grad else made

    # ---- writes, and the end ----

    def before_write(self, tensors: Sequence[Any]) -> None:
        """Hear that tensors will be written: what only their present values could restore comes back."""
        with self._alone():
            self._tidy()
            self.ledger.drain()
            for tensor in tensors:
                if not self.torch.is_plain(tensor):
                    continue
                record = self.ledger.written(self.torch.memory(tensor))
                if record is None:
                    continue
                if record.maker is None and record.copy is not None:
                    self._restore_dependents(record, self.torch.memory(tensor))
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
        before, self._bounded = self._bounded, False
        try:
            yield
        finally:
            self._bounded = before

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
