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
    """Return a trace: events by thread, flows from forward to backward ops, and counters of live memory.

    Ops of a graph, which run in parallel, are on tracks without overlaps.
    """
    tracks, pid = _tracks(timeline), os.getpid()
    begins = [*(event.begin for event in timeline.events), *(step.begin for step in timeline.steps)]
    # Numbers from the start: microseconds since the epoch would lose their fraction in a float.
    base = min(begins, default=0)
    trace_events = [
        *_metadata_events(timeline, set(tracks)), *_slices(timeline, tracks, base),
        *_flows(timeline.events, tracks, base),
    ]  # fmt: skip
    for device, history in timeline.alive.items():
        for when, size in history:
            trace_events.append({"ph": "C", "name": f"memory on {device}", "ts": (when - base) / 1000,
                                 "args": {"bytes": size}})  # fmt: skip
    # The program's clock has no date: the offset to the time of day is taken now.
    base_of_day = time.time_ns() - time.perf_counter_ns() + base
    return {
        "schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_of_day,
        "otherData": {"tool": "amanda.profile", "dropped": timeline.dropped},
        "traceEvents": [{**event, "pid": pid} for event in trace_events],
    }  # fmt: skip


def _slices(timeline: Timeline, tracks: Sequence[int], base: int) -> Iterator[dict[str, Any]]:
    """Yield a complete event for each step and each execution.  base: nanoseconds that are 0 in the trace."""
    for step in timeline.steps:
        name, duration = f"ProfilerStep#{step.number}", step.end - step.begin
        yield _complete_event("user_annotation", name, _STEPS, step.begin - base, duration, {})
    for event, track in zip(timeline.events, tracks, strict=True):
        op = event.place
        yield _complete_event("cpu_op", op.type, track, event.begin - base, event.took, op.about)


def _flows(events: Sequence[TimedExecution], tracks: Sequence[int], base: int) -> Iterator[dict[str, Any]]:
    """Yield the start of a flow at each forward op, and its finish at the backward op."""
    for number, (forward, backward) in enumerate(backward_pairs(events), 1):
        # "bp": "e" binds the finish to the slice around it.
        for index, phase, binding in ((forward, "s", {}), (backward, "f", {"bp": "e"})):
            yield {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "tid": tracks[index],
                   "ts": (events[index].begin - base) / 1000, **binding}  # fmt: skip


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
    names[_STEPS] = "steps"
    all_tracks = tracks | {_STEPS} if timeline.steps else tracks
    yield _metadata_event(0, "process_name", {"name": Path(sys.argv[0] or "python").name})
    yield _metadata_event(0, "process_labels", {"labels": "amanda profile"})
    for track in sorted(all_tracks):
        yield _metadata_event(track, "thread_name", {"name": names[track]})
        yield _metadata_event(track, "thread_sort_index", {"sort_index": 0 if track == _STEPS else track})


def _metadata_event(track: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "tid": track, "ts": 0, "args": args}


def _tracks(timeline: Timeline) -> list[int]:
    """Return the number of each event's track: its thread, or for a graph the first free lane."""
    lane_ends: list[int] = []  # by lane, the end of the last op in it
    tracks = []
    for event in timeline.events:
        if event.thread != GRAPH:
            tracks.append(timeline.threads[event.thread].number)
            continue
        # Slices of a track have to nest, and parallel ops overlap: the first free lane takes each.
        lane = next((i for i, end in enumerate(lane_ends) if end <= event.begin), len(lane_ends))
        if lane == len(lane_ends):
            lane_ends.append(0)
        lane_ends[lane] = event.begin + event.took
        tracks.append(_FIRST_LANE + lane)
    return tracks


def backward_pairs(events: Sequence[TimedExecution]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each backward execution and its forward execution, the forward one first.

    If an op ran several times before its backward pass, its last execution is paired first.
    """
    positions_by_forward_op: dict[int, list[int]] = {}
    # By forward op, and by `id` of the profile of each of its backward ops.
    backward_counts_by_forward_op: dict[int, dict[int, int]] = {}
    for i, event in enumerate(events):
        op_id, profile_id = event.place.op_id, id(event.place)
        if event.place.phase != "backward":
            # A forward execution after a backward one begins another pass.
            if backward_counts_by_forward_op.pop(op_id, None) is not None:
                positions_by_forward_op[op_id] = []
            positions_by_forward_op.setdefault(op_id, []).append(i)
        elif op_id in positions_by_forward_op:
            counts = backward_counts_by_forward_op.setdefault(op_id, {})
            counts[profile_id] = count = counts.get(profile_id, 0) + 1
            forward_positions = positions_by_forward_op[op_id]
            if count <= len(forward_positions):
                yield forward_positions[-count], i
