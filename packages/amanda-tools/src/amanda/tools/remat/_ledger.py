"""The bytes of the storages that are followed, from their making to their end."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amanda.tools.remat._operation import Storage


@dataclass(slots=True)
class Entry:
    """Memory that is alive.

    size: bytes that count.  record: what it holds, by a weak reference where the record holds the memory;
    None after it was written.
    """

    memory: weakref.ref[Any]
    size: int
    record: Storage | weakref.ref[Storage] | None

    @property
    def storage(self) -> Storage | None:
        """The record of what the memory holds; None if that is unknown, or of no more use."""
        record = self.record
        return record if record is None or isinstance(record, Storage) else record()


class Ledger:
    """Counts bytes, by weak references that tell when memory ends.

    bytes: alive now.  peak: the most at once.
    """

    def __init__(self, on_death: Callable[[Storage], None]) -> None:
        self._on_death = on_death
        self._entries: dict[int, Entry] = {}
        self._dead: deque[tuple[int, weakref.ref[Any]]] = deque()
        self.bytes = 0
        self.peak = 0

    def find(self, memory: Any) -> Entry | None:
        """Return the entry of memory; None for unknown memory."""
        entry = self._entries.get(memory._cdata)
        return entry if entry is not None and entry.memory() is memory else None

    def add(self, memory: Any, record: Storage, counts: bool) -> None:
        """Follow memory, which holds a storage from now on."""
        address, dead = memory._cdata, self._dead
        self.drain()

        def died(reference: weakref.ref[Any]) -> None:
            dead.append((address, reference))  # a death comes at any time, on any thread

        size = memory.nbytes() if counts else 0
        record.address, record.memory = address, weakref.ref(memory, died)
        self._entries[address] = Entry(record.memory, size, record)
        self.bytes += size
        self.look()

    def look(self, more: int = 0) -> None:
        """See whether this, with so many bytes besides, is a peak."""
        self.peak = max(self.peak, self.bytes + more)

    def drain(self) -> None:
        """Take account of what has died."""
        while self._dead:
            address, reference = self._dead.popleft()
            entry = self._entries.get(address)
            if entry is not None and entry.memory is reference:
                del self._entries[address]
                self.bytes -= entry.size
                storage = entry.storage
                if storage is not None:
                    storage.memory = None
                    self._on_death(storage)

    def written(self, memory: Any) -> Storage | None:
        """Forget what memory held, since it is written; return its record."""
        entry = self.find(memory)
        storage = None if entry is None else entry.storage
        if entry is not None and storage is not None:
            entry.record = storage.memory = None
        return storage

    def loosen(self, storage: Storage) -> None:
        """Keep no strong reference to a storage that holds its memory itself from now on."""
        entry = self._entries.get(storage.address)
        if entry is not None and entry.record is storage:
            entry.record = weakref.ref(storage)

    def storages(self) -> list[Storage]:
        """Return the storages that are alive."""
        found = [entry.storage for entry in list(self._entries.values())]
        return [one for one in found if one is not None]

    def clear(self) -> None:
        """Follow nothing any more."""
        self._entries.clear()
        self.bytes = 0
