"""The bytes of live storages in pure Python, and the observers that follow storages."""

import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

from ._clocks import NUMBER_LIMIT

_OLDER = -1
"""Owner of what no observed op has allocated."""


class _Account:
    """Live bytes of one device by their owners, and their peak.

    peak: the most bytes alive, -1 before any.  older: bytes of older storages.
    changes_since_peak: bytes added to `bytes_by_owner` since the peak, which gives the owners at the peak.
    history: nanoseconds, and live bytes without the older ones, after each change.
    """

    def __init__(self, peak: int) -> None:
        self.peak = peak
        self.alive = self.older = 0
        self.bytes_by_owner: defaultdict[int, int] = defaultdict(int)
        self.changes_since_peak: defaultdict[int, int] = defaultdict(int)
        self.history = array("q")

    def change_bytes(self, owner: int, size: int) -> None:
        """Add to the live bytes of an owner; size: negative for freed bytes."""
        self.bytes_by_owner[owner] += size
        self.changes_since_peak[owner] += size
        self.alive += size

    def note_peak(self) -> None:
        """Set the peak to the present bytes if these are as many."""
        # Also an equal peak: the latest of equal ones has the fewest changes since.
        if self.alive >= self.peak:
            self.peak = self.alive
            self.changes_since_peak.clear()

    def owners_at_peak(self) -> dict[int, int]:
        """Return the bytes of each owner at the peak."""
        sizes = [(owner, self.bytes_by_owner[owner] - self.changes_since_peak.get(owner, 0))
                 for owner in sorted(self.bytes_by_owner)]  # fmt: skip
        return {owner: size for owner, size in sizes if size}

    def without_live_bytes(self) -> "_Account":
        """Return an account with the same peak, of storages that have ended since."""
        account = _Account(self.peak)
        account.changes_since_peak.update({owner: -size for owner, size in self.owners_at_peak().items()})
        account.bytes_by_owner.update(dict.fromkeys(account.changes_since_peak, 0))
        for when, size in zip(self.history[::2], self.history[1::2], strict=True):
            account.history.extend((when, size + self.older))  # `older` is 0 from now on
        return account


class _LiveStorage(NamedTuple):
    reference: weakref.ref[Any]
    size: int
    owner: int
    device: str


class StorageTracker:
    """Bytes of live storages, by device and by the number of the op that allocated them.

    Args:
        limit: Number of changes in the history of a device.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live_by_address: dict[int, _LiveStorage] = {}
        self._account_by_device: dict[str, _Account] = {}
        self._allocated: dict[int, int] = {}
        self._recording = False
        self._deaths: deque[tuple[int, int]] = deque()  # address and nanoseconds, not processed yet

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has the peaks and follows no storages."""
        self._process_deaths()
        accounts = {
            device: account.without_live_bytes() for device, account in self._account_by_device.items()
        }
        return {**vars(self), "_live_by_address": {}, "_account_by_device": accounts, "_deaths": deque()}

    def record(self, recording: bool) -> None:
        """Begin or stop to update the peaks.

        Args:
            recording: Whether to update them from now on.
        """
        self._process_deaths()
        self._recording = recording
        for account in self._account_by_device.values() if recording else ():
            account.note_peak()

    def clear(self) -> None:
        """Forget the peaks and what was allocated, but not the live storages."""
        self._process_deaths()
        for account in self._account_by_device.values():
            account.peak = -1
            account.history = array("q")
        self._allocated.clear()
        self.record(self._recording)

    def follow(self, storage: Any, address: int, size: int, device: str, owner: int) -> None:
        """Follow a storage until its end; one that is followed keeps its owner.

        Args:
            storage: Object of the framework, which takes weak references.
            address: Of the storage; another one may have it later.
            size: Bytes of its memory.
            device: Name of the device.
            owner: Number of the op that has allocated the storage; -1 for an older one.
        """
        if owner >= NUMBER_LIMIT:
            raise ValueError(f"the number of an op is at most {NUMBER_LIMIT - 1}, not {owner}")
        self._process_deaths()
        live = self._live_by_address.get(address)
        if live is not None and live.reference() is storage:
            if live.size != size:
                self._change_bytes(device, live.owner, size - live.size)
                self._live_by_address[address] = live._replace(size=size)
            return
        reference = weakref.ref(storage, _note_death(self._deaths, address))
        # To make the reference may run a garbage collection, and there ops that follow the same storage.
        live = self._live_by_address.get(address)
        if live is not None and live.reference() is storage:
            return
        account = self._account_by_device.get(device)
        if account is None:
            account = self._account_by_device[device] = _Account(0 if self._recording else -1)
        self._live_by_address[address] = _LiveStorage(reference, size, owner, device)
        if owner == _OLDER:  # alive before, and so at the peak
            account.bytes_by_owner[owner] += size
            account.alive += size
            account.older += size
            account.peak += size if account.peak >= 0 else 0
            return
        if self._recording:
            self._allocated[owner] = self._allocated.get(owner, 0) + size
        self._change_bytes(device, owner, size)

    def take_allocated(self, number: int) -> int | None:
        """Return and forget the bytes that an op has allocated while recording; None if it has not.

        Args:
            number: Of the op.
        """
        return self._allocated.pop(number, None)

    def accounts(self) -> list[tuple[str, int, int, dict[int, int], bytes]]:
        """Return for each device its name, peak, bytes of older storages, owners at the peak, and history.

        The peak is -1 where there is none.  The history has two int64 for each change: nanoseconds, and bytes
        alive without older ones.
        """
        self._process_deaths()
        return [
            (device, account.peak, account.older, account.owners_at_peak(), account.history.tobytes())
            for device, account in self._account_by_device.items()
        ]

    def _change_bytes(self, device: str, owner: int, size: int, when: int | None = None) -> None:
        account = self._account_by_device[device]
        account.change_bytes(owner, size)
        if self._recording:
            if size > 0:  # only an allocation can raise the peak
                account.note_peak()
            if len(account.history) < 2 * self._limit:
                account.history.extend((when or perf_counter_ns(), account.alive - account.older))

    def _process_deaths(self) -> None:
        """Subtract the bytes of storages that have died, at the times of their deaths."""
        while True:
            try:  # another thread may take the last one
                address, when = self._deaths.popleft()
            except IndexError:
                return
            live = self._live_by_address.get(address)
            # Else the address belongs to a new storage already.
            if live is not None and live.reference() is None:
                del self._live_by_address[address]
                self._change_bytes(live.device, live.owner, -live.size, when)


def _note_death(deaths: deque[tuple[int, int]], address: int) -> Callable[[Any], None]:
    """Return the callback of a weak reference, which holds the queue: the tracker may be dropped before."""
    # Runs at any time, on any thread, also within this module: no more than this.
    return lambda _: deaths.append((address, perf_counter_ns()))


class StorageObserver:
    """Base of observers that follow the storages of an op's values; Python calls them in any case.

    notes_number: whether native code notes numbers for `take_number`.

    Args:
        tracker: Tracker of the storages.
        number: Number of the op, whose storages are those of its outputs that are not known yet.
        before: Observer before an op, of the one after it.
        saved: Reader of what the op has saved for its backward ops; without it native code also calls the
            observer where the op has made backward ops.
    """

    def __init__(
        self, tracker: StorageTracker, number: int, before: "StorageObserver | None" = None,
        saved: "SavedTensorReader | None" = None,
    ) -> None:  # fmt: skip
        self.before = before
        self.notes_number = True

    def take_number(self) -> int:
        """Return the number of the next backward op before the execution; -1 if Python has begun it."""
        return -1


class SavedTensorReader:
    """Reader of what backward ops have saved, by the names of their attributes.

    Args:
        maker: Attribute of a tensor: the op that made it, None for a leaf.
        next: Attribute of an op: pairs of an op that it leads on to, or None, and more.
        number: Attribute of an op: a method whose result grows with each op that is made on a thread.
        attributes: Returns the names of a type's attributes that read what ops have saved, as a list.
        is_packed: Returns what is true if hooks pack what ops save now, which is then not read.
    """

    def __init__(
        self, maker: str, next: str, number: str, attributes: Callable[[type], list[str]],
        is_packed: Callable[[], Any],
    ) -> None:  # fmt: skip
        self._maker, self._next, self._number = maker, next, number
        self._attributes, self._is_packed = attributes, is_packed

    def between(self, tensors: list[Any], first: int, end: int) -> list[Any]:
        """Return what the ops that made some tensors have saved, and those behind these.

        Args:
            tensors: The tensors.
            first: Least number of these ops; older ones belong to other executions.
            end: Number after the greatest one.
        """
        if first == end or self._is_packed():
            return []
        saved_values, visited = [], set()
        ops = [getattr(tensor, self._maker) for tensor in tensors]
        while ops:
            op = ops.pop()
            if op is None or op in visited or not first <= getattr(op, self._number)() < end:
                continue
            visited.add(op)
            for name in self._attributes(type(op)):
                with suppress(RuntimeError):  # freed, or written into since
                    saved_values.append(getattr(op, name))
            ops += [next_op for next_op, *_ in getattr(op, self._next)]
        return saved_values
