"""Trials in this process and in workers: equal outcomes, processes that end, interrupts, and the file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import children
import pytest

import amanda
from amanda.errors import AmandaError, ArtefactError, FileError
from amanda.tools.trials import Outcome, PerProcess, TrialFile, run_trials
from amanda.tools.trials._run import _run_in_workers

joblib = pytest.importorskip("joblib")


def square() -> Callable[[int], int]:
    return lambda trial: trial * trial


def outcomes(load: Any, trials: Any, jobs: int | None = None) -> list[tuple[Any, Any, str]]:
    """Return trial, value and error of each trial, in order."""
    # Functions of a test are closures, which travel by value: a worker cannot import this module.
    return sorted((outcome.trial, outcome.value, outcome.error) for outcome in run_trials(load, trials, jobs))


def deaths(folder: Path) -> Callable[[], Callable[[int], int]]:
    """Return a function with trials that raise, end their process, or are killed at the first attempt."""

    def load() -> Callable[[int], int]:
        def measure(trial: int) -> int:
            killed = folder / "killed"
            if trial == 2:
                os._exit(3)
            if trial == 3:
                raise ValueError("three")
            if trial == 11 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
            return trial * trial

        return measure

    return load


def after_deaths(ended: str) -> list[tuple[int, int | None, str]]:
    """Return the outcomes of `deaths`; ended: the text for the trial that ends its process."""
    errors = {2: ended, 3: "ValueError: three"}
    return [(trial, None if trial in errors else trial * trial, errors.get(trial, "")) for trial in range(12)]


@pytest.mark.parametrize("jobs", [None, 1])
def test_trials_run_in_this_process_as_they_are_asked_for(jobs: int | None) -> None:
    loads, runs = [], []

    def load() -> Callable[[int], int]:
        loads.append(os.getpid())

        def measure(trial: int) -> int:
            runs.append(trial)
            if trial == 1:
                raise ZeroDivisionError("one")
            return trial * trial

        return measure

    iterator = iter(run_trials(load, [0, 1, 2], jobs))
    assert next(iterator).value == 0
    assert runs == [0]
    assert [(outcome.value, outcome.error) for outcome in iterator] == [
        (None, "ZeroDivisionError: one"), (4, ""),
    ]  # fmt: skip
    assert loads == [os.getpid()]
    assert list(run_trials(load, [], jobs)) == []


def test_jobs_that_are_no_number_of_processes() -> None:
    for jobs in (0, True, "2"):
        with pytest.raises(AmandaError, match="give a number of processes"):
            run_trials(lambda: abs, [1], jobs)  # type: ignore[arg-type]


def test_threads_are_refused_as_they_would_share_the_model() -> None:
    with joblib.parallel_config(backend="threading", n_jobs=2):
        with pytest.raises(AmandaError, match='backend="loky"'):
            run_trials(lambda: abs, [1], None)
        assert outcomes(lambda: abs, [-1], 1) == [(-1, 1, "")]


def test_what_cannot_be_pickled_is_named() -> None:
    def load() -> Callable[[int], int]:
        return lambda trial: trial + len(generator.gi_frame.f_code.co_name)

    generator = (number for number in range(3))
    with pytest.raises(AmandaError, match=r"cannot be sent to them.*generator.*makes the model"):
        list(run_trials(load, [1], 2))


def test_a_function_made_for_each_process_is_a_function() -> None:
    def accuracy() -> float:
        return 0.5

    assert PerProcess(lambda: accuracy)() == 0.5
    with pytest.raises(
        AmandaError, match=r"PerProcess: .*accuracy.* returned 0.5; give a function that makes"
    ):
        PerProcess(accuracy)()  # type: ignore[arg-type]


def test_a_scope_around_trials_in_other_processes_tells_that_it_does_not_reach_them() -> None:
    # The engine is of no matter: what is told is told before it starts.
    engine = SimpleNamespace(run=lambda worker, trials: iter(()), workers=2)
    with amanda.apply(amanda.Tool()) as scope:
        list(_run_in_workers(engine, lambda: abs, []))  # type: ignore[arg-type]
    assert [entry.what for entry in scope.report] == ["trials in other processes"]


@pytest.mark.slow
def test_outcomes_are_equal_for_any_number_of_processes() -> None:
    import torch

    weight = torch.rand(64, 64)

    def load() -> Callable[[int], tuple[float, int]]:
        def measure(seed: int) -> tuple[float, int]:
            generator = torch.Generator().manual_seed(seed)
            return float((torch.rand(64, 64, generator=generator) @ weight).sum()), torch.get_num_threads()

        return measure

    here = outcomes(load, range(12))
    assert here == outcomes(load, range(12), 2) == outcomes(load, range(12), 4)
    with joblib.parallel_config(n_jobs=2):
        assert outcomes(load, range(12)) == here


@pytest.mark.slow
def test_a_process_that_ends_loses_its_trial_alone(tmp_path: Path) -> None:
    assert outcomes(deaths(tmp_path), range(12), 2) == after_deaths("its process ended: EXIT(3)")


@pytest.mark.slow
def test_a_worker_killed_from_outside_loses_nothing() -> None:
    def load() -> Callable[[int], int]:
        def measure(trial: int) -> int:
            time.sleep(0.1)
            return os.getpid()

        return measure

    ended, killed = [], 0
    for outcome in run_trials(load, range(12), 2):
        ended.append(outcome)
        if not killed:
            killed = outcome.value or 0
            os.kill(killed, signal.SIGKILL)
    assert sorted(outcome.trial for outcome in ended) == list(range(12))
    assert not any(outcome.error for outcome in ended)


@pytest.mark.slow
def test_errors_of_amanda_and_of_load_reach_the_caller() -> None:
    def failing_load() -> Callable[[int], int]:
        raise LookupError("no model")

    def load() -> Callable[[int], Any]:
        def measure(trial: int) -> Any:
            if trial == 1:
                raise ArtefactError("wrong option")
            return (number for number in range(trial))

        return measure

    with pytest.raises(LookupError, match="no model"):
        list(run_trials(failing_load, [1, 2], 2))
    with pytest.raises(ArtefactError, match="wrong option"):
        list(run_trials(load, [1], 2))
    with pytest.raises(AmandaError, match=r"the processes of joblib failed.*pickle"):
        list(run_trials(load, [2], 2))


@pytest.mark.slow
def test_closing_early_stops_the_workers(tmp_path: Path) -> None:
    def load() -> Callable[[int], int]:
        def measure(trial: int) -> int:
            (tmp_path / str(trial)).touch()
            time.sleep(0.2)
            return trial

        return measure

    iterator: Any = run_trials(load, range(200), 2)
    next(iterator)
    iterator.close()
    count = len(list(tmp_path.iterdir()))
    time.sleep(1)
    assert len(list(tmp_path.iterdir())) <= count + 2 < 20


INTERRUPTED = """
import sys, time
from amanda.tools.trials import run_trials
def load():
    def measure(trial):
        time.sleep(0.2)
        return trial
    return measure
ended = []
try:
    for outcome in run_trials(load, range(1000), 2):
        ended.append(outcome.trial)
        print(outcome.trial, flush=True)
except KeyboardInterrupt:
    print("kept", len(ended), flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_in_the_terminal_keeps_what_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with children.started([sys.executable, tmp_path / "program.py"], **pipes) as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        # A terminal sends the signal to the workers too.
        os.killpg(process.pid, signal.SIGINT)
        begin = time.monotonic()
        stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert int(stdout.split("kept")[1]) >= 4
    assert "Traceback" not in stderr, stderr
    assert process.returncode == 0


@contextmanager
def dask() -> Iterator[None]:
    """Configure joblib to run on a cluster of Dask with two workers."""
    distributed, config = pytest.importorskip("distributed"), pytest.importorskip("dask.config")
    # By default a local cluster gives up a worker that takes longer to start again.
    with (
        config.set({"distributed.deploy.lost-worker-timeout": "120s"}),
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        yield


@contextmanager
def ray() -> Iterator[None]:
    """Configure joblib to run on Ray with two workers."""
    ray, registered = pytest.importorskip("ray"), pytest.importorskip("ray.util.joblib")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    registered.register_ray()
    try:
        with joblib.parallel_config(backend="ray", n_jobs=2):
            yield
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dask and Ray
@pytest.mark.parametrize("engine", [dask, ray])
def test_engines_of_others_give_the_same(engine: Any, tmp_path: Path) -> None:
    def load() -> Callable[[int], int]:
        raise ArtefactError("wrong")

    with engine():
        assert outcomes(deaths(tmp_path), range(12)) == after_deaths("its process ended")
        with pytest.raises(ArtefactError, match="wrong"):
            list(run_trials(load, [1, 2]))


def test_an_outcome_is_a_value() -> None:
    (outcome,) = run_trials(square, [3])
    assert (outcome.trial, outcome.value, outcome.error) == (3, 9, "")
    assert outcome.seconds >= 0
    assert Outcome(3, 9) == Outcome(3, 9, "", 0.0)


def test_a_file_has_the_records_of_trials(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with TrialFile(path, "sweep", {"levels": (1, 2)}) as file:
        file.add("a", {"metric": 0.5})
        file.add("b", {"metric": None})
        file.add("a", {"metric": 0.75})
    with TrialFile(path, "sweep", {"levels": [1, 2]}) as file:
        assert file.records == {"a": {"metric": 0.75}, "b": {"metric": None}}
    assert json.loads(path.read_text().split("\n")[0])["format"] == "amanda sweep"


def test_an_unfinished_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with TrialFile(path, "sweep", {}) as file:
        file.add("a", "ü")
    whole = path.read_bytes()
    path.write_bytes(whole + b'["b", 1')
    with TrialFile(path, "sweep", {}) as file:
        assert file.records == {"a": "ü"}
        file.add("b", 2)
    assert path.read_bytes() == whole + b'["b", 2]\n'
    # A run that ended while it wrote the first line.
    path.write_bytes(b'{"format": "am')
    with TrialFile(path, "sweep", {}) as file:
        file.add("a", 1)
    with TrialFile(path, "sweep", {}) as file:
        assert file.records == {"a": 1}


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    options = {"seed": 1, "type": "conv2d"}
    with TrialFile(path, "sweep", options), pytest.raises(ArtefactError, match="another process"):
        TrialFile(path, "sweep", options)
    with pytest.raises(ArtefactError, match="seed was 1 and is 2; give another file"):
        TrialFile(path, "sweep", {"seed": 2, "type": "conv2d"})
    with pytest.raises(ArtefactError, match="no file of amanda campaign trials"):
        TrialFile(path, "campaign", {"seed": 1})
    for text in ("not json\n", "[1]\n", '"text"\n'):
        path.write_text(text)
        with pytest.raises(ArtefactError, match="no file of"):
            TrialFile(path, "sweep", {})
    with pytest.raises(FileError):
        TrialFile(tmp_path / "missing" / "trials.jsonl", "sweep", {})
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ArtefactError, match="no file of trials"):
        TrialFile(path, "sweep", {})


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with TrialFile(path, "sweep", {}) as file:
        file.add("a", 1)
    path.write_text(path.read_text() + "5\n")
    with pytest.raises(ArtefactError, match="no file of trials"):
        TrialFile(path, "sweep", {})
