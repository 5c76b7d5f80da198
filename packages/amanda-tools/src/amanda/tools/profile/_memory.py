"""The bytes of tensors that are alive, by the op that made them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple

from amanda.tools.profile._place import Place


class Storage(NamedTuple):
    """Memory that tensors share.  key: tells it from others that are alive; memory: to be held weakly."""

    key: int
    device: str
    size: int
    memory: Any


@dataclass(slots=True)
class Share:
    """Bytes that an op has on a device: alive now, and as they were at the peak number `seen`."""

    alive: int = 0
    before: int = 0
    seen: int = 0


@dataclass(eq=False, slots=True)
class Device:
    """Bytes of one device: alive, and the most that were while steps were recorded, None before.

    peaks: how often a new most was reached.  given: bytes that nobody was seen to make.
    history: nanoseconds, and bytes alive besides those given until then, after each change.
    """

    name: str
    alive: int = 0
    peak: int | None = None
    peaks: int = 0
    given: int = 0
    shares: dict[Place, Share] = field(default_factory=dict)
    history: list[tuple[int, int]] = field(default_factory=list)

    def change(self, owner: Place, size: int) -> None:
        """Add to the bytes that an op has alive; negative numbers for fewer."""
        share = self.shares.setdefault(owner, Share())
        if share.seen != self.peaks:  # the first change since the peak: keep what was
            share.before, share.seen = share.alive, self.peaks
        share.alive += size
        self.alive += size

    def give(self, owner: Place, size: int) -> None:
        """Take in bytes that are met now and were there all along: at the peak too."""
        share = self.shares.setdefault(owner, Share())
        share.alive += size
        share.before += size
        self.alive += size
        self.given += size
        if self.peak is not None:
            self.peak += size

    def look(self) -> None:
        """See whether this is a peak."""
        if self.peak is None or self.alive >= self.peak:
            self.peak = self.alive
            self.peaks += 1

    def at_peak(self) -> dict[Place, int]:
        """Bytes that were alive at the peak, by their owners."""
        shares = self.shares.items()
        sizes = {owner: one.before if one.seen == self.peaks else one.alive for owner, one in shares}
        return {owner: size for owner, size in sizes.items() if size}


class _Held(NamedTuple):
    size: int
    owner: Place
    device: Device


class Memory:
    """Follows storages from the op that made them to their end, which a weak reference tells.

    What an op was given and no op had made belongs to `given`: parameters, inputs, what lived before.
    recording: whether the peak is looked for.  limit: changes kept for the timeline.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._alive: dict[int, tuple[weakref.ref[Any], _Held]] = {}
        self._dead: deque[tuple[int, int]] = deque()
        self._given: dict[str, Place] = {}
        self.devices: dict[str, Device] = {}
        self.recording = False

    def start(self) -> None:
        """Look for the peak from what is alive now on."""
        self.drain()
        self.recording = True
        for device in self.devices.values():
            device.look()

    def stop(self) -> None:
        """Stop following memory; the peak stays."""
        self.drain()
        self.recording = False

    def clear(self) -> None:
        """Forget the peaks; what is alive stays known."""
        self.drain()
        for device in self.devices.values():
            device.peak = None
            device.history.clear()
            if self.recording:
                device.look()

    def meet(self, storages: Iterable[Storage], maker: Place | None) -> None:
        """Take in storages that an op made, or (maker None) was given; known ones belong to their maker."""
        self.drain()
        for storage in storages:
            known = self._alive.get(storage.key)
            if known is not None and known[0]() is storage.memory:
                held = known[1]
                if held.size != storage.size:  # resized in place
                    self._change(held, storage.size - held.size)
                    self._alive[storage.key] = known[0], held._replace(size=storage.size)
                continue
            device = self._device(storage.device)
            owner = maker or self._given_on(storage.device)
            held = _Held(storage.size, owner, device)
            self._alive[storage.key] = weakref.ref(storage.memory, self._death_of(storage.key)), held
            if maker is None:
                device.give(owner, storage.size)
                continue
            if self.recording:
                maker.allocated = (maker.allocated or 0) + storage.size
            self._change(held, storage.size)

    def drain(self) -> None:
        """Take account of what has died."""
        while self._dead:
            key, when = self._dead.popleft()
            known = self._alive.get(key)
            if known is not None and known[0]() is None:
                del self._alive[key]
                self._change(known[1], -known[1].size, when)

    def _death_of(self, key: int) -> Callable[[Any], None]:
        dead = self._dead  # a death comes at any time, on any thread: it is put down, no more

        def died(_: Any) -> None:
            dead.append((key, perf_counter_ns()))

        return died

    def _device(self, name: str) -> Device:
        if name not in self.devices:
            self.devices[name] = Device(name)
            if self.recording:
                self.devices[name].look()
        return self.devices[name]

    def _given_on(self, device: str) -> Place:
        if device not in self._given:
            self._given[device] = Place("given", "parameters, inputs, older tensors", "", "")
        return self._given[device]

    def _change(self, held: _Held, size: int, when: int | None = None) -> None:
        device = held.device
        device.change(held.owner, size)
        if self.recording:
            if size > 0:
                device.look()
            if len(device.history) < self._limit:
                device.history.append((when or perf_counter_ns(), device.alive - device.given))
