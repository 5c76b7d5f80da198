"""Records of ops as they run, and handles that autograd saves instead of tensors, which may be evicted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from amanda import interceptor
from amanda.tools.remat._eviction import Eviction, StorageRecomputation
from amanda.tools.remat._pytorch import TorchRuntime
from amanda.tools.remat._storage import (
    Handle,
    Heuristic,
    InputRef,
    Ledger,
    MemoryTotals,
    OpCounts,
    ProductSlot,
    ReplayableOp,
    ScratchInput,
    Storage,
    join_evicted_neighbours,
)
from amanda.tools.rerun import undisturbed


class RematStore:
    """Records of ops, and of the tensors that autograd saves of them, within a budget; safe for threads.

    Evicted storages are made again when they are read, before a write that would make that impossible, and
    when the tool's scope ends.  totals: are kept up to date.  budget, strict: see `Eviction`.
    """

    def __init__(self, totals: MemoryTotals, budget: int | None, heuristic: Heuristic, strict: bool) -> None:
        # Autograd unpacks on its own threads, while the program may run forward ops; recomputation unpacks in
        # turn.
        self.torch, self.ledger, self.lock = TorchRuntime(), Ledger(totals), threading.RLock()
        self.eviction = Eviction(self.torch, self.ledger, budget, heuristic, strict)
        self.recomputation = StorageRecomputation(self.torch, self.ledger, self.eviction)
        self._last_number = 0  # of a recorded op
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        # True after a forward pass: only then does an empty set mean that the backward pass is over.
        self._had_handles = False

    def storage_of(self, tensor: Any) -> Storage:
        """Return the record of a tensor's storage, as read now; add one if no recorded op made the storage.

        A tensor that the program has detached loses its maker: the op is not run again for it.
        """
        memory, ledger = tensor.untyped_storage(), self.ledger
        entry = ledger.find(memory)
        storage = None if entry is None else entry.storage
        if storage is None:
            storage = Storage(memory.nbytes())
            ledger.add(memory, storage, counts=False)
        # `detach_` has cut the tensor off: a repeated run of its maker would not be what the program has.
        elif storage.maker is not None and not tensor.requires_grad:
            self.eviction.cut_history(storage)
        storage.last_read = ledger.clock
        return storage

    def record_op(
        self,
        counts: OpCounts,
        compute: Any,
        inputs: Sequence[Any],
        tensors: Sequence[Any],
        scratch: Sequence[int],
    ) -> ReplayableOp:
        """Return the record of an op that is about to run, with its inputs and settings.

        After a backward pass the tensors that were held for it are dropped first.
        tensors: among its inputs.  scratch: indices of inputs that the op writes and does not read.
        """
        self._release_after_backward()
        recorded_inputs = [self._record_input(value, i in scratch) for i, value in enumerate(inputs)]
        self._last_number += 1
        return ReplayableOp(self._last_number, counts, compute, recorded_inputs, self.torch.settings(tensors))

    def _release_after_backward(self) -> None:
        """Once autograd holds no handle any more, drop held tensors, and make no storage again."""
        if self._handles:
            self._had_handles = True
        elif self._had_handles:
            self._had_handles = False
            for storage in self.ledger.storages():
                storage.held_tensor = storage.maker = None

    def _record_input(self, value: Any, is_scratch: bool = False) -> Any:
        """Return an input with an InputRef or a ScratchInput for each tensor in it; other values stay.

        Tensors that are bounds of a slice become numbers.
        """
        if type(value) in (list, tuple):
            return type(value)(map(self._record_input, value))
        if isinstance(value, slice):  # its bounds may be tensors, which the program may write later
            bounds = (value.start, value.stop, value.step)
            return slice(
                *(int(bound) if isinstance(bound, self.torch.torch.Tensor) else bound for bound in bounds)
            )
        if not isinstance(value, self.torch.torch.Tensor):
            return value
        geometry = self.torch.geometry(value)
        if is_scratch:
            return ScratchInput(geometry, value.device)
        return InputRef(
            self.storage_of(value), geometry, value.requires_grad, value._version, weakref.ref(value)
        )

    def save_handles(self, operation: ReplayableOp) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves handles instead of an op's tensors.

        Under hooks of the program, autograd saves as these say, and nothing can be evicted.
        """
        # Weak: the graph keeps the hooks, and with them `pack`.
        reference, indices = weakref.ref(operation), count()

        def pack(tensor: Any) -> Handle:
            """Return a handle for the next tensor that the op saves."""
            recorded_operation = reference()
            assert recorded_operation is not None
            with self.lock:
                return self._save_handle(recorded_operation, tensor, next(indices))

        return self.torch.saved_tensors_context(pack, self.unpack)

    def _save_handle(self, operation: ReplayableOp, tensor: Any, index: int) -> Handle:
        """Return a handle for a tensor that autograd saves while an op runs, the `index`-th of this op.

        Records new memory as a product of the op, and the handle at the op, its storage and this store.
        """
        version = None if tensor.is_inference() else tensor._version  # inference tensors have none
        # What cannot be rebuilt from bytes is held as it is, and never evicted.
        if not self.torch.is_plain(tensor):
            return Handle(tensor.detach(), version, storage=None, geometry=None)
        memory = tensor.untyped_storage()
        entry = self.ledger.find(memory)
        if entry is None:  # new memory, which the op has made for its backward pass alone
            storage = self._add_product(operation, memory, ProductSlot(index, is_saved=True))
        else:
            storage = entry.storage or self.storage_of(tensor)
        # Detached: autograd's node would otherwise hold itself through its saved output.
        handle = Handle(tensor.detach(), version, storage, self.torch.geometry(tensor))
        storage.handles.add(handle)
        operation.saved_handles.append(weakref.ref(handle))
        self._handles.add(handle)
        return handle

    def record_results(self, operation: ReplayableOp, result: Any, can_rerun: bool) -> None:
        """Record the storages and bytes that an op has made, and add its cost to the clock.

        can_rerun: False if its storages must not be evicted, as another run would give other values.
        """
        for index, value in enumerate(self.torch.results_of(result)):
            if isinstance(value, self.torch.torch.Tensor) and self.torch.is_plain(value):
                memory = value.untyped_storage()
                if self.ledger.find(memory) is None:
                    self._add_product(operation, memory, ProductSlot(index, is_saved=False))
        products = operation.products
        operation.size = sum(value.size for value in products)
        self.ledger.clock = clock = self.ledger.clock + operation.cost
        for storage in products:
            storage.last_read = clock
        if not can_rerun:
            operation.cut_history()

    def _add_product(self, operation: ReplayableOp, memory: Any, slot: ProductSlot) -> Storage:
        """Record memory that an op has made, which counts towards the budget; return its storage."""
        storage = operation.add_product(memory.nbytes(), slot)
        self.ledger.add(memory, storage, counts=True)
        return storage

    def unpack(self, handle: Handle) -> Any:
        """Return the tensor of a handle; recompute it if it was evicted.

        Raises RuntimeError, with autograd's text, if the program has written the tensor since.
        """
        # Reads of attributes below must not reach the program's modes.
        with self.lock, self.torch.without_torch_function():
            storage = handle.storage
            tensor = handle.tensor
            if tensor is None:  # evicted
                assert storage is not None
                with self._with_lock():
                    return self.torch.view(self.recomputation.materialise(storage), handle.geometry)
            if storage is not None:
                storage.last_read = self.ledger.clock
            # Autograd checks versions of tensors that it saves itself; of what hooks return it cannot.
            if handle.version not in (None, tensor._version):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                    f"expected version {handle.version} instead"
                )
            return tensor

    @contextmanager
    def _with_lock(self) -> Iterator[None]:
        """Hold the lock, with instrumentation, gradients and the user's modes switched off."""
        with interceptor.Suspension(), self.lock, undisturbed():
            yield

    def recompute_before_write(self, tensors: Sequence[Any]) -> None:
        """Recompute the evicted storages that need tensors, before the program writes these tensors.

        Also drops the records of the tensors' storages.
        """
        with self._with_lock():
            self._release_after_backward()
            self.ledger.remove_freed_memory()
            for tensor in filter(self.torch.is_plain, tensors):
                memory = tensor.untyped_storage()
                storage = self.ledger.forget_written(memory)
                if storage is not None:
                    # Held for recomputations, as no op makes it again.
                    if storage.maker is None and storage.held_tensor is not None:
                        self._restore_dependents(storage, memory)
                    storage.held_tensor = None
                    join_evicted_neighbours(storage)

    def _restore_dependents(self, written: Storage, memory: Any) -> None:
        """Recompute the evicted storages that cannot be recomputed once a storage is written.

        The budget does not bound this, and they are not evicted again.
        """
        self.eviction.forget_secured_ops()
        handles = [handle for handle in list(self._handles) if handle.tensor is None]
        evicted_storages = {handle.storage for handle in handles if handle.storage}
        # The record of the written storage is without memory here, so its readers cannot be secured.
        lost_storages = [
            storage
            for storage in evicted_storages
            if storage.live_memory is None
            and (storage.maker is None or not self.eviction.secure_recomputation(storage.maker))
        ]
        # For the time of the recomputation the memory counts as what it was before the write.
        written.memory = weakref.ref(memory)
        for storage in lost_storages:
            self.recomputation.materialise(storage, bounded=False)
            storage.maker = None
        written.memory = None

    def restore(self) -> None:
        """Recompute all evicted storages, whatever the budget, set handles' tensors, and forget records."""
        with self._with_lock():
            for handle in list(self._handles):
                if handle.tensor is None and handle.storage is not None:
                    self.torch.refill(handle, self.recomputation.materialise(handle.storage, bounded=False))
                handle.storage = None
            # Tensors stay in the handles, so that backward passes after the scope find them.
            self._handles.clear()
            self.ledger.clear()
