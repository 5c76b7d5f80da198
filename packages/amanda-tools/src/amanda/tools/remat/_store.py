"""The storages of a scope within a budget: what is evicted, and how it comes back.

It comes back when it is read, ahead of writes that would make it impossible, and at the end.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from time import perf_counter
from typing import Any

from autoray import tree_map

from amanda import interceptor
from amanda.tools.remat._heuristics import Heuristic, join_neighbours, leave_neighbours
from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._pytorch import Torch
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


class Store:
    """Records ops as they run, and holds what autograd saves of them within a budget; any thread may call it.

    budget: bytes, None for no bound.  strict: raise BudgetError where it cannot be held.
    short: the most bytes by which the budget was exceeded.  clock: the cost of all that ran.
    """

    def __init__(self, budget: int | None, heuristic: Heuristic, strict: bool) -> None:
        self.torch, self.ledger, self.lock = Torch(), Ledger(), threading.RLock()
        self.budget, self.strict = budget, strict
        self.short, self.clock = 0, 0.0
        self._heuristic = heuristic
        self._generation = self._numbers = 0
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._busy = False

    def meet(self, tensor: Any) -> Storage:
        """Return the record of a tensor's storage; a new one is as given, and cannot be made again."""
        memory = tensor.untyped_storage()
        entry = self.ledger.find(memory)
        storage = None if entry is None else entry.storage
        if storage is None:
            storage = Storage(memory.nbytes())
            self.ledger.add(memory, storage, counts=False)
        elif storage.maker is not None and not tensor.requires_grad:
            self._settle(storage)
        storage.touched = self.clock
        return storage

    def begin(self, place: Place, compute: Any, inputs: Sequence[Any], scratch: Sequence[int]) -> Operation:
        """Record an op that is about to run."""
        self._tidy()
        kept = [self._referred(one, i in scratch) for i, one in enumerate(inputs)]
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

    def _referred(self, value: Any, is_scratch: bool = False) -> Any:
        """Return what an operation keeps of a value that it was given: a Ref of a tensor."""
        if type(value) in (list, tuple):
            return type(value)(map(self._referred, value))
        if isinstance(value, slice):  # its bounds may be tensors, which the program may write later
            bounds = (value.start, value.stop, value.step)
            return slice(*(int(one) if isinstance(one, self.torch.torch.Tensor) else one for one in bounds))
        if not isinstance(value, self.torch.torch.Tensor):
            return value
        geometry = self.torch.geometry(value)
        if is_scratch:
            return Scratch(geometry, value.device)
        return Ref(self.meet(value), geometry, value.requires_grad, value._version, weakref.ref(value))

    def saving(self, operation: Operation) -> AbstractContextManager[Any]:
        """Return a context in which autograd keeps handles of what an op saves."""
        kept, indices = weakref.ref(operation), count()  # the graph keeps the hooks, and with them `pack`

        def pack(tensor: Any) -> Handle:
            saver = kept()
            assert saver is not None
            with self.lock:
                return self._save(saver, tensor, next(indices))

        return self.torch.saving(pack, self.unpack)

    def _save(self, operation: Operation, tensor: Any, index: int) -> Handle:
        """Return what autograd shall keep of a tensor that it saves while an op runs, as the index-th."""
        version = None if tensor.is_inference() else tensor._version
        if not self.torch.is_plain(tensor):
            return Handle(tensor.detach(), version, None, None)
        memory = tensor.untyped_storage()
        entry = self.ledger.find(memory)
        if entry is None:
            storage = self._made(operation, memory, (index, True))
        else:
            storage = entry.storage or self.meet(tensor)
        handle = Handle(tensor.detach(), version, storage, self.torch.geometry(tensor))
        storage.handles.add(handle)
        operation.saved.append(weakref.ref(handle))
        self._handles.add(handle)
        return handle

    def finish(self, operation: Operation, result: Any, pure: bool) -> None:
        """Record what an op has made, which is not made again if the op was not pure."""
        for index, one in enumerate(self.torch.results(result)):
            if isinstance(one, self.torch.torch.Tensor) and self.torch.is_plain(one):
                memory = one.untyped_storage()
                if self.ledger.find(memory) is None:
                    self._made(operation, memory, (index, False))
        made = operation.products
        operation.size = sum(one.size for one in made)
        self.clock += operation.cost
        for storage in made:
            storage.touched = self.clock
        if not pure:
            self.forget(operation)

    def _made(self, operation: Operation, memory: Any, slot: tuple[int, bool]) -> Storage:
        storage = Storage(memory.nbytes())
        operation.makes(storage, slot)
        self.ledger.add(memory, storage, counts=True)
        return storage

    def forget(self, operation: Operation) -> None:
        """Cut the history of what an op has made, which cannot be made again."""
        for storage in operation.products:
            storage.maker = None

    def _hold(self, ref: Ref) -> None:
        """Hold what cannot be made again, since it is needed to make others."""
        tensor = ref.tensor()
        if tensor is None or tensor._version != ref.version:
            tensor = self.torch.whole(ref.storage.alive)
        self._keep(ref.storage, tensor.detach())

    def _keep(self, storage: Storage, tensor: Any) -> None:
        """Keep the memory of a storage alive by a tensor on it."""
        storage.copy, storage.version = tensor, tensor._version
        self.ledger.loosen(storage)

    def _fill(self, handle: Handle, memory: Any) -> None:
        handle.tensor = self.torch.view(memory, handle.geometry)
        handle.version = handle.tensor._version

    def _settle(self, storage: Storage) -> None:
        """Cut the history of a storage, as autograd's was."""
        maker, storage.maker = storage.maker, None
        if maker is not None and maker.committed == self._generation and storage.copy is None:
            self._keep(storage, self.torch.whole(storage.alive))

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
            tensor = handle.tensor
            if tensor is None:
                assert storage is not None
                return self.torch.view(self.materialise(storage), handle.geometry)
            if storage is not None:
                storage.touched = self.clock
            if handle.version not in (None, tensor._version):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                    f"expected version {handle.version} instead"
                )
            return tensor

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
        inputs = tree_map(self._input, operation.inputs)
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
        storage.touched = self.clock
        self.ledger.add(memory, storage, counts=True)
        self._keep(storage, self.torch.whole(memory))

    def _input(self, value: Any) -> Any:
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
        handled = {one.storage for one in list(self._handles) if one.tensor is None}
        needed = [one for one in handled if one is not None and one.alive is None]
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
