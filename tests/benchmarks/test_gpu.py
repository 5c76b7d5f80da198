"""Stages for a GPU: the page lists them, each case is written at once, a rehearsal runs on a processor."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import children
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
TIMES = {"bare": [1.0, 1.0], "bare again": [1.0, 1.0]}


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of the scripts as when a stage is run, and none of their modules left behind."""
    monkeypatch.setenv("AMANDA_TEST_DEVICE", "cpu")
    monkeypatch.setenv("AMANDA_GPU_INTERCEPTOR", "native")
    for folder in (SCRIPTS / "paper", SCRIPTS, SCRIPTS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
        for path in folder.glob("*.py"):
            monkeypatch.delitem(sys.modules, path.stem, raising=False)


def cases(file: Path, seconds: float = 60) -> Any:
    from _cases import Cases  # type: ignore[import-not-found]

    return Cases("facts", file, seconds)


def test_the_page_lists_every_stage_with_its_time() -> None:
    from run import GRACE, STAGES  # type: ignore[import-not-found]

    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| ([\d.]+) \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE
    )
    assert rows == [(name, what, f"{(took + GRACE) / 60:.1f}") for name, (took, what) in STAGES.items()]
    assert all((SCRIPTS / "gpu" / f"{name}.py").exists() for name in STAGES)


def test_the_cheapest_stage_is_rehearsed(tmp_path: Path) -> None:
    import facts  # type: ignore[import-not-found]

    facts.stage(cases(tmp_path / "gpu.json"))
    stage = json.loads((tmp_path / "gpu.json").read_text())["stages"]["facts"]
    assert stage["cases"]["gpu"]["value"] == {"devices": 0}
    assert stage["cases"]["software"]["value"]["drivers"]["torch"] == "ready"
    assert (stage["device"], stage["left"]) == ("cpu", 0)


def test_results_are_written_after_each_case_and_kept_by_the_next_process(tmp_path: Path) -> None:
    from _cases import bare

    file = tmp_path / "gpu.json"
    first = cases(file)
    first("passes", lambda: {"seconds": 1.23456789})
    first("raises", lambda: 1 / 0)
    first("amiss", lambda: {"amiss": ["one", "two"]})
    first("alone", lambda: bare(lambda: 1 / 0))
    assert first.begins("ends the process")
    found = json.loads(file.read_text())["stages"]["facts"]["cases"]
    assert found["passes"]["value"] == {"seconds": 1.23457}
    assert "ZeroDivisionError" in found["raises"]["failed"]
    assert found["amiss"]["failed"] == "one\ntwo"
    assert found["alone"]["skipped"].startswith("without a tool: ZeroDivisionError")
    second = cases(file)
    second("passes", lambda: pytest.fail("a case that is known runs again"))
    second("ends the process", lambda: pytest.fail("a case that ended a process runs again"))
    assert second.found["ends the process"]["failed"] == "the process ended, or was stopped, in this case"


def test_no_case_begins_once_the_time_is_over(tmp_path: Path) -> None:
    late = cases(tmp_path / "gpu.json", 0.01)
    time.sleep(0.02)
    late("one", lambda: pytest.fail("it runs"))
    stage = json.loads((tmp_path / "gpu.json").read_text())["stages"]["facts"]
    assert (stage["cases"], stage["left"]) == ({}, 1)


def test_results_of_a_rehearsal_are_not_mixed_with_others(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    cases(file)("one", dict)
    results = json.loads(file.read_text())
    results["stages"]["facts"]["device"] = "a GPU"
    results["stages"]["costs"] = {"device": "a GPU"}
    file.write_text(json.dumps(results))
    assert cases(file).found == {}
    assert json.loads(file.read_text())["stages"]["costs"] == {"device": "a GPU"}


def stages(device: str) -> dict[str, Any]:
    """Return results of every kind that the pages show."""

    def stage(**found: Any) -> dict[str, Any]:
        about = {"machine": {"accelerator": device}, "versions": {}, "date": "2026-01-01", "load": [0.1]}
        each = {name: {"value": value, "seconds": 1} for name, value in found.items()}
        return {**about, "device": device, "quick": False, "took": 2, "left": 0, "cases": each}

    hollow = {**TIMES, "tracing": [1.5, 1.5], "tracing, hollow": [1.25, 1.25]}
    steps = {"seconds": {**TIMES, "flops": [3.0, 3.0]}, "medians": {"bare": 1.0}}
    op = {"type": "conv2d", "phase": "forward", "calls": 53, "ms": 2.0, "kernels": {"gemm": [53, 2.0]}}
    kernels = {"kernels": 60, "torch.profiler's": 61, "ms": 4.0, "ops": [op]}
    cached = {"cases": {"tracing": {"cache on": [1.0, 1.0], "cache off": [4.0, 4.0]}}}
    held = {"peak": 2**20, "cases": {"tracing": {"framework": 0, "whole": 2**19}}}
    return {
        "streams": {**stage(), "cases": {"a graph": {"failed": "it is\nnot in the report", "seconds": 1}}},
        "costs": stage(**{"per op: a + b": {"ns": TIMES}, "Llama, 32 new tokens": steps}),
        "profiled": stage(**{"ResNet-50: kernels": kernels}),
        "figures": stage(**{
            "10, 11: VGG19": {"seconds": hollow, "medians": {"bare": 1.0}},
            "12: VGG19": cached, "13: VGG19": held,
        }),
    }  # fmt: skip


def shown(template: str, measured: dict[str, Any]) -> str:
    import _on_gpu  # type: ignore[import-not-found]
    from _pages import render, settings  # type: ignore[import-not-found]

    return str(render(template, gpu=measured, on_gpu=_on_gpu, settings_of=settings))


def test_pages_show_what_was_measured_on_a_gpu() -> None:
    text = shown("on-gpu-benchmarks", stages("a GPU"))
    assert "| accelerator | a GPU |" in text
    assert "| streams | 0 | 1 | 0 | 0 | 2 |" in text
    assert "- streams, a graph: it is" in text
    assert "| flops | 3.000 [3.000, 3.000] |" in text
    text = shown("on-gpu-paper", stages("a GPU"))
    assert "| conv2d | forward | 53 | 2.00 | 50.0 % | `gemm` 53 times, 2.00 ms |" in text
    assert "| tracing | 50.0 [50.0, 50.0]; Amanda 25.0 [25.0, 25.0] |" in text
    assert "| tracing | 4.0 [4.0, 4.0] |" in text
    assert "| tracing | 0.0; 50.0 |" in text


@pytest.mark.parametrize("template", ["on-gpu-benchmarks", "on-gpu-paper"])
def test_pages_say_that_nothing_was_measured_and_tell_a_rehearsal(template: str) -> None:
    assert "Nothing was measured on a GPU yet" in shown(template, {})
    assert "**A rehearsal" in shown(template, stages("cpu"))


@pytest.mark.slow
def test_results_are_put_into_the_pages_but_no_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import _on_gpu
    import _prepare  # type: ignore[import-not-found]
    import page  # type: ignore[import-not-found]

    if json.loads((ROOT / "docs" / "benchmarks.json").read_text())["schema"] < page.PAGE.schema:
        pytest.xfail("results of an older schema: `nox -s bench` measures them")
    for name in ("benchmarks", "paper-evaluation"):
        (tmp_path / f"{name}.json").write_text((ROOT / "docs" / f"{name}.json").read_text())
    monkeypatch.setattr(_on_gpu, "FILE", tmp_path / "gpu.json")
    run = tmp_path / "run"
    run.mkdir()
    for device, status in (("cpu", 1), ("a GPU", 0)):
        (run / "gpu.json").write_text(json.dumps({"schema": 1, "stages": stages(device)}))
        assert _prepare.publish([run]) == status
        assert (tmp_path / "benchmarks.md").exists() == (status == 0)
    assert "results of a rehearsal" in capsys.readouterr().err
    for name in ("benchmarks", "paper-evaluation"):
        assert "| accelerator | a GPU |" in (tmp_path / f"{name}.md").read_text()


@pytest.mark.slow
def test_a_rehearsal_runs_from_the_sources_and_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu/run.py"), "facts", "--quick", "--out", str(tmp_path)]
    done = children.run([*command, "--device", "cpu"])
    assert done.returncode == 0, done.stderr
    assert "facts: 2 cases, 0 failed, 0 not reached" in done.stdout
    import torch

    if not torch.cuda.is_available():
        done = children.run(command)
        assert done.returncode == 1
        assert "no CUDA device here" in done.stderr
