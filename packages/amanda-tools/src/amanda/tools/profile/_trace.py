"""The timeline in the Trace Event Format (Google, "Trace Event Format", 2016), with times in microseconds."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.tools.profile._log import GRAPH, Event, lanes

if TYPE_CHECKING:
    from amanda.tools.profile._recording import Timeline

_LANE = 1 << 24
"""Track of the first lane of graphs; numbers of threads are smaller."""
_STEPS = _LANE - 1


def trace(timeline: Timeline) -> dict[str, Any]:
    """A trace: complete events on the threads that they ran on, flows from forward to backward ops.

    Ops of a graph, which run side by side, are on tracks on which none overlaps another.
    """
    events = timeline.events
    begins = [*(event.begin for event in events), *(step.begin for step in timeline.steps)]
    base = min(begins, default=0)
    tracks = _tracks(timeline)
    pid = os.getpid()
    made = [*_metadata(pid, timeline, set(tracks)), *_steps(pid, timeline, base)]
    for event, track in zip(events, tracks, strict=True):
        made.append(_complete(pid, track, event, base))
    made += _flows(pid, events, tracks, base)
    for device, history in timeline.alive.items():
        for when, size in history:
            made.append({"ph": "C", "name": f"memory on {device}", "pid": pid, "ts": _us(when, base),
                         "args": {"bytes": size}})  # fmt: skip
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": time.time_ns() - time.perf_counter_ns() + base,
        "otherData": {"tool": "amanda.profile", "dropped": timeline.dropped},
        "traceEvents": made,
    }


def is_meant(path: Path) -> bool:
    """Return True for the file name of a trace: JSON, with `trace` at the end of an earlier part."""
    *parts, suffix = path.name.removesuffix(".gz").split(".")
    return suffix == "json" and any(part.endswith("trace") for part in parts)


def write(document: Mapping[str, Any], path: Path) -> Path:
    """Write a trace, compressed where the name ends in `.gz`."""
    text = json.dumps(document)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def tensorboard_file(folder: Path) -> Path:
    """The file of this process in a folder of logs: `worker.milliseconds.pt.trace.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = f"{socket.gethostname()}_{os.getpid()}"
    return folder / f"{worker}.{time.time_ns() // 1_000_000}.pt.trace.json"


def _us(when: int, base: int) -> float:
    return (when - base) / 1000


def _tracks(timeline: Timeline) -> list[int]:
    """The number of the track that each event is on."""
    of_graphs = [event for event in timeline.events if event.thread == GRAPH]
    lane = iter(lanes(of_graphs))
    threads = timeline.threads
    return [
        _LANE + next(lane) if event.thread == GRAPH else threads[event.thread].number
        for event in timeline.events
    ]


def _metadata(pid: int, timeline: Timeline, tracks: set[int]) -> Iterator[dict[str, Any]]:
    names = {thread.number: thread.name for thread in timeline.threads.values()}
    names |= {track: f"graph {track - _LANE}" for track in tracks if track >= _LANE}
    if timeline.steps:
        names[_STEPS] = "steps"
    program = Path(sys.argv[0] or "python").name
    yield _about(pid, 0, "process_name", {"name": program})
    yield _about(pid, 0, "process_labels", {"labels": "amanda profile"})
    for track in sorted({*tracks, *([_STEPS] if timeline.steps else [])}):
        yield _about(pid, track, "thread_name", {"name": names[track]})
        yield _about(pid, track, "thread_sort_index", {"sort_index": 0 if track == _STEPS else track})


def _about(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _steps(pid: int, timeline: Timeline, base: int) -> Iterator[dict[str, Any]]:
    for step in timeline.steps:
        took = step.end - step.begin
        yield {
            "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step.number}", "pid": pid,
            "tid": _STEPS, "ts": _us(step.begin, base), "dur": took / 1000, "args": {},
        }  # fmt: skip


def _complete(pid: int, tid: int, event: Event, base: int) -> dict[str, Any]:
    place = event.place
    return {
        "ph": "X", "cat": "cpu_op", "name": place.type, "pid": pid, "tid": tid, "ts": _us(event.begin, base),
        "dur": event.took / 1000,
        "args": {**place.names, "name": place.name, "id": f"{place.id:016x}"},
    }  # fmt: skip


def _flows(pid: int, events: Sequence[Event], tracks: Sequence[int], base: int) -> Iterator[dict[str, Any]]:
    """Arrows from each forward execution to its backward ones, which come in the reverse order."""
    for number, both in enumerate(pairs(events), 1):
        for phase, index in zip("sf", both, strict=True):
            arrow = {
                "ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": pid,
                "tid": tracks[index], "ts": _us(events[index].begin, base),
            }  # fmt: skip
            yield arrow if phase == "s" else {**arrow, "bp": "e"}


def pairs(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Positions of forward executions and of the backward ones that belong to them.

    Of one op executed several times before its backward pass, the last execution comes first there.
    """
    forward: dict[int, list[int]] = {}
    used: dict[int, dict[int, int]] = {}  # by forward op: how many executions each backward op had
    for i, event in enumerate(events):
        op = event.place.op_id
        if event.place.phase != "backward":
            if used.pop(op, None) is not None:
                forward[op] = []
            forward.setdefault(op, []).append(i)
        elif op in forward:
            counts = used.setdefault(op, {})
            counts[id(event.place)] = count = counts.get(id(event.place), 0) + 1
            if count <= len(forward[op]):
                yield forward[op][-count], i
