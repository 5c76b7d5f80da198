"""Studies of Optuna keep the trials of a search and propose architectures; evolution with costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

from amanda.tools.search import Evolution, OptunaController, Search, SearchError, SearchTool

LABELS = ("keep", "relu", "gelu", "silu")
SPACE = {"a": ("x", "y"), "b": ("x", "y")}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(level)


@pytest.fixture
def tool() -> SearchTool:
    tool = SearchTool(["linear=keep|bits8|bits4|bits2", f"sigmoid={'|'.join(LABELS)}"])
    tool.prepare(
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid()), torch.rand(2, 4)
    )
    return tool


def study(storage: optuna.storages.BaseStorage) -> optuna.Study:
    return optuna.create_study(
        directions=["maximize", "minimize"], storage=storage, study_name="bits", load_if_exists=True,
        sampler=optuna.samplers.NSGAIISampler(seed=0),
    )  # fmt: skip


def reward(tool: SearchTool) -> Callable[[], float]:
    return lambda: float(sum(label in ("gelu", "bits4") for label in tool.architecture.values()))


def test_a_storage_of_optuna_keeps_the_trials(tool: SearchTool) -> None:
    storage = optuna.storages.InMemoryStorage()
    options: dict[str, Any] = {"costs": ["size"], "progress": False}
    limits = {"size": 0.9 * tool.size()}
    first = Search(tool, reward(tool), OptunaController(study(storage)), limits=limits, **options)
    first_result = first.run(trials=12)
    again = Search(tool, reward(tool), OptunaController(study(storage)), limits=limits, **options)
    assert [trial.architecture for trial in again.result.trials] == [
        trial.architecture for trial in first_result.trials
    ]
    result = again.run(trials=30)
    assert len({tuple(trial.architecture.values()) for trial in result.trials}) == len(result.trials) == 30
    assert all(trial.costs["size"] <= limits["size"] for trial in result.trials)
    best = {(trial.values[0], trial.values[1]) for trial in study(storage).best_trials}
    assert best == {(trial.metric, trial.costs["size"]) for trial in result.front}
    with pytest.raises(SearchError, match=r"study is .*, and the controller has another; give one of them"):
        Search(tool, reward(tool), OptunaController(study(storage)), study="sqlite://", **options)
    other_tool = SearchTool("sigmoid=keep|relu")
    other_tool.prepare(nn.Sigmoid(), torch.rand(2))
    with pytest.raises(SearchError, match=r"trial \d+ of 'bits' is over .* not over \{'/sigmoid'"):
        Search(other_tool, reward(other_tool), OptunaController(study(storage)), **options)


@pytest.mark.parametrize("name", ["random", "evolution", "policy", "optuna"])
def test_a_search_goes_on_from_a_study_as_it_would_have_gone_on(name: Any, tool: SearchTool) -> None:
    def evaluate() -> float:
        if interrupted[-1] == 0:
            raise KeyboardInterrupt
        interrupted[-1] -= 1
        if tool.architecture["1/sigmoid"] == "silu":
            raise ValueError("no silu")
        return reward(tool)()

    options: dict[str, Any] = {"costs": ["size"], "progress": False, "seed": 4}
    interrupted = [-1]
    whole = Search(tool, evaluate, name, **options).run(trials=24).trials
    study, interrupted = optuna.storages.InMemoryStorage(), [14]
    with pytest.raises(KeyboardInterrupt):
        Search(tool, evaluate, name, study=study, **options).run(trials=24)
    again = Search(tool, evaluate, name, study=study, **options)
    assert len(again.result.trials) == 14
    interrupted = [-1]
    continued = again.run(trials=24).trials
    for trials in (continued, Search(tool, evaluate, name, study=study, **options).result.trials):
        assert [(trial.architecture, trial.metric, trial.error) for trial in trials] == [
            (trial.architecture, trial.metric, trial.error) for trial in whole
        ]
    assert any(trial.error == "ValueError: no silu" for trial in whole)
    states = {trial.state.name for trial in optuna.load_study(study_name="search", storage=study).trials}
    assert states == {"COMPLETE", "FAIL"}


def test_searches_that_share_a_study_have_the_trials_of_all(tool: SearchTool, tmp_path: Path) -> None:
    study = f"sqlite:///{tmp_path / 'trials.db'}"
    searches = [
        Search(tool, reward(tool), name, study=study, seed=seed, progress=False)
        for seed, name in enumerate(("random", "optuna"))
    ]  # type: ignore[call-overload]
    for trials in range(1, 9):
        searches[trials % 2].run(trials=trials)
    architectures = [trial.architecture for trial in searches[0].result.trials]
    assert len(architectures) == len({str(architecture) for architecture in architectures}) == 8
    assert [trial.architecture for trial in searches[1].result.trials] == architectures[:7]


def test_a_trial_that_a_storage_did_not_take_is_in_the_result_and_written_later(
    tool: SearchTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = optuna.storages.InMemoryStorage()
    search = Search(tool, reward(tool), "random", study=storage, progress=False)
    with monkeypatch.context() as broken:
        broken.setattr(
            storage, "create_new_trial", lambda *arguments, **options: _raise(OSError("disk full"))
        )
        with pytest.raises(OSError, match="disk full"):
            search.run(trials=2)
    assert len(search.result.trials) == 1
    assert len(search.run(trials=3).trials) == 3
    (study,) = optuna.get_all_study_summaries(storage)
    assert study.n_trials == 3


def _raise(error: Exception) -> None:
    raise error


def test_an_evaluation_that_fails_is_a_failed_trial(tool: SearchTool) -> None:
    def evaluate() -> float:
        if "relu" in tool.architecture.values():
            raise ValueError("no relu")
        return 1.0

    optuna_study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = Search(tool, evaluate, OptunaController(optuna_study), progress=False).run(trials=20)
    scored = [trial.architecture for trial in result.trials if trial.metric is not None]
    complete = optuna_study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert [trial.params for trial in complete] == scored
    assert 0 < len(scored) < 20
    assert not optuna_study.get_trials(states=[optuna.trial.TrialState.RUNNING])


def test_a_study_of_another_kind_is_an_error(tool: SearchTool, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(SearchError, match=r"directions are \['maximize', 'minimize'\]; give \['maximize'\]"):
        Search(tool, lambda: 1, OptunaController(study(storage)))
    with pytest.raises(SearchError, match="study is 5; give a study or a sampler of Optuna"):
        OptunaController(5)  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="no study yet; give it to a Search"):
        OptunaController().ask(SPACE, np.random.default_rng(0))
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SearchError, match=r'needs Optuna: pip install "amanda-labs\[optuna\]"'):
        Search(tool, lambda: 1, "optuna")


def test_with_costs_the_oldest_that_another_dominates_dies() -> None:
    controller = Evolution(population=2, sample=2)
    for label, scores in (("a", (1.0, -1.0)), ("b", (0.0, -2.0)), ("c", (2.0, -3.0))):
        controller.tell({}, {"op": label}, scores)
    assert [architecture["op"] for architecture, _ in controller._alive] == ["a", "c"]
    alone = Evolution(population=2)
    for label, score in (("a", 1.0), ("b", 0.0), ("c", 2.0)):
        alone.tell({}, {"op": label}, (score,))
    assert [architecture["op"] for architecture, _ in alone._alive] == ["b", "c"]
