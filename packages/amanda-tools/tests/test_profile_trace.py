"""The timeline: valid by the Trace Event Format, every event on its thread, arrows where they belong."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.profile import OpProfile, ProfileResult, ProfileTool
from amanda.tools.profile._records import GRAPH, OsThread, RecordedStep, TimedExecution, Timeline
from amanda.tools.profile._trace import backward_pairs

FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "ts": (int, float), "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float, "bp": str},
}
"""What an event of each phase has, by the format's description, and nothing else."""


def checked(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, if it is valid.

    Complete events of one thread are nested or apart, never across each other; an arrow begins and ends in
    such an event and does not go back in time; threads are named once.
    """
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        wanted = FIELDS[event["ph"]]
        assert set(event) == {"ph", *wanted}, event
        for name, kind in wanted.items():
            assert isinstance(event[name], kind), event
        assert event["ts"] >= 0
        assert 0 <= event.get("tid", 0) < 1 << 31
    slices: dict[int, list[tuple[float, float]]] = {}
    for event in sorted(
        (one for one in events if one["ph"] == "X"), key=lambda one: (one["ts"], -one["dur"])
    ):
        assert event["dur"] >= 0
        around = slices.setdefault(event["tid"], [])
        begin, end = event["ts"], event["ts"] + event["dur"]
        while around and around[-1][1] <= begin:
            around.pop()
        assert not around or end <= around[-1][1] + 1e-6
        around.append((begin, end))
    names = [(event["tid"], event["name"]) for event in events if event["ph"] == "M"]
    assert len(set(names)) == len(names)
    assert {event["tid"] for event in events if event["ph"] == "X"} <= {
        tid for tid, name in names if name == "thread_name"
    }
    check_arrows(events)
    return events


def check_arrows(events: list[dict[str, Any]]) -> None:
    begins = {(event["tid"], event["ts"]) for event in events if event["ph"] == "X"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    assert ends.keys() == starts.keys()
    assert len(ends) == sum(event["ph"] == "f" for event in events)
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        assert ends[number]["bp"] == "e"
        for one in (start, ends[number]):
            assert (one["tid"], one["ts"]) in begins


@pytest.fixture(scope="module")
def result() -> ProfileResult:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    tool = ProfileTool(warmup=1)

    def steps() -> None:
        for _ in range(3):
            model(torch.rand(3, 4)).sum().backward()
            tool.step()

    with amanda.apply(tool) as scope:
        thread = threading.Thread(target=scope.bind(steps), name="trainer")
        thread.start()
        thread.join()
    return tool.result


def test_a_trace_is_valid_and_has_every_execution(result: ProfileResult) -> None:
    events = checked(result.to_trace())
    ops = [event for event in events if event["ph"] == "X" and event["cat"] == "cpu_op"]
    assert Counter(event["name"] for event in ops) == Counter(
        {row[0]: row[1] for row in result.by("type").rows()}
    )
    took = sum(event["dur"] for event in ops) / 1000
    assert took == pytest.approx(sum(one.total for one in result.ops) / 1e6)
    assert {event["pid"] for event in events} == {os.getpid()}
    (linear,) = {event["args"]["source"] for event in ops if event["name"] == "linear"}
    assert re.fullmatch(r".*test_profile_trace\.py:\d+", linear)
    assert {event["args"]["module"] for event in ops} == {"", "0", "1", "2"}


def test_threads_steps_and_memory_are_in_the_trace(result: ProfileResult) -> None:
    events = checked(result.to_trace())
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {"trainer", "steps"}
    steps = [event["name"] for event in events if event["ph"] == "X" and event["cat"] == "user_annotation"]
    assert steps == ["ProfilerStep#1", "ProfilerStep#2"]
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(counters) == result.peaks[0].size


def test_arrows_lead_from_each_forward_op_to_its_backward_ops(result: ProfileResult) -> None:
    events = result.timeline.events
    arrows = list(backward_pairs(events))
    backward = [i for i, event in enumerate(events) if event.place.phase == "backward"]
    assert sorted(end for _, end in arrows) == backward
    for start, end in arrows:
        assert events[start].place.op_id == events[end].place.op_id
        assert events[start].place.module == events[end].place.module
        (step,) = [one for one in result.timeline.steps if one.begin <= events[end].begin < one.end + 1]
        assert step.begin <= events[start].begin


def test_of_an_op_executed_again_and_again_the_last_execution_comes_first_in_the_backward_pass() -> None:
    forward, backward = (
        OpProfile("forward", "mul", "", "", op_id=7),
        OpProfile("backward", "mul_backward", "", "", op_id=7),
    )
    events = [
        TimedExecution(one, i, 1, 1)
        for i, one in enumerate([forward] * 3 + [backward] * 3 + [forward, backward])
    ]
    assert list(backward_pairs(events)) == [(2, 3), (1, 4), (0, 5), (6, 7)]


def test_ops_that_run_side_by_side_are_on_tracks_of_their_own() -> None:
    op = OpProfile("forward", "mul", "", "", op_id=7, calls=4)
    spans = [(0, 10), (5, 10), (12, 3), (15, 1)]
    timeline = Timeline(
        [TimedExecution(op, *span, GRAPH) for span in spans],
        {GRAPH: OsThread(1, "any")},
        [RecordedStep(0, 0, 20)],
    )
    events = checked(ProfileResult([op], timeline=timeline).to_trace())
    tracks = [event["tid"] for event in events if event["ph"] == "X" and event["cat"] == "cpu_op"]
    assert [track - tracks[0] for track in tracks] == [0, 1, 0, 0]
    assert {"graph 0", "graph 1", "steps"} == {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }


def test_files_hold_the_trace(result: ProfileResult, tmp_path: Path) -> None:
    plain = json.loads(result.save(tmp_path / "step.trace.json").read_text())
    packed = json.loads(gzip.decompress(result.save(tmp_path / "step.trace.json.gz").read_bytes()))
    assert checked(plain) == checked(packed)
    board = result.to_tensorboard(tmp_path / "logs")
    assert re.fullmatch(r"[^/]+_\d+\.\d{13}\.pt\.trace\.json", board.name)
    assert checked(json.loads(board.read_text())) == checked(plain)


def test_a_trace_of_nothing_is_valid() -> None:
    assert [event["ph"] for event in checked(ProfileTool().result.to_trace())] == ["M", "M"]
