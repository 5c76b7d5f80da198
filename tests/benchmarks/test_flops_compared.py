"""The page that compares counters of FLOPs: Amanda's figures are those of formulas, and come again."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = {
    cells[0]: cells[1:]
    for line in (ROOT / "docs/flops-compared.md").read_text().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 9
}


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import flops_compared

    yield flops_compared
    del sys.modules["flops_compared"]


def test_amanda_counts_what_the_formulas_say(counters) -> None:
    assert ROWS["model"][:2] == ["formula", "amanda"]
    for name, (_, _, formula) in counters.MODELS.items():
        assert ROWS[name][0] == ROWS[name][1] == f"{formula / 1e9:.4f}"


def test_counting_again_gives_the_same(counters) -> None:
    names = ROWS["model"][1:]
    for counter in ("amanda", "torch", "fvcore"):
        again = counters.counted(counters.COUNTERS[counter], "MobileNetV2", {})
        assert again == ROWS["MobileNetV2"][1 + names.index(counter)]
