"""Events of a Chrome trace, on tracks and nested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.view._files import Source, is_number
from amanda.tools.view._tables import KEYS, Ops

Event = Mapping[str, Any]
Track = tuple[Any, Any]
_MOST = 200_000
"""Events on one page; a browser draws these at ease."""
_EVENT = ("track", "depth", "start", "duration", "name", "op", "args")
"""Columns of the events."""


def timeline(source: Source, ops: Ops) -> dict[str, Any]:
    """Return tracks, their events by columns, and counters; times in microseconds from the first event on.

    Where there are too many events the longest stay, and `dropped` tells how many do not.
    """
    events = source.list_of("traceEvents")
    every = _spans(source, events)
    spans = sorted(every, key=lambda span: -span["dur"])[:_MOST]
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    counters = [one for one in events if one.get("ph") == "C" and is_number(one.get("ts"))]
    start = min((one["ts"] for one in [*spans, *counters]), default=0)
    names = _tracks(events, spans)
    tracks: list[dict[str, Any]] = [{"name": name, "depth": 1} for name in names.values()]
    ends: dict[Track, tuple[int, list[float]]] = {key: (i, []) for i, key in enumerate(names)}
    rows: list[tuple[Any, ...]] = []
    seen: dict[tuple[int, ...], int] = {}
    for span in spans:
        track, around = ends[_track(span)]
        depth = _depth(around, span)
        tracks[track]["depth"] = max(tracks[track]["depth"], depth + 1)
        found = ops.about(_place(span))
        executed = seen[tuple(found)] = seen.get(tuple(found), -1) + 1
        rows.append((
            track, depth, round(span["ts"] - start, 3), round(span["dur"], 3), str(span.get("name", "")),
            found[executed % len(found)] if found else -1,
            {key: value for key, value in _args(span).items() if key not in (*KEYS, "op")},
        ))  # fmt: skip
    return {
        "name": source.name,
        "tracks": tracks,
        "events": {name: [row[i] for row in rows] for i, name in enumerate(_EVENT)},
        "counters": _counters(counters, start),
        "dropped": len(every) - len(spans),
    }


def _depth(ends: list[float], span: Event) -> int:
    """Return the number of events around an event.  ends: of those, the outermost first, up to date."""
    while ends and ends[-1] <= span["ts"]:
        ends.pop()
    ends.append(span["ts"] + span["dur"])
    return len(ends) - 1


def _track(event: Event) -> Track:
    return event.get("pid"), event.get("tid")


def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def places(source: Source) -> list[dict[str, Any]]:
    """Return what events say of their ops, where they say enough to tell them apart."""
    spans = sorted(_spans(source, source.list_of("traceEvents")), key=lambda span: span["ts"])
    return [place for place in map(_place, spans) if all(key in place for key in KEYS)]


def _place(event: Event) -> dict[str, Any]:
    """Return what an event says of its op in its arguments, with the type as its name and the id as `op`."""
    named = {"type": event.get("name"), **_args(event)}
    if "op" in named:
        named.setdefault("id", named.pop("op"))
    return named


def _spans(source: Source, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return complete events; what begins and ends apart is made one."""
    spans = [one for one in events if one.get("ph") == "X"]
    open_: dict[Track, list[dict[str, Any]]] = {}
    for event in events:
        stack = open_.setdefault(_track(event), [])
        if event.get("ph") == "B":
            stack.append(event)
        elif event.get("ph") == "E" and stack:
            begun = stack.pop()
            spans.append({**begun, "dur": event.get("ts", 0) - begun.get("ts", 0)})
    for span in spans:
        span.setdefault("dur", 0)
        if not is_number(span.get("ts")) or not is_number(span["dur"]):
            raise AmandaError(
                f"{source.name}: the event {span.get('name')!r} begins at {span.get('ts')!r} and takes "
                f"{span['dur']!r}; expected numbers of microseconds"
            )
    return spans


def _tracks(events: Sequence[Event], spans: Sequence[Event]) -> dict[Track, str]:
    """Return the names of the threads in which there are spans, in order."""
    names: dict[tuple[Any, ...], str] = {}
    for event in events:
        kind = event.get("name")
        if event.get("ph") == "M" and kind in ("thread_name", "process_name") and _args(event):
            tid = event.get("tid") if kind == "thread_name" else None
            names[kind, event.get("pid"), tid] = str(_args(event).get("name", ""))
    tracks: dict[Track, str] = {}
    for pid, tid in sorted(dict.fromkeys(map(_track, spans)), key=_in_order):
        process = names.get(("process_name", pid, None), f"process {pid}")
        tracks[pid, tid] = f"{process} · {names.get(('thread_name', pid, tid), f'thread {tid}')}"
    return tracks


def _in_order(track: Track) -> list[tuple[float, str]]:
    """Return a key for sorting by number, and names after numbers."""
    return [(one, "") if is_number(one) else (float("inf"), repr(one)) for one in track]


def _counters(events: Sequence[Event], start: float) -> list[dict[str, Any]]:
    found: dict[tuple[Any, str, str], list[tuple[float, float]]] = {}
    for event in events:
        for series, value in _args(event).items():
            if is_number(value):
                key = (event.get("pid"), str(event.get("name", "")), str(series))
                found.setdefault(key, []).append((round(event["ts"] - start, 3), value))
    return [
        {"name": f"{name} · {series}" if series not in ("", name) else name, "points": sorted(points)}
        for (_, name, series), points in found.items()
    ]
