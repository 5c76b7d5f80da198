"""Ranks under `amanda run`: each leaves its results, which become one, also when a rank is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import pytest

from amanda.tools.command import merge
from amanda.tools.command._processes import missing_ranks, number_of_ranks
from amanda.tools.flops import FlopsResult
from amanda.tools.results import load
from amanda.tools.stats import StatsResult

TORCHRUN = [
    "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
    "localhost:0", "--local-addr", "localhost",
]  # fmt: skip
RUN = ["-m", "amanda", "run"]
TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

def step():
    model(torch.rand(3 + rank, 4)).sum().backward()

for _ in range(3):
    step()
if sys.argv[1] == "killed":
    if rank == 1:
        time.sleep(float(sys.argv[2]))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # waits for the other, until the connection breaks or the launcher ends it
        step()
del model  # torch may wait forever where it is freed after its group
dist.destroy_process_group()
"""
LOCKED = """
import ctypes, threading, torch
torch.ones(3).cumsum(0)
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
library.pthread_mutex_lock(mutex)  # no signal ends this
"""
MACS = 4 * 2


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def run(folder: Path, *command: str, fails: bool = False) -> str:
    """Standard error of a command of this Python's."""
    done = children.run(
        [sys.executable, *command], cwd=folder, limit=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stderr
    assert not list(folder.glob("amanda-*")), "what processes shared is gone"
    return done.stderr


def flops(path: Path) -> FlopsResult:
    result = load(path)
    assert isinstance(result, FlopsResult)
    return result


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 4), ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 0),
     ({"WORLD_SIZE": "4"}, 0), ({}, 0)],
)  # fmt: skip
def test_ranks_of_other_hosts_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: int
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert number_of_ranks() == ranks


def test_ranks_are_missed_of_each_start() -> None:
    labels = ["rank0", "rank0.process7", "rank2.restart1", "main"]
    assert missing_ranks(labels, 3) == [
        "rank1", "rank2", "rank0.restart1", "rank1.restart1",
    ]  # fmt: skip
    assert missing_ranks([], 2) == ["rank0", "rank1"]
    assert missing_ranks(["process3"]) == []


@pytest.mark.long
def test_ranks_that_each_begin_with_the_command_are_merged_by_the_last(script: Path) -> None:
    tools = ["-t", "flops", "-t", "stats:type=linear", "-o", "out"]
    stderr = run(script.parent, *TORCHRUN, *RUN, *tools, "--", "train.py", "whole")
    assert stderr.count("amanda: flops of 2 processes (rank0, rank1)") == 1
    out = script.parent / "out"
    each = [flops(out / f"rank{rank}.flops.json").total("macs", "forward") for rank in (0, 1)]
    assert each == [3 * 3 * MACS, 3 * 4 * MACS]
    merged = flops(out / "flops.json")
    assert merged.total("macs", "forward") == sum(each)
    assert merged.remarks == ["Of rank0 and rank1 together."]
    stats = load(out / "stats.json")
    assert isinstance(stats, StatsResult)
    (output,) = (entry for entry in stats.measured if entry.tensor == "output 0")
    assert output.statistics.elements == 3 * (3 + 4) * 2


@pytest.mark.slow
def test_a_killed_rank_leaves_the_results_of_the_others(script: Path) -> None:
    stderr = run(
        script.parent,
        *TORCHRUN,
        *RUN,
        "-t",
        "flops",
        "-o",
        "out",
        "--",
        "train.py",
        "killed",
        "0",
        fails=True,
    )
    assert "amanda: rank1 left no results" in stderr
    out = script.parent / "out"
    assert not (out / "rank1.flops.json").exists()
    saved = flops(out / "rank0.flops.json")
    assert saved.total("macs", "forward") >= 3 * 3 * MACS
    merged = flops(out / "flops.json")
    assert merged.rows() == saved.rows()
    assert merged.remarks == ["Of rank0.", "There is no result of rank1."]
    assert merge([str(out), "-q", "--ranks", "2"]) == 0
    assert flops(out / "flops.json").remarks == merged.remarks


@pytest.mark.long
def test_a_killed_rank_leaves_what_was_saved_before(script: Path) -> None:
    tools = ["-t", "flops", "-t", "trace", "--every", "0.3", "-o", "out"]
    stderr = run(script.parent, *RUN, *tools, "--", *TORCHRUN, "train.py", "killed", "1.5", fails=True)
    assert "left no results" not in stderr
    out = script.parent / "out"
    killed = flops(out / "rank1.flops.json")
    assert killed.total("macs", "forward") == 3 * 4 * MACS
    (remark,) = killed.remarks
    assert remark.startswith("Saved at 2")
    assert remark.endswith("of a process that went on.")
    ended = flops(out / "rank0.flops.json")
    assert ended.remarks == []
    merged = flops(out / "flops.json")
    assert merged.total() == killed.total() + ended.total()
    assert merged.remarks == [f"rank1: {remark}", "Of rank0 and rank1 together."]
    assert json.loads((out / "rank1.trace.json").read_text())["ops"]


@pytest.mark.slow
def test_a_rank_that_waits_in_native_code_is_saved_when_it_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOCKED)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
    with children.started(
        [sys.executable, *RUN, "-t", "flops", "-o", "out", "train.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
        saved, end = tmp_path / "out" / "rank0.flops.json", time.monotonic() + 60
        while not saved.exists() and time.monotonic() < end:
            time.sleep(0.1)
        program.kill()
    assert flops(saved).total("calls", "forward") == 2
    assert "of a process that went on" in flops(saved).remarks[0]


LOST = """
import os, signal, sys, time
from amanda.tools.command._session import Saving

def handler(number, frame):
    sys.exit(3)

signal.signal(signal.SIGTERM, handler)
saving = Saving(lambda: None, None)
saving.start()
saving.watch_signals(handler)
os.write(saving._write_end, bytes([signal.SIGTERM]))  # as it arrives before a system call, which then waits
time.sleep(100)
"""


def test_a_signal_that_came_before_the_wait_ends_the_wait(tmp_path: Path) -> None:
    assert children.run([sys.executable, "-c", LOST], limit=60).returncode == 3
