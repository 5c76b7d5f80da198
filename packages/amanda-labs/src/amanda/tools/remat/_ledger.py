"""The bytes of storages, from their making to their end."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from amanda.tools.remat._heuristics import join_neighbours
from amanda.tools.remat._records import Storage


@dataclass(slots=True)
class Entry:
    """Live memory.

    size: bytes that count.  record: the storage in the memory, by a weak reference if the storage holds the
    memory; None after a write.
    """

    memory: weakref.ref[Any]
    size: int
    record: Storage | weakref.ref[Storage] | None = None

    @property
    def storage(self) -> Storage | None:
        """The storage in the memory; None after a write, or if the record has gone."""
        record = self.record
        return record if record is None or isinstance(record, Storage) else record()


@dataclass(slots=True)
class Totals:
    """peak: the most bytes alive at once.  short: the most bytes by which the budget was exceeded."""

    peak: int = 0
    short: int = 0


class Ledger:
    """The account of live bytes, by weak references that report the end of memory.

    totals: are kept up to date.  bytes: alive now.  clock: cost of all ops that ran.
    """

    def __init__(self, totals: Totals) -> None:
        self._entries: dict[int, Entry] = {}
        self._dead: deque[tuple[int, weakref.ref[Any]]] = deque()
        self.totals, self.bytes, self.clock = totals, 0, 0.0

    def find(self, memory: Any) -> Entry | None:
        """Return the entry of memory, or None."""
        entry = self._entries.get(memory._cdata)
        return entry if entry is not None and entry.memory() is memory else None

    def add(self, memory: Any, storage: Storage, counts: bool) -> None:
        """Follow memory that holds a storage from now on; counts: add its bytes."""
        address, dead = memory._cdata, self._dead
        self.drain()
        entry = self.find(memory)
        if entry is None:

            def died(reference: weakref.ref[Any]) -> None:
                dead.append((address, reference))  # a death comes at any time, on any thread

            entry = Entry(weakref.ref(memory, died), memory.nbytes() if counts else 0)
            self._entries[address] = entry
            self.bytes += entry.size
            self.note_peak()
        entry.record = storage
        storage.address, storage.memory = address, entry.memory

    def note_peak(self, more: int = 0) -> None:
        """Note the peak, with so many bytes besides."""
        bytes = self.bytes + more
        if bytes > self.totals.peak:
            self.totals.peak = bytes

    def drain(self) -> None:
        """Process the deaths of memory."""
        while self._dead:
            address, reference = self._dead.popleft()
            entry = self._entries.get(address)
            if entry is not None and entry.memory is reference:
                del self._entries[address]
                self.bytes -= entry.size
                if (storage := entry.storage) is not None:
                    storage.memory = None
                    join_neighbours(storage)

    def written(self, memory: Any) -> Storage | None:
        """Drop and return the record of memory that is about to be written."""
        entry = self.find(memory)
        storage = None if entry is None else entry.storage
        if entry is not None and storage is not None:
            entry.record = storage.memory = None
        return storage

    def hold(self, storage: Storage, tensor: Any) -> None:
        """Keep the memory of a storage alive by a tensor in it."""
        storage.copy, storage.version = tensor, tensor._version
        entry = self._entries.get(storage.address)
        if entry is not None and entry.record is storage:
            entry.record = weakref.ref(storage)  # the record holds the memory, and not the other way round

    def storages(self) -> list[Storage]:
        """Return the storages that are alive."""
        found = [entry.storage for entry in list(self._entries.values())]
        return [one for one in found if one is not None]

    def clear(self) -> None:
        """Follow no memory any more."""
        self._entries.clear()
        self.bytes = 0
