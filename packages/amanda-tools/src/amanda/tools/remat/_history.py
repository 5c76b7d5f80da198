"""Records of the storages of a scope, and of the ops that made them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._pytorch import Torch
from amanda.tools.remat._records import Handle, Operation, Place, Ref, Scratch, Storage


class History:
    """Records ops as they run.

    clock: the cost of all that ran.
    """

    def __init__(self) -> None:
        self.torch = Torch()
        self.clock = 0.0
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self._generation = 0
        self._numbers = 0
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

    def save(self, operation: Operation, tensor: Any, index: int) -> Handle:
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
