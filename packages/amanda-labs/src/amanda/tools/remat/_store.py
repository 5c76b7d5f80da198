"""Recording of ops as they run, and of what autograd saves of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from amanda import interceptor
from amanda.tools.mapping import undisturbed
from amanda.tools.remat._eviction import Eviction
from amanda.tools.remat._heuristics import Heuristic, join_neighbours
from amanda.tools.remat._ledger import Ledger, Totals
from amanda.tools.remat._pytorch import Torch
from amanda.tools.remat._recomputation import Recomputation
from amanda.tools.remat._records import Handle, OpCounts, Operation, Ref, Scratch, Storage


class Store:
    """The records of ops, and of tensors that autograd saves, within a budget; any thread may call it.

    Evicted storages come back when they are read, before a write that would make that impossible, and at the
    end.  totals: are kept up to date.  budget, strict: as `Eviction` has them.
    """

    def __init__(self, totals: Totals, budget: int | None, heuristic: Heuristic, strict: bool) -> None:
        self.torch, self.ledger, self.lock = Torch(), Ledger(totals), threading.RLock()
        self.eviction = Eviction(self.torch, self.ledger, budget, heuristic, strict)
        self.recomputation = Recomputation(self.torch, self.ledger, self.eviction)
        self._numbers = 0
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._busy = False

    def meet(self, tensor: Any) -> Storage:
        """Return the record of a tensor's storage; that of an unknown tensor cannot be made again."""
        memory, ledger = tensor.untyped_storage(), self.ledger
        entry = ledger.find(memory)
        storage = None if entry is None else entry.storage
        if storage is None:
            storage = Storage(memory.nbytes())
            ledger.add(memory, storage, counts=False)
        elif storage.maker is not None and not tensor.requires_grad:
            self.eviction.settle(storage)
        storage.touched = ledger.clock
        return storage

    def begin(
        self,
        counts: OpCounts,
        compute: Any,
        inputs: Sequence[Any],
        tensors: Sequence[Any],
        scratch: Sequence[int],
    ) -> Operation:
        """Record an op that is about to run; tensors: among its inputs."""
        self._tidy()
        kept = [self._referred(one, i in scratch) for i, one in enumerate(inputs)]
        self._numbers += 1
        return Operation(self._numbers, counts, compute, kept, self.torch.settings(tensors))

    def _tidy(self) -> None:
        """Drop copies and histories once autograd holds nothing any more."""
        if self._handles:
            self._busy = True
        elif self._busy:
            self._busy = False
            for storage in self.ledger.storages():
                storage.copy = storage.maker = None

    def _referred(self, value: Any, is_scratch: bool = False) -> Any:
        """Return the record of an input: a Ref or a Scratch for each tensor, and other values as they are."""
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
        """Return a context in which autograd saves handles instead of an op's tensors."""
        kept, indices = weakref.ref(operation), count()  # the graph keeps the hooks, and with them `pack`

        def pack(tensor: Any) -> Handle:
            saver = kept()
            assert saver is not None
            with self.lock:
                return self._save(saver, tensor, next(indices))

        return self.torch.saving(pack, self.unpack)

    def _save(self, operation: Operation, tensor: Any, index: int) -> Handle:
        """Return a handle of the index-th tensor that autograd saves while an op runs."""
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
        """Record the storages that an op has made; those of an op that is not pure cannot be made again."""
        for index, one in enumerate(self.torch.results(result)):
            if isinstance(one, self.torch.torch.Tensor) and self.torch.is_plain(one):
                memory = one.untyped_storage()
                if self.ledger.find(memory) is None:
                    self._made(operation, memory, (index, False))
        made = operation.products
        operation.size = sum(one.size for one in made)
        self.ledger.clock = clock = self.ledger.clock + operation.cost
        for storage in made:
            storage.touched = clock
        if not pure:
            operation.forget()

    def _made(self, operation: Operation, memory: Any, slot: tuple[int, bool]) -> Storage:
        storage = operation.makes(memory.nbytes(), slot)
        self.ledger.add(memory, storage, counts=True)
        return storage

    def unpack(self, handle: Handle) -> Any:
        """Return the tensor that a handle stands for, computed again if it was evicted."""
        with self.lock, self.torch.unseen():
            storage = handle.storage
            tensor = handle.tensor
            if tensor is None:
                assert storage is not None
                with self._alone():
                    return self.torch.view(self.recomputation.materialise(storage), handle.geometry)
            if storage is not None:
                storage.touched = self.ledger.clock
            if handle.version not in (None, tensor._version):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                    f"expected version {handle.version} instead"
                )
            return tensor

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with interceptor.Suspension(), self.lock, undisturbed():
            yield

    def before_write(self, tensors: Sequence[Any]) -> None:
        """Make evicted storages again, before tensors are written that this takes."""
        with self._alone():
            self._tidy()
            self.ledger.drain()
            for tensor in filter(self.torch.is_plain, tensors):
                memory = tensor.untyped_storage()
                storage = self.ledger.written(memory)
                if storage is not None:
                    if storage.maker is None and storage.copy is not None:
                        self._restore_dependents(storage, memory)
                    storage.copy = None
                    join_neighbours(storage)

    def _restore_dependents(self, written: Storage, memory: Any) -> None:
        """Make the evicted storages again that cannot be made once a storage is written."""
        self.eviction.revoke()
        evicted = {one.storage for one in list(self._handles) if one.storage and one.tensor is None}
        gone = [one for one in evicted if one.alive is None]
        lost = [one for one in gone if one.maker is None or not self.eviction.commit(one.maker)]
        written.memory = weakref.ref(memory)
        for storage in lost:
            self.recomputation.materialise(storage, bounded=False)
            storage.maker = None
        written.memory = None

    def restore(self) -> None:
        """Make all evicted storages again, give each handle its tensor, and follow no storage any more."""
        with self._alone():
            for handle in list(self._handles):
                if handle.tensor is None and handle.storage is not None:
                    self.torch.fill(handle, self.recomputation.materialise(handle.storage, bounded=False))
                handle.storage = None
            self._handles.clear()
            self.ledger.clear()
