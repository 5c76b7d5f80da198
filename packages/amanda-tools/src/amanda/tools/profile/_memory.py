"""Bytes of live tensors, by the op that made them."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from time import perf_counter_ns
from typing import Any, NamedTuple

from amanda.tools.profile._op import OpProfile
from amanda.tools.results import amount

name_of = cache(str)
"""Return the name of a device."""


@dataclass(frozen=True)
class Peak:
    """The most bytes alive on a device at once; owners: the ops that made them, most bytes first."""

    device: str
    size: int
    owners: Sequence[tuple[OpProfile, int]]

    def __str__(self) -> str:
        first = ", ".join(
            f"{amount(size, 'B')} {place.type}{f' in {place.module}' if place.module else ''}"
            + ("" if place.phase == "given" else f" ({place.phase})")
            for place, size in self.owners[:3]
        )
        return f"peak of {amount(self.size, 'B')} on {self.device}: {first}"


def _given() -> OpProfile:
    return OpProfile("given", "parameters, inputs, older tensors", "", "")


@dataclass(eq=False, slots=True)
class Device:
    """Bytes of one device.

    recording: whether steps are recorded.  limit: number of changes kept for the timeline.
    peak: the most bytes alive in recorded steps, None before any.  alive: bytes now.
    given: bytes that no known op made, which `others` owns.  owned: live bytes by owner.
    changed: bytes added to `owned` since the peak.
    history: nanoseconds, and live bytes without those given until then, after each change.
    """

    name: str
    limit: int
    recording: bool
    peak: int | None
    others: OpProfile = field(default_factory=_given)
    alive: int = 0
    given: int = 0
    owned: defaultdict[OpProfile, int] = field(default_factory=lambda: defaultdict(int))
    changed: defaultdict[OpProfile, int] = field(default_factory=lambda: defaultdict(int))
    history: list[tuple[int, int]] = field(default_factory=list)

    def change(self, owner: OpProfile, size: int, when: int | None = None) -> None:
        """Add to the live bytes of an op; size: negative for freed bytes.  when: None for now."""
        self.owned[owner] += size
        self.changed[owner] += size
        self.alive += size
        if self.recording:
            if size > 0:
                self.note_peak()
            if len(self.history) < self.limit:
                self.history.append((when or perf_counter_ns(), self.alive - self.given))

    def give(self, size: int) -> None:
        """Add bytes that are met now, but were alive before, and so at the peak."""
        self.owned[self.others] += size
        self.alive += size
        self.given += size
        if self.peak is not None:
            self.peak += size

    def note_peak(self) -> None:
        """Note the present bytes if they are a peak."""
        if self.peak is None or self.alive >= self.peak:
            self.peak = self.alive
            self.changed.clear()

    def at_peak(self) -> Peak:
        """Return the peak, with the bytes of each owner at that time."""
        sizes = [(owner, size - self.changed.get(owner, 0)) for owner, size in self.owned.items()]
        owners = sorted((one for one in sizes if one[1]), key=lambda one: -one[1])
        return Peak(self.name, self.peak or 0, owners)


class _Held(NamedTuple):
    memory: weakref.ref[Any]
    size: int
    owner: OpProfile
    device: Device


class Memory:
    """Storages, followed from the op that made them to their end by weak references.

    Storages that an op reads and no known op made belong to `others`: parameters, inputs, older tensors.
    limit: number of changes kept for the timeline.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._alive: dict[int, _Held] = {}
        self._dead: deque[tuple[int, int]] = deque()
        self._recording = False
        self.devices: dict[str, Device] = {}

    def record(self, recording: bool) -> None:
        """Begin or stop to look for the peak, which stays."""
        self.drain()
        self._recording = recording
        for device in self.devices.values():
            device.recording = recording
            if recording:
                device.note_peak()

    def clear(self) -> None:
        """Forget the peaks, but not the live storages."""
        self.drain()
        for device in self.devices.values():
            device.peak = None
            device.history.clear()
        self.record(self._recording)

    def meet(self, storages: Iterable[Any], maker: OpProfile | None) -> None:
        """Record storages that an op made, or for maker None was given; known ones keep their owner.

        storages: of PyTorch; one Python object stands for each as long as it lives.
        """
        if self._dead:
            self.drain()
        alive = self._alive
        for memory in storages:
            key, size = id(memory), memory.nbytes()
            held = alive.get(key)
            if held is not None and held.memory() is memory:
                if held.size != size:  # resized in place
                    held.device.change(held.owner, size - held.size)
                    alive[key] = held._replace(size=size)
                continue
            name = name_of(memory.device)
            device = self.devices.get(name)
            if device is None:
                peak = 0 if self._recording else None
                device = self.devices[name] = Device(name, self._limit, self._recording, peak)
            reference = weakref.ref(memory, partial(_note_death, self._dead, key))
            alive[key] = _Held(reference, size, maker or device.others, device)
            if maker is None:
                device.give(size)
                continue
            if self._recording:
                maker.allocated = (maker.allocated or 0) + size
            device.change(maker, size)

    def drain(self) -> None:
        """Process the deaths of storages."""
        while self._dead:
            key, when = self._dead.popleft()
            held = self._alive.get(key)
            if held is not None and held.memory() is None:
                del self._alive[key]
                held.device.change(held.owner, -held.size, when)


def _note_death(dead: deque[tuple[int, int]], key: int, _: Any) -> None:
    dead.append((key, perf_counter_ns()))  # runs at any time, on any thread, so it does no more
