"""The benchmarks run, their page is made from raw results, and the committed page is made that way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import children
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the scripts as when one is run, and none of its modules left behind."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for path in SCRIPTS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.fixture
def page(benchmark_modules: None) -> ModuleType:
    import page  # type: ignore[import-not-found]

    return page  # type: ignore[no-any-return]


@pytest.mark.long
def test_a_quick_run_makes_results_and_the_page(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "ops", "backward", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "benchmarks.json").read_text())
    assert set(results["benchmarks"]) == {"ops", "backward"}
    assert results["quick"]
    times = results["benchmarks"]["ops"]["programs"]["nn.Linear(4, 4)(x)"]["ns"]
    assert {"bare", "bare again", "empty tool", "TorchFunctionMode", "monkey-patch", "module hooks"} <= set(
        times
    )
    text = (tmp_path / "benchmarks.md").read_text()
    assert "op whose plan is empty, in a scope" in text
    assert "64 relu, 66 nodes" in text
    assert "A quick run" in text
    assert (tmp_path / "benchmarks-ops.svg").read_text().count("<svg") == 1


@pytest.mark.slow
def test_a_quick_run_of_sessions_of_onnxruntime(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "sessions", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    models = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]["sessions"]["models"]
    (model,) = models.values()
    for times in model["runs"].values():
        assert {"bare", "bare again", "looks at every op", "observer on every op"} <= times.keys()
        assert "routine after each convolution" in times
    text = (tmp_path / "benchmarks.md").read_text()
    assert "without fusion" in text.split("## Sessions of ONNX Runtime")[1]


@pytest.mark.long
def test_a_quick_run_of_compiled_models(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "compiled", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "benchmarks.md").read_text()
    section = text.split("## Compiled models")[1]
    assert "| prune, masks in the graph |" in section
    assert "| stats, op by op |" in section


@pytest.mark.long
def test_a_quick_run_of_training_within_a_budget(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "remat", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]["remat"]["models"][
        "ResNet-50"
    ]
    assert found["came"]["no budget"] == {"peak": 1.0, "again": 0.0}
    assert found["came"]["75 %"]["again"] > 0
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| budget | time over bare | peak |" in text


@pytest.mark.long
def test_a_quick_run_beside_the_profiler_of_torch_says_what_both_say(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "profiling", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]["profiling"]
    assert found["at once"]["pairs"] > 2000
    assert found["apart"].keys() > {"linear", "AddmmBackward0", "AccumulateGrad"}
    text = (tmp_path / "benchmarks.md").read_text()
    assert "within 10 % of torch.profiler's" in text


@pytest.mark.long
def test_a_quick_run_of_whole_programs_has_tools_beside_their_peers(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "peers", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]["peers"]
    tools = {"flops", "nan", "profile", "trace", "stats", "prune", "quantize"}
    assert found["programs"]["Keras, fit"].keys() == {"bare", "bare again", *tools}
    peers = {"torch.profiler", "FlopCounterMode", "detect_anomaly", "torch.ao FakeQuantize"}
    assert found["programs"]["Llama of 4 layers, 16 new tokens"].keys() > peers | tools
    layers = "20 linear layers of 32, batch of 16"
    for steps in found["steps"].values():
        assert steps[layers].keys() > peers | tools
    assert found["first"][layers].keys() == {"bare again", *tools}
    assert all(found["first"][layers][tool]["first"] > found["first"][layers][tool]["bare"] for tool in tools)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| torch.nn.utils.parametrize |" in text
    assert "| flops, forward + backward + AdamW: 20 linear layers | <= 1.2 x |" in text
    first_screen = text.partition("\n## ")[0]
    assert "| flops (FlopCounterMode) |" in first_screen
    assert "(benchmarks-peers.svg)" in first_screen
    assert (tmp_path / "benchmarks-peers.svg").read_text().count("<svg") == 1


@pytest.mark.long
def test_a_quick_run_of_graphs_measures_sessions_and_functions(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "graphs", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]["graphs"]
    assert set(found["hits"]) == set(found["rewrites"]) == {"session", "function"}
    for rewrites in found["rewrites"].values():
        assert all(run["actions"] > run["ops"] > 0 for runs in rewrites.values() for run in runs)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "step: observer on every op | <= 1.35 x" in text
    assert "| dump, every execution |" in text
    assert "| 100 ops, session | 100 | 200 |" in text


def test_the_committed_page_is_made_from_the_committed_results(page: ModuleType) -> None:
    results = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    if results["schema"] < page.PAGE.schema:
        pytest.xfail("results of an older schema: `nox -s bench` measures them")
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page.text(results)
    assert not results["quick"]
    shown = {f"benchmarks-{name}.svg" for name in ("peers", "ops", "steps", "memory")}
    assert shown == {path.name for path in (ROOT / "docs").glob("benchmarks-*.svg")}


def test_benchmarks_of_several_machines_are_told_apart(page: ModuleType) -> None:
    one = {"machine": {"processor": "A"}, "versions": {}, "date": "2026-01-01", "took": 61, "load": [0, 1]}
    other = {**one, "machine": {"processor": "B"}}
    lines = page.settings({"ops": one, "steps": one, "graphs": other}).splitlines()
    assert [line for line in lines if "processor" in line] == ["| processor | A |", "| processor | B |"]
    assert "| measured | 2026-01-01, in 2 min 2 s |" in lines
    assert [line for line in lines if "ops" in line or "graphs" in line] == [
        "| ops, steps |  |",
        "| graphs |  |",
    ]


def test_parts_of_several_commits_are_told_apart(page: ModuleType) -> None:
    about = {"machine": {}, "versions": {}, "date": "2026-01-01", "took": 1, "load": [0, 1], "missing": "no"}
    parts = {"first": {**about, "commit": "a1"}, "second": {**about, "commit": "b2+"}}
    lines = page.settings(parts).splitlines()
    assert [line for line in lines if "commit" in line] == ["| commit | a1 |", "| commit | b2+ |"]
    warning = "different versions of the code (a1, b2+)"
    assert warning in page.text({"quick": False, "benchmarks": parts})
    del parts["second"]
    assert "different versions of the code" not in page.text({"quick": False, "benchmarks": parts})


def test_a_figure_of_several_models_has_a_verdict_for_each(benchmark_modules: None) -> None:
    from _estimates import Estimate
    from _figures import figure_of_models

    figure = figure_of_models("nan", " x", [(Estimate(1.1, 1.0, 1.2), 1.2), (Estimate(1.4, 1.3, 1.5), 1.2)])
    assert figure.wanted == "<= 1.2 / 1.2 x"
    assert figure.met == "met / **not met**"


@pytest.mark.slow
def test_peers_of_quantize_and_prune_give_the_same_values(benchmark_modules: None) -> None:
    import torch
    from _models import total  # type: ignore[import-not-found]
    from _peers import (  # type: ignore[import-not-found]
        FAKE_QUANTIZE,
        PARAMETRIZE,
        PEERS,
        TOOLS,
        small_models,
        variants_of,
    )

    import amanda

    for model, given in small_models().values():
        model.eval()
        others = variants_of(model)
        for tool, peer in (("quantize", FAKE_QUANTIZE), ("prune", PARAMETRIZE)):
            with torch.no_grad(), amanda.apply(TOOLS[tool]()):
                found = model(given)
            with torch.no_grad(), PEERS[peer]():
                wanted = others[peer](given)
            assert torch.equal(total(found), total(wanted))


def test_results_of_another_schema_are_refused(page: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "benchmarks.json"
    file.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="has schema 0, this page is made from 3"):
        page.read(file)


def test_an_interval_that_crosses_the_figure_decides_nothing(benchmark_modules: None) -> None:
    from _estimates import Estimate  # type: ignore[import-not-found]
    from _figures import verdict  # type: ignore[import-not-found]

    assert verdict(Estimate(0.04, 0.03, 0.05), 0.05) == "met"
    assert verdict(Estimate(0.06, 0.051, 0.07), 0.05) == "**not met**"
    assert verdict(Estimate(0.04, 0.03, 0.06), 0.05) == "met or not, within the noise"


def test_a_cost_is_found_in_noise_that_all_variants_share(benchmark_modules: None) -> None:
    import random

    from _estimates import difference, quotient_of_differences

    chance = random.Random(0)
    bare = [1000 + chance.gauss(0, 300) for _ in range(40)]
    dear = [value + 100 + chance.gauss(0, 5) for value in bare]
    dearer = [value + 400 + chance.gauss(0, 5) for value in bare]
    found = difference(dear, bare)
    assert found.low < 100 < found.high
    assert found.high - found.low < 10
    assert quotient_of_differences(dear, dearer, bare).middle == pytest.approx(0.25, abs=0.02)


def test_values_of_other_rounds_are_over_the_median_of_the_base(benchmark_modules: None) -> None:
    from _estimates import quotient

    assert quotient([2.0, 6.0, 4.0], [1.0, 3.0, 2.0]).middle == 2
    assert quotient([6.0, 6.0], [1.0, 3.0, 2.0]).middle == 3


def test_a_patch_leaves_torch_as_it_was(benchmark_modules: None) -> None:
    import torch
    from _others import HOLDERS, MonkeyPatch  # type: ignore[import-not-found]

    before = [{name: vars(holder).get(name) for name in names} for holder, names in HOLDERS]
    called: list[object] = []
    x = torch.ones(2)
    with MonkeyPatch(before=lambda *values: called.append(values)):
        torch.relu(x + x)
    assert len(called) == 2
    assert [{name: vars(holder).get(name) for name in names} for holder, names in HOLDERS] == before
    assert torch.tensor([torch.tensor(1)]).tolist() == [1]  # it fails where tensors have become sequences


@pytest.mark.long
def test_a_quick_run_over_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "distributed", "--quick", "--out", str(tmp_path)]
    done = children.run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]["distributed"]
    variants = {"bare", "bare again", "empty tool", "FlopsTool"}
    assert {name: set(taken) for name, taken in found["seconds"].items()} == {
        "DistributedDataParallel": variants, "FSDP2": variants,
    }  # fmt: skip
    text = (tmp_path / "benchmarks.md").read_text()
    assert "## Training over 2 ranks" in text
    assert "| FSDP2 |" in text
