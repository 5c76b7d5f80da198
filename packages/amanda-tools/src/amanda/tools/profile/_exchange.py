"""Recordings as plain values, back from them, and several of them as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from amanda.tools.profile._place import KEYS, Place
from amanda.tools.profile._recording import Peak, Recording

_SUMS = {
    "calls": "calls", "timed": "timed", "total": "total_ns", "own": "self_ns", "least": "min_ns",
    "most": "max_ns", "device": "device_ns", "allocated": "allocated",
}  # fmt: skip
"""Fields of a place, by what files call them."""


def as_dict(recording: Recording, at_peak: Mapping[int, int]) -> dict[str, Any]:
    """Peaks and places; `at_peak` has their bytes by the identity of the place."""
    return {
        "schedule": recording.schedule,
        "recorded_steps": recording.steps,
        "wall_ns": recording.wall,
        "peaks": [
            {"device": peak.device, "bytes": peak.size,
             "owners": [{**_named(place), "bytes": size} for place, size in peak.owners]}
            for peak in recording.peaks
        ],
        "places": [
            {**_named(place), **{name: getattr(place, field) for field, name in _SUMS.items()},
             "at_peak": at_peak.get(id(place), 0)}
            for place in recording.places
            if place.calls
        ],
    }  # fmt: skip


def from_dict(found: Mapping[str, Any]) -> Recording:
    """Return the profile that `as_dict` described, without timeline and kernels."""
    places = [_place(one) for one in found["places"]]
    by_id = {(place.phase, place.id): place for place in places}
    peaks = []
    for peak in found["peaks"]:
        named = [(_place(one), one["bytes"]) for one in peak["owners"]]
        owners = [(by_id.get((one.phase, one.id), one), size) for one, size in named]
        peaks.append(Peak(peak["device"], peak["bytes"], owners))
    return Recording(
        places, peaks, steps=found["recorded_steps"], wall=found["wall_ns"], schedule=found["schedule"]
    )


def merged(recordings: Sequence[Recording]) -> Recording:
    """Several as one: equal ops add up, peaks stay apart, and the timeline is that of the first."""
    together: dict[tuple[str, ...], Place] = {}
    became: dict[int, Place] = {}
    for place in (one for recording in recordings for one in recording.places):
        key = (*place.names.values(), place.name)
        if key not in together:
            together[key] = replace(place, kernels=dict(place.kernels))
        else:
            _add(together[key], place)
        became[id(place)] = together[key]
    peaks = [
        replace(peak, owners=[(became.get(id(place), place), size) for place, size in peak.owners])
        for recording in recordings
        for peak in recording.peaks
    ]
    steps, wall = sum(one.steps for one in recordings), sum(one.wall for one in recordings)
    return replace(recordings[0], places=list(together.values()), peaks=peaks, steps=steps, wall=wall)


def _add(place: Place, other: Place) -> None:
    timed = [one for one in (place, other) if one.timed]
    place.least = min((one.least for one in timed), default=0)
    place.most = max(place.most, other.most)
    for name in ("calls", "timed", "total", "own"):
        setattr(place, name, getattr(place, name) + getattr(other, name))
    place.device = _sum((place.device, other.device))
    place.allocated = _sum((place.allocated, other.allocated))
    for kernel, (calls, took) in other.kernels.items():
        before = place.kernels.get(kernel, [0, 0])
        place.kernels[kernel] = [before[0] + calls, before[1] + took]


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _named(place: Place) -> dict[str, str]:
    return {**place.names, "name": place.name, "id": f"{place.id:016x}", "of": f"{place.op_id:016x}"}


def _place(found: Mapping[str, Any]) -> Place:
    sums = {field: found[name] for field, name in _SUMS.items() if name in found}
    names = {key: found[key] for key in (*KEYS, "name")}
    return replace(Place(**names, id=int(found["id"], 16), op_id=int(found["of"], 16)), **sums)
