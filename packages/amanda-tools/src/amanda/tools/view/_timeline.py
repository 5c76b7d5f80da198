"""Events of a Chrome trace, on tracks and nested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.view._files import Source
from amanda.tools.view._tables import KEYS, Ops

_MOST = 200_000
"""Events on one page; a browser draws these at ease."""


@dataclass
class _Track:
    """One thread of one process.  ends: when the events that are open end, the outermost first."""

    name: str
    index: int
    ends: list[float] = field(default_factory=list)
    depth: int = 1


def timeline(source: Source, ops: Ops) -> dict[str, Any]:
    """Return tracks, their events by columns, and counters; times in microseconds from the first event on.

    Where there are too many events the longest stay, and `dropped` tells how many do not.
    """
    events = source.list_of("traceEvents")
    spans, dropped = _longest(_spans(source, events))
    counters = [one for one in events if one.get("ph") == "C" and _is_number(one.get("ts"))]
    start = min((one["ts"] for one in [*spans, *counters]), default=0)
    tracks = _tracks(events, spans)
    columns: dict[str, list[Any]] = {
        key: [] for key in ("track", "depth", "start", "duration", "name", "op", "args")
    }
    seen: dict[tuple[int, ...], int] = {}
    for span in spans:
        track = tracks[span.get("pid"), span.get("tid")]
        args = span["args"] if isinstance(span.get("args"), dict) else {}
        found = ops.about(_place(span))
        executed = seen[tuple(found)] = seen.get(tuple(found), -1) + 1
        values = (
            track.index, _depth(track, span), round(span["ts"] - start, 3), round(span["dur"], 3),
            str(span.get("name", "")), found[executed % len(found)] if found else -1,
            {key: value for key, value in args.items() if key not in (*KEYS, "op")},
        )  # fmt: skip
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return {
        "name": source.name,
        "tracks": [{"name": track.name, "depth": track.depth} for track in tracks.values()],
        "events": columns,
        "counters": _counters(counters, start),
        "dropped": dropped,
    }


def places(source: Source) -> list[dict[str, Any]]:
    """Return what events say of their ops, where they say enough to tell them apart."""
    spans = sorted(_spans(source, source.list_of("traceEvents")), key=lambda span: span["ts"])
    return [place for place in map(_place, spans) if all(key in place for key in KEYS)]


def _place(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event says of its op in its arguments, with the type as its name and the id as `op`."""
    args = event["args"] if isinstance(event.get("args"), dict) else {}
    named = {"type": event.get("name"), **args}
    if "op" in named:
        named.setdefault("id", named.pop("op"))
    return named


def _spans(source: Source, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return complete events; what begins and ends apart is made one."""
    spans = [one for one in events if one.get("ph") == "X"]
    open_: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in events:
        stack = open_.setdefault((event.get("pid"), event.get("tid")), [])
        if event.get("ph") == "B":
            stack.append(event)
        elif event.get("ph") == "E" and stack:
            begun = stack.pop()
            spans.append({**begun, "dur": event.get("ts", 0) - begun.get("ts", 0)})
    for span in spans:
        span.setdefault("dur", 0)
        if not _is_number(span.get("ts")) or not _is_number(span["dur"]):
            raise AmandaError(
                f"{source.name}: the event {span.get('name')!r} begins at {span.get('ts')!r} and takes "
                f"{span['dur']!r}; expected numbers of microseconds"
            )
    return spans


def _longest(spans: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    kept = sorted(spans, key=lambda span: -span["dur"])[:_MOST]
    kept.sort(key=lambda span: (span["ts"], -span["dur"]))
    return kept, len(spans) - len(kept)


def _tracks(
    events: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]]
) -> dict[tuple[Any, Any], _Track]:
    names: dict[tuple[Any, Any, Any], str] = {}
    for event in events:
        if event.get("ph") == "M" and isinstance(event.get("args"), dict):
            place = event.get("tid") if event.get("name") == "thread_name" else None
            if event.get("name") in ("thread_name", "process_name"):
                names[event["name"], event.get("pid"), place] = str(event["args"].get("name", ""))
    tracks: dict[tuple[Any, Any], _Track] = {}
    for pid, tid in sorted(dict.fromkeys((one.get("pid"), one.get("tid")) for one in spans), key=_in_order):
        process = names.get(("process_name", pid, None), f"process {pid}")
        thread = names.get(("thread_name", pid, tid), f"thread {tid}")
        tracks[pid, tid] = _Track(f"{process} · {thread}", len(tracks))
    return tracks


def _in_order(track: tuple[Any, Any]) -> list[tuple[float, str]]:
    """Return a key for sorting by number, and names after numbers."""
    return [(one, "") if _is_number(one) else (float("inf"), repr(one)) for one in track]


def _depth(track: _Track, span: Mapping[str, Any]) -> int:
    while track.ends and track.ends[-1] <= span["ts"]:
        track.ends.pop()
    track.ends.append(span["ts"] + span["dur"])
    track.depth = max(track.depth, len(track.ends))
    return len(track.ends) - 1


def _counters(events: Sequence[Mapping[str, Any]], start: float) -> list[dict[str, Any]]:
    found: dict[tuple[Any, str, str], list[tuple[float, float]]] = {}
    for event in events:
        args = event.get("args")
        for series, value in args.items() if isinstance(args, dict) else ():
            if _is_number(value):
                key = (event.get("pid"), str(event.get("name", "")), str(series))
                found.setdefault(key, []).append((round(event["ts"] - start, 3), value))
    return [
        {"name": f"{name} · {series}" if series not in ("", name) else name, "points": sorted(points)}
        for (_, name, series), points in found.items()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
