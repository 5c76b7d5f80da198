"""Controllers of architecture search that lean on other libraries: Optuna's studies, an LSTM in PyTorch."""

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

from amanda.tools.search import Evolution, LSTMPolicy, OptunaController, Search, SearchError, SearchTool

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


def study(path: Path, directions: Any = ("maximize", "minimize")) -> optuna.Study:
    return optuna.create_study(
        directions=directions, storage=f"sqlite:///{path}", study_name="bits", load_if_exists=True,
        sampler=optuna.samplers.NSGAIISampler(seed=0),
    )  # fmt: skip


def reward(tool: SearchTool) -> Callable[[], float]:
    return lambda: float(sum(label in ("gelu", "bits4") for label in tool.architecture.values()))


def test_a_storage_of_optuna_keeps_the_trials(tool: SearchTool, tmp_path: Path) -> None:
    made: dict[str, Any] = {"costs": ["size"], "progress": False}
    limits = {"size": 0.9 * tool.size()}
    first = Search(tool, reward(tool), OptunaController(study(tmp_path / "db")), limits=limits, **made)
    known = first.run(trials=12)
    again = Search(tool, reward(tool), OptunaController(study(tmp_path / "db")), limits=limits, **made)
    assert [one.architecture for one in again.result.trials] == [one.architecture for one in known.trials]
    found = again.run(trials=30)
    assert len({tuple(one.architecture.values()) for one in found.trials}) == len(found.trials) == 30
    assert all(one.costs["size"] <= limits["size"] for one in found.trials)
    best = {(one.values[0], one.values[1]) for one in study(tmp_path / "db").best_trials}
    assert best == {(one.metric, one.costs["size"]) for one in found.front}
    with pytest.raises(SearchError, match="the study has 30 trials; give a file, or a study with trials"):
        Search(tool, reward(tool), OptunaController(study(tmp_path / "db")), file=tmp_path / "file", **made)
    other = SearchTool("sigmoid=keep|relu")
    other.prepare(nn.Sigmoid(), torch.rand(2))
    with pytest.raises(SearchError, match=r"trial \d+ of 'bits' is over .* not over \{'/sigmoid'"):
        Search(other, reward(other), OptunaController(study(tmp_path / "db")), **made)


def test_an_evaluation_that_fails_is_a_failed_trial(tool: SearchTool) -> None:
    def evaluate() -> float:
        if "relu" in tool.architecture.values():
            raise ValueError("no relu")
        return 1.0

    kept = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = Search(tool, evaluate, OptunaController(kept), progress=False).run(trials=20)
    scored = [one.architecture for one in result.trials if one.metric is not None]
    complete = kept.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert [one.params for one in complete] == scored
    assert 0 < len(scored) < 20
    assert not kept.get_trials(states=[optuna.trial.TrialState.RUNNING])


def test_a_study_of_another_kind_is_an_error(
    tool: SearchTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SearchError, match=r"directions are \['maximize', 'minimize'\]; give \['maximize'\]"):
        Search(tool, lambda: 1, OptunaController(study(tmp_path / "db")))
    with pytest.raises(SearchError, match="study is 5; give a study or a sampler of Optuna"):
        OptunaController(5)  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="no study yet; give it to a Search"):
        OptunaController().ask(SPACE, np.random.default_rng(0))
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SearchError, match=r'needs Optuna: pip install "amanda-tools\[optuna\]"'):
        Search(tool, lambda: 1, "optuna")


def test_an_lstm_learns_decisions_that_depend_on_one_another() -> None:
    """Each candidate alone is neither good nor bad, which a softmax for each op could not learn."""
    controller = LSTMPolicy(rate=0.02, decay=1, entropy=0.0)
    controller.tell(SPACE, {"a": "x", "b": "x"}, [0.0])  # the baseline from now on
    for _ in range(150):
        for a in "xy":
            for b in "xy":
                controller.tell(SPACE, {"a": a, "b": b}, [1.0 if a == b else -1.0])
    drawn = [controller.ask(SPACE, np.random.default_rng(i)) for i in range(200)]
    assert np.mean([one["a"] == one["b"] for one in drawn]) > 0.85
    assert 0.2 < np.mean([one["a"] == "x" for one in drawn]) < 0.8


def test_an_lstm_leaves_the_numbers_of_the_model_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    controller = LSTMPolicy()
    controller.tell(SPACE, controller.ask(SPACE, np.random.default_rng(0)), [1.0])
    assert torch.equal(torch.rand(3), wanted)


def test_an_lstm_finds_more_than_chance(tool: SearchTool) -> None:
    means = {}
    for name, controller in {"random": "random", "lstm": LSTMPolicy(rate=0.05)}.items():
        search = Search(tool, reward(tool), controller, train=lambda: None, progress=False)  # type: ignore[arg-type]
        means[name] = float(np.mean([one.metric or 0 for one in search.run(trials=150).trials[-40:]]))
    assert means["lstm"] > means["random"] + 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hidden": 0}, "hidden is 0; give a whole number from 1"),
        ({"rate": "x"}, "rate is 'x'; give a number"),
        ({"decay": 2}, "decay is 2; give a number from 0 to 1"),
        ({"temperature": 0}, "temperature is 0; give a number above 0"),
        ({"seed": -1}, "seed is -1; give a whole number from 0 on"),
    ],
)
def test_wrong_options_of_an_lstm_are_errors(options: Any, told: str) -> None:
    with pytest.raises(SearchError, match=f"LSTMPolicy: {told}"):
        LSTMPolicy(**options)


def test_with_costs_the_oldest_that_another_dominates_dies() -> None:
    controller = Evolution(population=2, sample=2)
    for label, scores in (("a", (1.0, -1.0)), ("b", (0.0, -2.0)), ("c", (2.0, -3.0))):
        controller.tell({}, {"op": label}, scores)
    assert [one["op"] for one, _ in controller._alive] == ["a", "c"]
    alone = Evolution(population=2)
    for label, score in (("a", 1.0), ("b", 0.0), ("c", 2.0)):
        alone.tell({}, {"op": label}, (score,))
    assert [one["op"] for one, _ in alone._alive] == ["b", "c"]
