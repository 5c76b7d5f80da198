"""`amanda run TOOL:log=WRITER,every=N`: a program's steps are logged while it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import children
import pytest

from amanda.__main__ import COMMON_OPTIONS
from amanda.tools.command import SpecError, ToolSpec, make_tools
from amanda.tools.live import LiveTool
from amanda.tools.live._command import _WRITERS

TRAINING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.rand(80, 4), batch_size=4, num_workers=WORKERS)
for batch in data:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
"""


def amanda_run(folder: Path, program: str, *arguments: str) -> Any:
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "amanda", "run", *arguments, "train.py"]
    return children.run(command, cwd=folder, check=True)


def lines_of(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def made(spec: str) -> Any:
    (tooling,) = make_tools([ToolSpec.parse(spec)], alone=True)
    return tooling.tool


def test_a_tool_with_log_is_logged_and_every_is_that_of_the_log(tmp_path: Path) -> None:
    live = made(f"stats:bins=0,log=jsonl:{tmp_path}/stats.jsonl,every=7")
    assert isinstance(live, LiveTool)
    assert live._every == 7
    assert not isinstance(made("stats:every=7"), LiveTool)


def test_info_names_every_writer() -> None:
    assert [name for name in _WRITERS if name not in COMMON_OPTIONS["log"]] == []


@pytest.mark.parametrize(
    ("option", "has_histogram"), [("", False), (",bins=256", True), (",quantiles=0.5", True)]
)
def test_stats_that_are_logged_have_no_histogram_unless_one_is_asked_for(
    option: str, has_histogram: bool, tmp_path: Path
) -> None:
    live = made(f"stats:log=jsonl:{tmp_path}/stats.jsonl{option}")
    assert (live._tool._bins is not None) is has_histogram


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("flops:every=5", "option every: it is for log"),
        ("flops:log=tensorbord", "there is no writer 'tensorbord'; did you mean tensorboard?"),
        ("flops:log", "log names no writer; there are jsonl, mlflow, opentelemetry, tensorboard, wandb"),
        ("flops:log=jsonl,frequency=3", "option log: it has every, and no start, end or frequency"),
        ("inject:fault=bit_flip,log=jsonl", "InjectTool changes what the program computes"),
        ("flops:log=jsonl,every=0", "option every: expected an integer >= 1"),
    ],
)
def test_what_cannot_be_logged_is_told_before_the_program_starts(spec: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        made(spec)
    assert part in str(caught.value)


def test_without_labs_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amanda.tools.live", None)
    with pytest.raises(SpecError, match=r"pip install .*amanda-(core\[labs\]|labs)"):
        made("flops:log=jsonl")


@pytest.mark.slow
def test_steps_of_the_optimizer_are_logged_and_workers_log_nothing(tmp_path: Path) -> None:
    program = TRAINING.replace("WORKERS", "2")
    spec = (
        "stats:module=2,type=linear,bins=0,log=jsonl:stats.jsonl,every=5,flops:log=jsonl:flops.jsonl,every=10"
    )
    done = amanda_run(tmp_path, program, spec)
    lines = lines_of(tmp_path / "stats.jsonl")
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert "stats/2.linear/output 0 mean" in lines[0]
    assert [line["step"] for line in lines_of(tmp_path / "flops.jsonl")] == [10, 20]
    told = [line for line in done.stderr.splitlines() if "steps are logged" in line]
    assert told == [f"amanda: steps are logged to {tmp_path}/{name}.jsonl" for name in ("stats", "flops")]


@pytest.mark.slow
def test_executions_are_logged_where_nothing_trains(tmp_path: Path) -> None:
    program = """
import torch

model = torch.nn.Linear(4, 2)
with torch.no_grad():
    for size in range(1, 7):
        model(torch.rand(size, 4))
"""
    done = amanda_run(tmp_path, program, "flops:log=jsonl:flops.jsonl,every=2")
    assert "Of step 6 alone: 3 of 6 steps were logged to" in done.stderr
    lines = lines_of(tmp_path / "flops.jsonl")
    assert [(line["step"], line["flops/MACs"]) for line in lines] == [(2, 16), (4, 32), (6, 48)]


@pytest.mark.slow
def test_of_several_ranks_the_first_logs(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node", "2", "--standalone", "train.py"]
    (tmp_path / "train.py").write_text(TRAINING.replace("WORKERS", "0"))
    run = [sys.executable, "-m", "amanda", "run", "-t", "flops:log=jsonl:flops.jsonl,every=10", "--"]
    children.run(
        [*run, sys.executable, "-m", "torch.distributed.run", *command[1:]], cwd=tmp_path, check=True
    )
    assert [line["step"] for line in lines_of(tmp_path / "flops.jsonl")] == [10, 20]
