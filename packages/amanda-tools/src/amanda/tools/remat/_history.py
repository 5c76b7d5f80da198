"""What is known of the storages of a scope, and of the ops that made them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._neighbourhood import join_neighbours
from amanda.tools.remat._operation import Handle, Operation, Place, Ref, Scratch, Slot, Storage
from amanda.tools.remat._pytorch import Torch


class History:
    """Remembers ops as they run.

    clock: the cost of all that ran.
    """

    def __init__(self) -> None:
        self.torch = Torch()
        self.clock = 0.0
        self.lock = threading.RLock()
        self.ledger = Ledger(join_neighbours)
        self._generation = 0
        self._numbers = 0
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._busy = False

    def meet(self, tensor: Any) -> Storage:
        """Return the record of a tensor's storage; a new storage is an input, never recomputed."""
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
            return self.torch.as_it_is(value)
        geometry = self.torch.geometry(value)
        return Ref(self.meet(value), geometry, value.requires_grad, value._version, weakref.ref(value))

    def save(self, operation: Operation, tensor: Any, index: int) -> Handle:
        """Return the handle that autograd keeps for the index-th tensor that an op saves."""
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

    # ---- what is held ----

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
