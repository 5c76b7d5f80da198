"""The page of accuracies: by tools and by hand the scores and the weights are the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accuracy() -> Iterator[ModuleType]:
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    sys.path.insert(1, str(ROOT / "examples"))
    import accuracy

    yield accuracy
    for folder in ("benchmarks", "examples"):
        sys.path.remove(str(ROOT / folder))
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["digits, CNN, PyTorch", pytest.param("digits, CNN, Keras", marks=pytest.mark.long)]
)
def test_tools_score_what_is_scored_by_hand(accuracy: ModuleType, model: str) -> None:
    found = accuracy.measured(model, [0], quick=True)
    assert len(found) == 6
    for run in found:
        assert run.tool == run.hand
        assert run.same == 1.0
    dense, pruned = found[0], found[1]
    assert dense.tool != pruned.tool


def test_the_page_says_what_was_measured(accuracy: ModuleType) -> None:
    known = json.loads((ROOT / "docs/accuracy.json").read_text())
    found = {model: [accuracy.Run(**run) for run in runs] for model, runs in known.items()}
    assert set(found) <= set(accuracy.MODELS)
    page = (ROOT / "docs/accuracy.md").read_text()
    assert all(line in page for runs in found.values() for line in accuracy.table(runs))
