"""Errors of architecture search for what it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amanda.errors import FileError
from amanda.tools.search import Choice, Evolution, PolicyGradient, Random, Search, SearchError, SearchTool


@pytest.fixture
def tool() -> SearchTool:
    tool = SearchTool(
        [Choice(["keep", "conv5"], type="conv2d"), "sigmoid=keep|relu", "linear=keep|bits4"], mixture=False
    )
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 2))
    tool.prepare(model, torch.rand(1, 1, 4, 4))
    return tool


class Stubborn(Random):
    """A controller that gives what is no architecture."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def ask(self, space: Any, numbers: Any) -> Any:
        return self.found


WRONG: list[tuple[Callable[[SearchTool], Any], str]] = [
    (lambda tool: Choice(["keep", "convx"], type="conv2d"), "the choice at type=conv2d is 'convx'"),
    (lambda tool: Choice(["keep", "bits9"], type="conv2d"), "is 'bits9'; it is one of keep, skip, conv5"),
    (lambda tool: Choice("keep", type="conv2d"), "candidates is 'keep'; give a list of"),
    (lambda tool: Choice(["keep", "keep"], type="conv2d"), "has keep twice"),
    (lambda tool: SearchTool(["conv2d"]), "choices has 'conv2d'; write type@module=candidate"),
    (lambda tool: setattr(tool, "architecture", {"0/conv": "keep"}),
     "'0/conv' is no op with a choice; such are 0/conv2d"),
    (lambda tool: setattr(tool, "architecture", {"0/conv2d": "relu"}),
     "'relu' is no candidate of 0/conv2d; it has keep"),
    (lambda tool: SearchTool().flops(), "the costs of ops are not known; call prepare"),
    (lambda tool: SearchTool().finalize(nn.ReLU()), "no op with a choice was met; call prepare"),
    (lambda tool: Search(tool, 3), "evaluate is 3; give a function"),  # type: ignore[arg-type]
    (lambda tool: Search(SearchTool(), lambda: 1), "has met no op with a choice; call tool.prepare"),
    (lambda tool: Search(tool, lambda: 1, "evolve"), "controller is 'evolve'; give one of"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, costs=["time"]), "costs is ['time']; give a list of"),
    (lambda tool: Search(tool, lambda: 1, costs=[lambda: 1, lambda: 2]), "give each a name of its own"),
    (lambda tool: Search(tool, lambda: 1, study="sqlite:////none/none/trials.db"),
     "study is 'sqlite:////none/none/trials.db', which cannot be opened"),
    (lambda tool: Search(tool, lambda: 1, study="trials.db"), "study is 'trials.db', which cannot be opened"),
    (lambda tool: tool.settle({"time": 1}), "its key is 'time'"),  # type: ignore[dict-item]
    (lambda tool: Search(tool, lambda: 1).run(), "the budget is None; give trials, seconds"),
    (lambda tool: Search(tool, lambda: "x", progress=False).run(trials=1), "gave 'x'; give a number"),
    (lambda tool: Evolution(sample="few"), "sample is 'few'; give an integer >= 1"),  # type: ignore[arg-type]
    (lambda tool: Evolution(population=0), "population is 0; give an integer >= 1"),
    (lambda tool: SearchTool(architecture=Path("none.json")), "there is no such file"),
    (lambda tool: Choice([], type="conv2d"), "candidates is []; give a list"),
    (lambda tool: Choice(5, type="conv2d"), "candidates is 5; give a list of"),  # type: ignore[arg-type]
    (lambda tool: Choice({"keep", "relu"}), "give a list of strings or functions"),  # type: ignore[arg-type]
    (lambda tool: Choice(["keep", 5], type="conv2d"), "item 1 is 5"),  # type: ignore[list-item]
    (lambda tool: Choice(["keep", "relu"], "relu", shared=1), "shared is 1; give True or False"),  # type: ignore[arg-type]
    (lambda tool: Choice(["keep", "width0"]), "is 'width0'; it is one of keep"),
    (lambda tool: SearchTool(5), "SearchTool: choices is 5; give a list of Choices or strings"),  # type: ignore[arg-type]
    (lambda tool: SearchTool([5]), "SearchTool: choices is [5]; give a list of Choices or strings"),  # type: ignore[list-item]
    (lambda tool: SearchTool(mixture="yes"), "SearchTool: mixture is 'yes'; give True or False"),  # type: ignore[arg-type]
    (lambda tool: SearchTool(seed=-1), "SearchTool: seed is -1; give an integer >= 0"),
    (lambda tool: SearchTool(architecture=5), "SearchTool: architecture is 5; give the path"),  # type: ignore[arg-type]
    (lambda tool: setattr(tool, "architecture", 5),
     "SearchTool.architecture: the architecture is 5; give a dict"),
    (lambda tool: setattr(tool, "architecture", {"0/conv2d": 5}),
     "architecture is {'0/conv2d': 5}; give a dict"),
    (lambda tool: setattr(SearchTool(), "architecture", [("0", "keep")]), "give a dict from names of ops"),
    (lambda tool: tool.flops({"0/conv": "keep"}), "'0/conv' is no op with a choice; such are 0/conv2d"),
    (lambda tool: tool.flops({"0/conv2d": "conv9"}), "'conv9' is no candidate of 0/conv2d; it has keep"),
    (lambda tool: tool.size(5), "SearchTool.size: the architecture is 5; give a dict"),  # type: ignore[arg-type]
    (lambda tool: tool.settle(5), "SearchTool.settle: limits is 5; give a dict"),  # type: ignore[arg-type]
    (lambda tool: tool.settle({"flops": "x"}), "its value of 'flops' is 'x'"),  # type: ignore[dict-item]
    (lambda tool: tool.settle({"flops": float("nan")}), "its value of 'flops' is nan"),
    (lambda tool: tool.save("none/architecture.json"), "none/architecture.json cannot be written"),
    (lambda tool: tool.save(5), "SearchTool.save: path is 5; give a string or a path"),  # type: ignore[arg-type]
    (lambda tool: tool.finalize(5), "SearchTool.finalize: model is 5; give the module"),
    (lambda tool: Search(5, lambda: 1), "Search: tool is 5; give a SearchTool"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, 5), "Search: controller is 5; give one of 'random'"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, Evolution), "give one of 'random'"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, train=5), "Search: train is 5; give a function"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, costs="flops"), "Search: costs is 'flops'; give a list"),
    (lambda tool: Search(tool, lambda: 1, costs=5), "Search: costs is 5; give a list"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, costs=[5]), "costs is [5]; give a list of"),  # type: ignore[list-item]
    (lambda tool: Search(tool, lambda: 1, costs=["flops", "flops"]), "give each a name of its own"),
    (lambda tool: Search(tool, lambda: 1, limits=5), "Search: limits is 5; give a dict"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, limits={"flops": "x"}), "its value of 'flops' is 'x'"),  # type: ignore[dict-item]
    (lambda tool: Search(tool, lambda: 1, limits={"size": float("inf")}), "its value of 'size' is inf"),
    (lambda tool: Search(tool, lambda: 1, limits={"flops": True}), "its value of 'flops' is True"),
    (lambda tool: Search(tool, lambda: 1, limits={"time": 1}), "its key is 'time'"),
    (lambda tool: Search(tool, lambda: 1, metric=5), "Search: metric is 5; give a string"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, seed=-1), "Search: seed is -1; give an integer >= 0"),
    (lambda tool: Search(tool, lambda: 1, seed="x"), "Search: seed is 'x'; give an integer >= 0"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, study=5), "Search: study is 5; give a study of Optuna"),
    (lambda tool: Search(tool, lambda: 1, progress="no"), "Search: progress is 'no'; give True"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1, compiled="x"), "Search: compiled is 'x'; give 'eager'"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1).run(trials="3"), "Search.run: trials is '3'; give an integer"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1).run(trials=-1),
     "Search.run: trials is -1; give an integer >= 0"),
    (lambda tool: Search(tool, lambda: 1).run(trials=1.5), "Search.run: trials is 1.5"),  # type: ignore[arg-type]
    (lambda tool: Search(tool, lambda: 1).run(seconds="3"),  # type: ignore[arg-type]
     "Search.run: seconds is '3'; give a number"),
    (lambda tool: Search(tool, lambda: 1).run(seconds=float("nan")), "Search.run: seconds is nan"),
    (lambda tool: Search(tool, lambda: 1).run(seconds=-1), "Search.run: seconds is -1"),
    (lambda tool: Search(tool, lambda: 1, Stubborn({}), progress=False).run(trials=1),
     "Stubborn.ask gave {}"),
    (lambda tool: Search(tool, lambda: 1, Stubborn(5), progress=False).run(trials=1), "Stubborn.ask gave 5"),
    (lambda tool: Evolution(population=True), "Evolution: population is True; give an integer >= 1"),
    (lambda tool: PolicyGradient(rate="x"), "PolicyGradient: rate is 'x'; give a number"),  # type: ignore[arg-type]
    (lambda tool: PolicyGradient(decay=2), "PolicyGradient: decay is 2; give a number from 0 to 1"),
]  # fmt: skip


def test_a_choice_of_no_name_is_an_error() -> None:
    for options in ({"type": 5}, {"module": 5}, {"type": [5]}):
        expected = f"Choice: {next(iter(options))} is .*5.*; give a list of strings, a string, or None"
        with pytest.raises(SearchError, match=expected):
            Choice(["keep", "relu"], **options)


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_bad_input_is_an_error(wrong: Any, message: str, tool: SearchTool) -> None:
    with pytest.raises((SearchError, FileError)) as caught:
        wrong(tool)
    assert message in str(caught.value)
