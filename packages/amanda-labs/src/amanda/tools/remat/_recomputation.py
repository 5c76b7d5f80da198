"""Recomputation: evicted storages are made again by running ops."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from amanda.tools.libraries import tree_map
from amanda.tools.remat._eviction import Eviction
from amanda.tools.remat._heuristics import leave_neighbours
from amanda.tools.remat._ledger import Ledger
from amanda.tools.remat._pytorch import Torch
from amanda.tools.remat._records import OpCounts, Operation, Ref, RematError, Scratch, Storage


class Recomputation:
    """Recomputation of evicted storages, within the budget."""

    def __init__(self, torch: Torch, ledger: Ledger, eviction: Eviction) -> None:
        self.torch, self.ledger, self._eviction = torch, ledger, eviction

    def materialise(self, target: Storage, bounded: bool = True) -> Any:
        """Return the memory of a storage, made again with the storages that this takes.

        bounded: evict others where the budget would be exceeded.
        Raises RematError where an op gives something else than at first, or its inputs were written unseen.
        """
        waiting: list[tuple[Storage, set[Storage]]] = [(target, set())]
        try:
            while waiting:
                self.ledger.drain()
                storage, locked = waiting[-1]
                if storage.alive is not None:
                    waiting.pop()
                    _unlock(locked)
                    continue
                maker = storage.maker
                if maker is None:
                    raise RematError(
                        "a tensor that is needed to compute evicted ones again was written unseen"
                    )
                missing = _lock_inputs(maker, locked)
                if missing is not None:
                    waiting.append((missing, set()))
                    continue
                if bounded:
                    self._eviction.make_room(maker.size, maker.counts)
                self._replay(maker, storage)
        finally:
            for _, locked in waiting:
                _unlock(locked)
        target.touched = self.ledger.clock
        return target.alive

    def _replay(self, operation: Operation, wanted: Storage) -> None:
        counts = operation.counts
        begin = perf_counter()
        inputs = tree_map(self._input, operation.inputs)
        results, saved = self.torch.replay(operation.compute, inputs, operation.settings)
        self.ledger.note_peak(operation.size)
        for storage in operation.products:
            if storage.alive is None and (storage is wanted or storage.handles):
                index, is_saved = storage.slot
                self._return(storage, (saved if is_saved else results)[index : index + 1], counts)
        counts.rematerialisations += 1
        counts.seconds += perf_counter() - begin
        self.ledger.clock += operation.cost

    def _return(self, storage: Storage, found: Sequence[Any], counts: OpCounts) -> None:
        memory = found[0].untyped_storage() if found else None
        if memory is None or memory.nbytes() != storage.size:
            raise RematError(
                f"{counts.type} at {counts.source} made {storage.size:,} bytes at first, and "
                f"{memory.nbytes() if memory is not None else 'none'} when it was run again"
            )
        leave_neighbours(storage)
        storage.touched = self.ledger.clock
        self.ledger.add(memory, storage, counts=True)
        self.ledger.hold(storage, self.torch.whole(memory))
        self._eviction.returned.add(storage)

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
        storage.touched = self.ledger.clock
        made = self.torch.view(storage.alive, value.geometry)
        return made.requires_grad_() if value.requires_grad else made


def _lock_inputs(operation: Operation, locked: set[Storage]) -> Storage | None:
    """Lock the inputs of an op that are there; return the first that is not."""
    missing = None
    for ref in operation.refs:
        if ref.storage.alive is None:
            missing = missing or ref.storage
        elif ref.storage not in locked:
            ref.storage.locks += 1
            locked.add(ref.storage)
    return missing


def _unlock(storages: set[Storage]) -> None:
    for storage in storages:
        storage.locks -= 1
