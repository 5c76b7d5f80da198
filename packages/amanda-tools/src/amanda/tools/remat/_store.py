"""The storages of a scope: how what was evicted comes back, when read, ahead of writes, and at the end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from amanda import interceptor
from amanda.tools.remat._eviction import Eviction
from amanda.tools.remat._neighbourhood import join_neighbours, leave_neighbours
from amanda.tools.remat._operation import Handle, Operation, Place, Ref, RematError, Scratch, Storage


class Store(Eviction):
    """All that a tool holds for one scope; any thread may call it."""

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
        """Before tensors are written, bring back what only their present values can restore."""
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
