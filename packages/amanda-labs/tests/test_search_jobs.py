"""Searches in several processes, and batches of architectures."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import joblib
import optuna
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.errors import ToolError
from amanda.tools.search import Search, SearchError, SearchTool

CONTROLLERS = ("random", "evolution", "policy", "optuna")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level, threads = optuna.logging.get_verbosity(), torch.get_num_threads()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    yield
    optuna.logging.set_verbosity(level)
    torch.set_num_threads(threads)


@pytest.fixture
def workers() -> Iterator[None]:
    """End the processes of a test."""
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(8, 2, 6, 6)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Sigmoid(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 3),
    )  # fmt: skip


@pytest.fixture
def tool(model: nn.Module, images: Tensor) -> SearchTool:
    tool = SearchTool(["conv2d=keep|conv1|conv5", "sigmoid=keep|relu|gelu", "linear=keep|bits4|bits2"])
    tool.prepare(model, images)
    with torch.no_grad():
        for weight in tool.weights():
            weight.mul_(1.5)  # as if trained
    return tool


@pytest.fixture
def evaluate(model: nn.Module, images: Tensor) -> Callable[[], float]:
    def run() -> float:
        with torch.no_grad():
            return -float(model(images).abs().mean())

    return run


def facts(trials: Any) -> list[Any]:
    return [(trial.architecture, trial.metric, dict(trial.costs), trial.error) for trial in trials]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", CONTROLLERS)
def test_any_number_of_processes_gives_the_same_trials(
    name: Any, tool: SearchTool, evaluate: Callable[[], float]
) -> None:
    options: dict[str, Any] = {"costs": ["flops", "size"], "batch": 4, "seed": 3, "progress": False}
    alone = Search(tool, evaluate, name, **options).run(trials=10)
    for jobs in (2, 4) if name == "evolution" else (2,):
        study = optuna.storages.InMemoryStorage()
        result = Search(tool, evaluate, name, study=study, **options).run(trials=10, jobs=jobs)
        assert facts(result.trials) == facts(alone.trials)
        assert tool.architecture == result.best.architecture == alone.best.architecture  # type: ignore[union-attr]
        states = {trial.state.name for trial in optuna.load_study(study_name="search", storage=study).trials}
        assert states <= {"COMPLETE", "FAIL"}


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_finalized_models_train_in_processes(model: nn.Module, images: Tensor, tool: SearchTool) -> None:
    labels = torch.arange(8) % 3

    def train() -> float:
        torch.manual_seed(0)
        with amanda.disabled():
            student = tool.finalize(model)
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = F.cross_entropy(student(images), labels)
                loss.backward()
                optimizer.step()
        return -float(loss.detach())

    alone = Search(tool, train, "random", batch=4, progress=False).run(trials=6)
    with joblib.parallel_config("loky", n_jobs=2):
        together = Search(tool, train, "random", batch=4, progress=False).run(trials=6)
    assert facts(together.trials) == facts(alone.trials)
    assert not any(trial.error for trial in alone.trials)
    assert len({trial.metric for trial in alone.trials}) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_trial_whose_process_ends_is_listed(tool: SearchTool, evaluate: Callable[[], float]) -> None:
    alone = Search(tool, evaluate, "random", batch=3, progress=False).run(trials=6)
    worst = alone.trials[4].metric

    def end() -> float:
        metric = evaluate()
        if metric == worst:
            os._exit(1)
        return metric

    search = Search(tool, end, "random", costs=["size"], batch=3, progress=False)
    trials = search.run(trials=6, jobs=2).trials
    assert [trial.architecture for trial in trials] == [trial.architecture for trial in alone.trials]
    assert [bool(trial.error) for trial in trials] == [number == 4 for number in range(6)]
    assert "its process ended" in trials[4].error


@pytest.mark.slow
def test_a_cluster_of_dask_gives_the_same_trials(tool: SearchTool, evaluate: Callable[[], float]) -> None:
    distributed = pytest.importorskip("distributed")
    options: dict[str, Any] = {"costs": ["flops"], "batch": 4, "progress": False}
    alone = Search(tool, evaluate, "evolution", **options).run(trials=8)
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, distributed.Client(cluster), joblib.parallel_config("dask"):
        together = Search(tool, evaluate, "evolution", **options).run(trials=8)
    assert facts(together.trials) == facts(alone.trials)


@pytest.mark.parametrize("copied", [pickle, cloudpickle])
def test_a_copy_of_a_prepared_tool_computes_the_same(
    copied: Any, model: nn.Module, images: Tensor, tool: SearchTool
) -> None:
    tool.architecture = {"0/conv2d": "conv5", "1/sigmoid": "gelu", "5/linear": "bits2"}
    other, other_model = copied.loads(copied.dumps((tool, model)))
    assert other.space == tool.space
    assert other.architecture == tool.architecture
    assert (other.flops(), other.size()) == (tool.flops(), tool.size())
    with amanda.apply(tool):
        expected = model(images)
    with amanda.apply(other):
        assert torch.equal(other_model(images), expected)
    assert torch.equal(other.finalize(other_model)(images), expected)
    assert [one.requires_grad for one in other.weights()] == [one.requires_grad for one in tool.weights()]


def test_a_copy_logs_no_warning_again(
    model: nn.Module, images: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    tool = SearchTool(["sigmoid=keep|relu", "tanh=keep|relu"])
    tool.prepare(model, images)
    assert caplog.text.count("no op was selected by type=tanh") == 1
    copy = pickle.loads(pickle.dumps(tool))
    assert any("type=tanh" in text for text in copy.unmatched())
    assert caplog.text.count("no op was selected by type=tanh") == 1


def test_a_tool_that_cannot_be_prepared_again_is_not_copied(model: nn.Module, images: Tensor) -> None:
    restricted = SearchTool("sigmoid=keep|relu")
    restricted.restrict(lambda context: context["type"] == "sigmoid")
    restricted.prepare(model, images)
    only_used = SearchTool("sigmoid=keep|relu")
    with amanda.apply(only_used):
        model(images)
    by_method = SearchTool("sigmoid=keep|relu")
    by_method.prepare(model.forward, images)
    for tool in (restricted, only_used, by_method):
        with pytest.raises(ToolError, match="cannot be pickled or copied"):
            pickle.dumps(tool)
    pickle.loads(pickle.dumps(SearchTool("sigmoid=keep|relu"))).prepare(model, images)


def test_a_worker_in_which_other_ops_have_choices_is_an_error(
    model: nn.Module, images: Tensor, tool: SearchTool
) -> None:
    models: list[nn.Module] = []

    def evaluate() -> float:
        if not models:
            models.append(nn.Sequential(nn.Linear(36, 2), nn.Sigmoid()))
        with torch.no_grad():
            return float(model(images).sum() + models[0](images.flatten(2)).sum())

    search = Search(tool, evaluate, "random", batch=2, progress=False)
    measure = cloudpickle.loads(cloudpickle.dumps(search._program.load))()
    with pytest.raises(SearchError, match=r"in a worker the tool has the choices .*'1/sigmoid.1'"):
        measure(tool.architecture)


def test_a_function_of_an_imported_module_runs_another_model_in_a_worker(
    images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_classifier.py").write_text("""
import torch
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3))
def evaluate():
    with torch.no_grad():
        return model(torch.ones(8, 72)).sum()
""")
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("my_classifier")
    tool = SearchTool(["linear=keep|width0.5"])
    tool.prepare(module.model, images)
    search = Search(tool, module.evaluate, "random", batch=2, progress=False)
    # By reference: what is loaded finds the module's model, and the tool a copy of it.
    measure = cloudpickle.loads(cloudpickle.dumps(search._program.load))()
    with pytest.raises(SearchError, match="An imported module makes a model of its own"):
        measure({"1/linear": "width0.5"})


def test_several_processes_need_batches_and_share_no_weights(
    tool: SearchTool, evaluate: Callable[[], float]
) -> None:
    with pytest.raises(
        SearchError, match=r"jobs is 2, and Search has proposed .* one by one; give it batch=8"
    ):
        Search(tool, evaluate, progress=False).run(trials=2, jobs=2)
    with pytest.raises(SearchError, match=r"jobs is 2 with train, which changes the weights"):
        Search(tool, evaluate, train=evaluate, batch=4, progress=False).run(trials=2, jobs=2)
    with pytest.raises(SearchError, match=r"batch is 0; give an integer >= 1"):
        Search(tool, evaluate, batch=0, progress=False)
    with pytest.raises(amanda.AmandaError, match="jobs is 0"):
        Search(tool, evaluate, batch=2, progress=False).run(trials=2, jobs=0)


def count(tool: SearchTool) -> Callable[[], float]:
    return lambda: float(sum(label in ("gelu", "bits4") for label in tool.architecture.values()))


def test_a_batch_is_proposed_before_its_first_trial_ends(tool: SearchTool) -> None:
    class Noted:
        """A controller that notes what it is asked and told."""

        def __init__(self) -> None:
            self.calls = ""

        def ask(self, space: Any, numbers: Any) -> dict[str, str]:
            self.calls += "a"
            return {name: labels[int(numbers.integers(len(labels)))] for name, labels in space.items()}

        def tell(self, space: Any, architecture: Any, scores: Any) -> None:
            self.calls += "t"

    controller = Noted()
    search = Search(tool, count(tool), controller, batch=3, progress=False)
    search.run(trials=7)
    assert controller.calls.replace("aa", "a").replace("aa", "a") == "atttattta"
    random = [Search(tool, count(tool), "random", batch=size, progress=False) for size in (1, 5)]
    first, second = (facts(search.run(trials=12).trials) for search in random)
    assert first == second


@pytest.mark.parametrize("name", ["random", "evolution", "policy"])
def test_a_search_in_batches_goes_on_as_it_would_have_gone_on(
    name: Literal["random", "evolution", "policy"], tool: SearchTool
) -> None:
    options: dict[str, Any] = {"batch": 5, "seed": 4, "progress": False}
    whole = Search(tool, count(tool), name, **options).run(trials=26)
    parts = Search(tool, count(tool), name, **options)
    for trials in (3, 12, 13, 26):
        parts.run(trials=trials)
    assert facts(parts.result.trials) == facts(whole.trials)


def test_batches_of_a_study_leave_no_running_trial(tool: SearchTool) -> None:
    def interrupted() -> float:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return count(tool)()

    calls: list[int] = []
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    search = Search(tool, interrupted, "optuna", study=study, batch=4, progress=False)
    with pytest.raises(KeyboardInterrupt):
        search.run(trials=20)
    assert len(search.result.trials) == 6
    assert not study.get_trials(states=[optuna.trial.TrialState.RUNNING])
    trials = search.run(trials=20).trials
    assert len({str(trial.architecture) for trial in trials}) == len(trials) == 20
    assert not study.get_trials(states=[optuna.trial.TrialState.RUNNING])
