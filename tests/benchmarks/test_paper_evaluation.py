"""The figures of the paper's evaluation are measured in a quick run, and the page is made from results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import children
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks/paper"
PAGE = ROOT / "docs/paper-evaluation.md"


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The folders of the scripts as when one is run, and none of their modules left behind."""
    for folder in (ROOT / "benchmarks", SCRIPTS):
        monkeypatch.syspath_prepend(str(folder))
        for path in folder.glob("*.py"):
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
    import _evaluation  # type: ignore[import-not-found]

    return _evaluation  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_quick_run_measures_a_figure_and_makes_its_part_of_the_page(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "12", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "paper-evaluation.json").read_text())["measured"]
    assert list(found) == ["cache_eager", "cache_graph"]
    cases = found["cache_graph"]["models"]["a small CNN"]["cases"]
    assert all(min(times) > 0 for case in cases.values() for times in case.values())
    text = (tmp_path / "paper-evaluation.md").read_text()
    assert "A quick run" in text
    assert "| 12 | all, at most | 72.6 x |" in text
    assert "## Figure 10" not in text
    assert (tmp_path / "paper-evaluation-12.svg").read_text().count("<svg") == 1


def test_what_was_measured_here_is_left_and_what_fails_does_not_take_the_rest_with_it(
    evaluation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run  # type: ignore[import-not-found]

    done: list[str] = []

    def measured(script: Path, quick: bool) -> dict[str, Any]:
        done.append(script.stem)
        if script.stem == "covered":
            raise subprocess.CalledProcessError(1, script.name)
        here = {"machine": run.machine(), "versions": run.versions(), "date": "2026-01-01", "took": 1}
        return {**here, "load": [0, 0], "missing": "it is a test"}

    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["run.py", "9", "13", "--quick", "--missing", "--out", str(tmp_path)])
    assert run.main() == 1
    assert run.main() == 1
    assert done == ["covered", "footprint_eager", "footprint_graph", "covered"]
    assert list(evaluation.read(tmp_path / "paper-evaluation.json")["measured"]) == [
        "footprint_eager",
        "footprint_graph",
    ]


def test_what_cannot_be_used_is_refused(
    evaluation: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import run

    (tmp_path / "paper-evaluation.json").write_text('{"schema": 0, "quick": true}')
    with pytest.raises(ValueError, match="has schema 0, this page is made from 1"):
        evaluation.read(tmp_path / "paper-evaluation.json")
    monkeypatch.setattr(sys, "argv", ["run.py", "7"])
    with pytest.raises(SystemExit):
        run.main()
    assert "no figure 7; there are 8, 9, 10, 11, 12, 13" in capsys.readouterr().err


def test_amandas_part_is_what_a_tool_without_its_routines_adds(evaluation: ModuleType) -> None:
    from _evaluated import GRAPH, framework, part, whole  # type: ignore[import-not-found]

    model = {
        "wide": {"bare": [100.0] * 5, "bare again": [100.0] * 5, "QAT": [140.0] * 5},
        "twin": {"bare": [1.0] * 5, "QAT, hollow": [3.0] * 5},
    }
    assert framework(GRAPH, model, "QAT").middle == pytest.approx(2)
    assert whole(GRAPH, model, "QAT").middle == pytest.approx(40)
    assert part(GRAPH, model, "QAT") == pytest.approx(0.05)


def test_a_narrow_twin_has_the_operators_of_its_model(evaluation: ModuleType) -> None:
    import torch
    from _models import let_torchvision_load  # type: ignore[import-not-found]
    from _zoo import NARROWER, narrow  # type: ignore[import-not-found]
    from torch import nn

    let_torchvision_load()
    from torchvision.models import vgg19

    def layers(model: nn.Module) -> list[type]:
        return [type(one) for one in model.modules()]

    with torch.device("meta"):
        model = vgg19(init_weights=False)
        with narrow(nn.Conv2d, nn.Linear, nn.BatchNorm2d):
            twin = vgg19(init_weights=False)
    assert layers(twin) == layers(model)
    widths = [(a.out_channels, b.out_channels) for a, b in zip(model.modules(), twin.modules(), strict=True)
              if isinstance(a, nn.Conv2d)]  # fmt: skip
    assert all(wide == NARROWER * small for wide, small in widths)


def test_hollow_tools_act_at_the_same_ops_and_change_nothing(evaluation: ModuleType) -> None:
    import torch
    from _wrapping import hollow  # type: ignore[import-not-found]

    import amanda

    model, x = torch.nn.Linear(8, 8), torch.rand(2, 8)
    wanted = model(x)
    with amanda.apply(amanda.load_tool("prune", sparsity=0.5)):
        assert not torch.equal(model(x), wanted)
    with amanda.apply(hollow(amanda.load_tool("prune", sparsity=0.5))):
        assert torch.equal(model(x), wanted)
    experts = torch.rand(2, 8, 8, requires_grad=True)
    with amanda.apply(tool := amanda.load_tool("prune", sparsity=0.5)):
        torch.mm(x, experts[torch.tensor([1])][0])  # what follows selections is shared, and still does
    assert tool.result.sparsity == 0.5


@pytest.mark.skipif(not PAGE.exists(), reason="nothing has been measured yet")
def test_the_committed_page_is_made_from_the_committed_results(evaluation: ModuleType) -> None:
    results = evaluation.read(PAGE.with_suffix(".json"))
    assert PAGE.read_text() == evaluation.text(results)
    assert not results["quick"]
    shown = {f"{PAGE.stem}-{figure}.svg" for figure in evaluation.by_figure(results["measured"])}
    assert shown == {path.name for path in PAGE.parent.glob(f"{PAGE.stem}-*.svg")}
