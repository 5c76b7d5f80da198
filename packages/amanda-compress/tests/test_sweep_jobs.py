"""Sweeps in several processes, and sweeps that a file lets go on."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda.errors import AmandaError, ArtefactError
from amanda.tools.sweep import BitsSweep, SparsitySweep, Sweep, SweepError, command

LEVELS = [0.5, 0.9]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def workers() -> Iterator[None]:
    """End the processes of a test."""
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)


@pytest.fixture
def evaluate() -> Callable[[], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.rand(16, 8)

    def run() -> float:
        with torch.no_grad():
            return -float(model(x).abs().sum())

    return run


def numbers(result: Any) -> list[tuple[str, float, float | None, str]]:
    return [(point.site.name, point.level, point.metric, point.error) for point in result.points]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_any_number_of_processes_gives_the_same_numbers(evaluate: Callable[[], float]) -> None:
    alone = SparsitySweep(evaluate, LEVELS, progress=False).search([0.6, 0.3]).trials
    for jobs in (2, 4):
        trials = SparsitySweep(evaluate, LEVELS, progress=False).search([0.6, 0.3], jobs=jobs).trials
        assert [(trial.architecture, trial.metric, trial.costs) for trial in trials] == [
            (trial.architecture, trial.metric, trial.costs) for trial in alone
        ]
    bits: Any = {"bits": [8, 2], "calibrate": evaluate, "progress": False}
    with joblib.parallel_config("loky", n_jobs=2):
        assert numbers(BitsSweep(evaluate, **bits).run()) == numbers(BitsSweep(evaluate, **bits).run(jobs=1))


@pytest.mark.slow
def test_a_cluster_of_dask_gives_the_same_numbers(evaluate: Callable[[], float]) -> None:
    distributed = pytest.importorskip("distributed")
    alone = SparsitySweep(evaluate, LEVELS, progress=False).run()
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, distributed.Client(cluster), joblib.parallel_config("dask"):
        result = SparsitySweep(evaluate, LEVELS, progress=False).run()
    assert numbers(result) == numbers(alone)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_point_whose_process_ends_is_listed(
    evaluate: Callable[[], float], caplog: pytest.LogCaptureFixture
) -> None:
    alone = SparsitySweep(evaluate, LEVELS, progress=False).run()
    parent, worst = os.getpid(), alone.points[4].metric

    def end() -> float:
        metric = evaluate()
        if metric == worst and os.getpid() != parent:
            os._exit(1)
        return metric

    sweep = SparsitySweep(end, LEVELS, progress=False)
    result = sweep.run(jobs=2)
    assert [bool(point.error) for point in result.points] == [number == 4 for number in range(8)]
    assert "its process ended" in result.points[4].error
    assert "no metric of 2/linear, sparsity 0.5: its process ended" in caplog.text
    assert result.complete
    assert numbers(sweep.run(retries=1, jobs=1)) == numbers(alone)


@pytest.mark.slow
def test_command_runs_the_file_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "def run():\n"
        "    return model(torch.ones(1, 4)).sum().item()\n"
    )
    rows = []
    for jobs in ("1", "2"):
        saved = tmp_path / f"{jobs}.json"
        arguments = ["--levels", "0.5", "-q", "--jobs", jobs, "--resume", str(tmp_path / f"{jobs}.jsonl")]
        spec = f"{tmp_path / 'evaluate.py'}:run"
        assert command(["sparsity", spec, *arguments, "--save", str(saved)]) == 0
        rows.append(json.loads(saved.read_text())["rows"])
    assert rows[0] == rows[1]
    assert len((tmp_path / "2.jsonl").read_text().splitlines()) == 5


class ScaleLong(amanda.Tool):
    """Multiplies what activations of five numbers give."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)
        self.factor = factor

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] == "relu" and context["shape"](context.get_inputs()[0]) == (5,):
            context.insert_after_op(lambda y: y * self.factor)


def copied(sweep: Any) -> Any:
    """Return what a worker measures with."""
    return cloudpickle.loads(cloudpickle.dumps(sweep._program.load))()


def test_a_worker_finds_ops_that_only_their_order_tells_apart() -> None:
    def evaluate() -> float:
        return float(F.relu(torch.ones(4)).sum() + F.relu(torch.ones(5)).sum() + F.relu(torch.ones(5)).sum())

    sweep = Sweep(evaluate, ScaleLong, [2.0], progress=False)
    result = sweep.run()
    assert numbers(result) == [("", 2.0, 24.0, ""), ("/relu.1", 2.0, 19.0, ""), ("/relu.2", 2.0, 19.0, "")]
    assert copied(sweep)({"/relu.2": "2"}).metric == 19
    with pytest.raises(RuntimeError, match=r"the evaluation did not run /relu.3"):
        copied(sweep)({"/relu.3": "2"})


def test_a_worker_logs_no_warning_again(
    evaluate: Callable[[], float], caplog: pytest.LogCaptureFixture
) -> None:
    sweep = SparsitySweep(evaluate, LEVELS, exclude="head*", progress=False)
    result = sweep.run()
    assert caplog.text.count("no op was excluded") == 1
    assert copied(sweep)({"0/linear": "0.9"}).metric == result.points[3].metric
    assert caplog.text.count("no op was excluded") == 1


def test_a_worker_with_another_model_is_an_error(evaluate: Callable[[], float]) -> None:
    parent: list[int] = []

    def differ() -> float:
        return evaluate() + (0 if parent else 1)

    sweep = SparsitySweep(differ, LEVELS, progress=False)
    sweep.run()
    payload = cloudpickle.dumps(sweep._program.load)
    cloudpickle.loads(payload)()
    parent.append(os.getpid())
    with pytest.raises(SweepError, match=r"metric without a tool is -.* in a worker, and -.* in the process"):
        cloudpickle.loads(cloudpickle.dumps(sweep._program.load))()


def test_what_cannot_run_in_processes_is_said_at_once(evaluate: Callable[[], float]) -> None:
    calls: list[int] = []

    def count() -> float:
        calls.append(1)
        return evaluate()

    for jobs in (0, "two", True):
        with pytest.raises(AmandaError, match="jobs is"):
            SparsitySweep(count, LEVELS, progress=False).run(jobs=jobs)  # type: ignore[arg-type]
    with joblib.parallel_config("threading", n_jobs=2), pytest.raises(AmandaError, match="for threads"):
        SparsitySweep(count, LEVELS, progress=False).run()
    with pytest.raises(SweepError, match="resume is"):
        SparsitySweep(count, LEVELS, progress=False).run(resume="no folder/sweep.jsonl")
    assert not calls


def test_a_file_lets_another_process_go_on(evaluate: Callable[[], float], tmp_path: Path) -> None:
    calls = itertools.count(1)

    def interrupted() -> float:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return evaluate()

    file = tmp_path / "sweep.jsonl"
    with pytest.raises(KeyboardInterrupt):
        SparsitySweep(interrupted, LEVELS, progress=False).run(resume=file)
    result = SparsitySweep(interrupted, LEVELS, progress=False).run(resume=file)
    assert numbers(result) == numbers(SparsitySweep(evaluate, LEVELS, progress=False).run())
    # Without a tool, with all ops at two levels, two points and the interrupt; then the other four points.
    assert next(calls) == 1 + (1 + 2 + 2 + 1) + (1 + 2 + 4)
    more = SparsitySweep(evaluate, [0.3, *LEVELS], progress=False).run(resume=file)
    assert more.complete
    assert len(file.read_text().splitlines()) == 1 + 1 + 3 * 4


def test_choices_within_budgets_and_failures_are_in_the_file(
    evaluate: Callable[[], float], tmp_path: Path
) -> None:
    file, failing = tmp_path / "sweep.jsonl", [4, 10]
    calls = itertools.count(1)

    def fail() -> float:
        if next(calls) in failing:
            raise RuntimeError("busy")
        return evaluate()

    first = SparsitySweep(fail, LEVELS, progress=False).search([0.6], resume=file)
    assert first.trials[1].error == "RuntimeError: busy"
    again = SparsitySweep(evaluate, LEVELS, progress=False)
    assert again.search([0.6], resume=file).trials[1].error == "RuntimeError: busy"
    assert sum(bool(point.error) for point in again.result.points) == 1
    assert again.search([0.6], retries=1, resume=file).trials[1].error == ""
    assert not any(point.error for point in again.result.points)
    lasting = SparsitySweep(evaluate, LEVELS, progress=False).run(resume=file)
    assert numbers(lasting) == numbers(SparsitySweep(evaluate, LEVELS, progress=False).run())


def test_a_file_of_another_sweep_is_an_error(evaluate: Callable[[], float], tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    SparsitySweep(evaluate, LEVELS, progress=False).run(resume=file)
    before = file.read_text()
    with pytest.raises(ArtefactError, match="another model, other data or other options"):
        SparsitySweep(lambda: evaluate() - 1, LEVELS, progress=False).run(resume=file)
    # The numbers at all ops may be equal by chance, so the options are compared themselves.
    with pytest.raises(ArtefactError, match="exclude was None and is '0'"):
        SparsitySweep(evaluate, LEVELS, exclude="0", progress=False).run(resume=file)
    in_memory = SparsitySweep(lambda: evaluate() - 1, LEVELS, progress=False)
    in_memory.run()
    with pytest.raises(ArtefactError, match="another model, other data or other options"):
        in_memory.run(resume=file)
    with pytest.raises(ArtefactError, match="metric was 'metric' and is 'loss'"):
        SparsitySweep(evaluate, LEVELS, metric="loss", progress=False).run(resume=file)
    with pytest.raises(ArtefactError, match="sweep was 'SparsitySweep' and is 'BitsSweep'"):
        BitsSweep(evaluate, progress=False).run(resume=file)
    assert file.read_text() == before
    calibrated = tmp_path / "calibrated.jsonl"
    BitsSweep(evaluate, [8], calibrate=evaluate, type=["linear"], progress=False).run(resume=calibrated)
    BitsSweep(evaluate, [8], calibrate=evaluate, type=("linear",), progress=False).run(resume=calibrated)
    with pytest.raises(ArtefactError, match=r"activations was True and is False; calibrate was .*; type was"):
        BitsSweep(evaluate, [8], activations=False, progress=False).run(resume=calibrated)
    for line in ('["{}", {"loss": 1}]', '["{}", 5]', '["[", {}]', '["5", {}]'):
        file.write_text(before.splitlines()[0] + "\n" + line + "\n")
        with pytest.raises(ArtefactError, match="is no file of a sweep"):
            SparsitySweep(evaluate, LEVELS, progress=False).run(resume=file)
