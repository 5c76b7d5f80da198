"""Campaigns in several processes: equal outcomes, processes that end, files, interrupts, intervals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.errors import ArtefactError
from amanda.tools.inject import Campaign, CampaignResult, InjectError, InjectTool, top1_changed, wilson
from amanda.tools.trials import PerProcess

# Programs are closures, which travel by value: a worker cannot import this module.


def classifier() -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.rand(8, 16)

    def program() -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    return program


def quiet(tool: InjectTool | None = None, **options: Any) -> Campaign:
    return Campaign(tool or InjectTool(seed=3), progress=False, compare=top1_changed, **options)


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["ops", "elements", "all"])
def test_outcomes_are_equal_for_any_number_of_processes(sample: Any) -> None:
    program = classifier()
    # Ids of ops count the models that a process has seen: this one the workers have not.
    with amanda.apply(InjectTool(bits=[0])):
        nn.Linear(3, 3)(torch.rand(2, 3))
    options: dict[str, Any] = {"probability": 0.02, "fault": "gaussian"} if sample == "all" else {}
    campaign = quiet(InjectTool(seed=3, **options), trials=20, sample=sample)
    result = campaign.run(program)
    assert len(result.rows()) > 1
    for jobs in (2, 4):
        assert campaign.run(program, jobs=jobs).to_dict() == result.to_dict()


@pytest.mark.slow
def test_a_fault_that_ends_the_process_is_a_crash() -> None:
    x = torch.zeros(4)

    def program() -> Tensor:
        y = x.neg() * 1
        if y.abs().max() > 1:
            os._exit(3)
        return y

    # In float32 a zero whose bit 30 flips is 2; of bit 31 it is -0.  Which of them flips depends on the op's
    # id, and so on the folder of this file: in one folder of 500 all trials are alike.
    result = quiet(InjectTool(type="neg", bits=[30, 31], seed=1), trials=10).run(program, jobs=2)
    crashes = [trial for trial in result.trials if trial.outcome == "crash"]
    assert 0 < len(crashes) < 10
    assert {trial.error for trial in crashes} == {"its process ended: EXIT(3)"}
    assert result.count("masked") + len(crashes) == 10
    assert [row[:2] for row in result.by("type").rows()] == [("neg", 10)]
    assert result.due_rate == wilson(len(crashes), 10)
    json.dumps(result.to_dict())


@pytest.mark.slow
def test_a_program_may_be_made_in_each_process() -> None:
    def make() -> Callable[[], Tensor]:
        program, unpicklable = classifier(), (number for number in range(3))
        return lambda: program() * bool(unpicklable)

    with pytest.raises(amanda.AmandaError, match="cannot be sent"):
        quiet(trials=4).run(make(), jobs=2)
    campaign, program = quiet(trials=20), PerProcess(make)
    assert campaign.run(program, jobs=2).to_dict() == campaign.run(program).to_dict()


@pytest.mark.slow
def test_a_program_that_differs_in_another_process_is_refused() -> None:
    pid, x = os.getpid(), torch.ones(4)

    def other_output() -> Tensor:
        return x * (1.0 if os.getpid() == pid else 2.0)

    def other_ops() -> Tensor:
        return x * 1.0 if os.getpid() == pid else x.neg()

    campaign = Campaign(InjectTool(), trials=4, progress=False)
    with pytest.raises(InjectError, match="in another process the output"):
        campaign.run(other_output, jobs=2)
    with pytest.raises(InjectError, match=r"other ops: neg of no module .* instead of mul of no module"):
        campaign.run(other_ops, jobs=2)


def test_a_campaign_goes_on_from_its_file(tmp_path: Path) -> None:
    program, path, runs = classifier(), tmp_path / "campaign.jsonl", []

    def counted() -> Tensor:
        runs.append(None)
        if len(runs) == 10:
            raise KeyboardInterrupt
        return program()

    whole = quiet(trials=15).run(program)
    campaign = quiet(trials=15)
    with pytest.raises(KeyboardInterrupt):
        campaign.run(counted, resume=path)
    assert campaign.result.to_dict()["trials"] == whole.to_dict()["trials"][:7]
    resumed = quiet(trials=15).run(counted, resume=path)
    assert resumed.to_dict() == whole.to_dict()
    assert len(runs) == 10 + 2 + 8
    # More trials of the same campaign.
    assert quiet(trials=17).run(program, resume=path).trials[:15] == resumed.trials
    with pytest.raises(ArtefactError, match="seed was 3 and is 4"):
        quiet(InjectTool(seed=4), trials=15).run(program, resume=path)
    with pytest.raises(ArtefactError, match=r"sites was .* output was "):
        quiet(trials=15).run(lambda: program().relu(), resume=path)


def test_a_file_keeps_numbers_that_json_lacks(tmp_path: Path) -> None:
    for dtype, value in ((torch.float32, float("nan")), (torch.complex64, float("inf")), (torch.bool, 1.0)):
        x, path = torch.zeros(4, dtype=dtype), tmp_path / f"{dtype}.jsonl"
        campaign = Campaign(InjectTool(fault="value", value=value), trials=3, progress=False)
        first = campaign.run(x.clone, resume=path)
        again = campaign.run(x.clone, resume=path)
        assert repr(again.trials) == repr(first.trials)


def test_a_campaign_ends_when_the_interval_is_narrow(tmp_path: Path) -> None:
    program = classifier()
    result = quiet(trials=400, margin=0.08).run(program)
    assert 20 < len(result.trials) < 400
    rate = result.sdc_rate
    assert rate.high - rate.low <= 0.16
    before = CampaignResult(result.trials[:-1], 3, 1).sdc_rate
    assert before.high - before.low > 0.16
    # Trials beyond the end do not count, also where a file has them.
    path = tmp_path / "campaign.jsonl"
    quiet(trials=len(result.trials) + 5).run(program, resume=path)
    assert quiet(trials=400, margin=0.08).run(program, resume=path).to_dict() == result.to_dict()


def test_a_margin_that_any_interval_has_is_refused() -> None:
    with pytest.raises(InjectError, match=r"margin is 1; give a number above 0.* below 0.5"):
        Campaign(InjectTool(), margin=1)


@pytest.mark.slow
def test_a_narrow_interval_ends_workers_at_the_same_trial() -> None:
    program = classifier()
    results = [quiet(trials=400, margin=0.1).run(program, jobs=jobs).to_dict() for jobs in (1, 2)]
    assert results[0] == results[1]


def test_a_function_names_outcomes_of_its_own() -> None:
    x = torch.ones(8)

    def severity(golden: Any, output: Any) -> bool | str:
        error = abs(output - golden).max()
        return "masked" if error == 0 else "small" if error < 1 else True

    campaign = Campaign(InjectTool(type="clone", seed=1), 60, severity, progress=False)
    result = campaign.run(lambda: x.clone())
    assert result.count("small") > 0 < result.count("sdc")
    assert result.sdc_rate == result.rate("sdc", "small")
    table = result.to_pandas()
    assert list(table["small"]) == [result.count("small")]
    assert table["SDC rate"][0] == result.sdc_rate.value
    with pytest.raises(InjectError, match="returned 'crash'"):
        Campaign(InjectTool(), 3, lambda golden, output: bool((golden != output).any()) and "crash").run(
            x.clone
        )


def test_an_exception_of_the_comparison_is_no_crash() -> None:
    x = torch.ones(3)

    def compare(golden: Any, output: Any) -> bool:
        return bool((golden != output).any() and 1 / 0)

    with pytest.raises(InjectError, match=r"compare, .*compare.*, raised at trial 0: ZeroDivisionError"):
        Campaign(InjectTool(), 3, compare, progress=False).run(x.clone)


INTERRUPTED = """
import time, torch
from amanda.tools.inject import Campaign, InjectTool
x = torch.ones(4)
def program():
    time.sleep(0.1)
    return x.neg()
campaign = Campaign(InjectTool(), trials=1000)
try:
    campaign.run(program, jobs=2, resume="trials.jsonl")
except KeyboardInterrupt:
    print(len(campaign.result.trials))
"""


@pytest.mark.slow
def test_an_interrupt_keeps_the_trials_of_workers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with children.started([sys.executable, "program.py"], cwd=tmp_path, **pipes) as process:
        assert process.stderr is not None
        progress = process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert progress.startswith("50/1000 trials: SDC rate "), progress
    assert "Traceback" not in stderr, stderr
    assert int(stdout) >= 50
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 1 + int(stdout)
