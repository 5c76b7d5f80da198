"""The timeline in the Trace Event Format (Google, "Trace Event Format", 2016), with times in microseconds."""

from __future__ import annotations

import gzip
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.files import naming, write_file
from amanda.tools.profile._records import GRAPH, TimedExecution, Timeline
from amanda.tools.results import to_json

_FIRST_LANE = 1 << 24
"""Track of the first lane of graphs; numbers of threads are smaller."""
_STEPS = _FIRST_LANE - 1  # the track of steps


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return a trace: complete events by thread, and flows from forward to backward ops.

    Ops of a graph, which run in parallel, are on tracks without overlaps.
    """
    events, tracks, pid = timeline.events, _tracks(timeline), os.getpid()
    begins = [*(event.begin for event in events), *(step.begin for step in timeline.steps)]
    # Numbers from the start: microseconds since the epoch would lose their fraction in a float.
    base = min(begins, default=0)
    trace_events = list(_metadata_events(timeline, set(tracks)))
    for step in timeline.steps:
        names = "user_annotation", f"ProfilerStep#{step.number}"
        trace_events.append(_complete_event(*names, _STEPS, step.begin - base, step.end - step.begin, {}))
    for event, track in zip(events, tracks, strict=True):
        names = "cpu_op", event.place.type
        trace_events.append(_complete_event(*names, track, event.begin - base, event.took, event.place.about))
    for number, pair in enumerate(backward_pairs(events), 1):
        # A flow starts at the forward op and finishes at the backward op; "bp": "e" binds it to the enclosing
        # slice.
        for phase, index, extra in zip("sf", pair, ({}, {"bp": "e"}), strict=True):
            trace_events.append({
                "ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "tid": tracks[index],
                "ts": (events[index].begin - base) / 1000, **extra,
            })  # fmt: skip
    for device, history in timeline.alive.items():
        for when, size in history:
            trace_events.append({"ph": "C", "name": f"memory on {device}", "ts": (when - base) / 1000,
                                 "args": {"bytes": size}})  # fmt: skip
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        # The program's clock has no date: the offset to the time of day is taken now.
        "baseTimeNanoseconds": time.time_ns() - time.perf_counter_ns() + base,
        "otherData": {"tool": "amanda.profile", "dropped": timeline.dropped},
        "traceEvents": [{**event, "pid": pid} for event in trace_events],
    }


def is_trace_name(path: Path) -> bool:
    """Return True for names of trace files, such as `trace.json` and `step.trace.json.gz`."""
    *parts, suffix = path.name.removesuffix(".gz").split(".")
    return suffix == "json" and any(part.endswith("trace") for part in parts)


def write(document: Mapping[str, Any], path: Path) -> Path:
    """Write a trace, compressed if the name ends in `.gz`; return the path. Raises FileError."""
    text = to_json(document).encode()
    return write_file(path, gzip.compress(text) if path.suffix == ".gz" else text)


def tensorboard_file(folder: Path) -> Path:
    """Return the file of this process in a folder of logs: `worker.milliseconds.pt.trace.json`."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    worker = f"{socket.gethostname()}_{os.getpid()}"
    return folder / f"{worker}.{time.time_ns() // 1_000_000}.pt.trace.json"


def _complete_event(
    category: str, name: str, track: int, begin: int, took: int, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": track, "ts": begin / 1000, "dur": took / 1000,
            "args": args}  # fmt: skip


def _metadata_events(timeline: Timeline, tracks: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the events that name the process and its tracks, and order the tracks, steps first."""
    names = {thread.number: thread.name for thread in timeline.threads.values()}
    names |= {track: f"graph {track - _FIRST_LANE}" for track in tracks if track >= _FIRST_LANE}
    if timeline.steps:
        names[_STEPS] = "steps"
        tracks = tracks | {_STEPS}
    yield _metadata_event(0, "process_name", {"name": Path(sys.argv[0] or "python").name})
    yield _metadata_event(0, "process_labels", {"labels": "amanda profile"})
    for track in sorted(tracks):
        yield _metadata_event(track, "thread_name", {"name": names[track]})
        yield _metadata_event(track, "thread_sort_index", {"sort_index": 0 if track == _STEPS else track})


def _metadata_event(track: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "tid": track, "ts": 0, "args": args}


def _tracks(timeline: Timeline) -> list[int]:
    """Return the number of each event's track: its thread, or for a graph the first free lane."""
    ends: list[int] = []
    tracks = []
    for event in timeline.events:
        if event.thread != GRAPH:
            tracks.append(timeline.threads[event.thread].number)
            continue
        # Slices of a track have to nest, and parallel ops overlap: the first free lane takes each.
        lane = next((i for i, end in enumerate(ends) if end <= event.begin), len(ends))
        ends[lane : lane + 1] = [event.begin + event.took]
        tracks.append(_FIRST_LANE + lane)
    return tracks


def backward_pairs(events: Sequence[TimedExecution]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each backward execution and its forward execution, the forward one first.

    If an op ran several times before its backward pass, its last execution is paired first.
    """
    forward: dict[int, list[int]] = {}
    backward_runs: dict[int, dict[int, int]] = {}  # by forward op: how many executions each backward op had
    for i, event in enumerate(events):
        op = event.place.op_id
        if event.place.phase != "backward":
            # A forward execution after a backward one begins another pass.
            if backward_runs.pop(op, None) is not None:
                forward[op] = []
            forward.setdefault(op, []).append(i)
        elif op in forward:
            counts = backward_runs.setdefault(op, {})
            counts[id(event.place)] = count = counts.get(id(event.place), 0) + 1
            if count <= len(forward[op]):
                yield forward[op][-count], i
