"""The demo's tool counts what ran, and its table can be read anywhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from rich.console import Console
from torch import nn

import amanda


@pytest.fixture(scope="module")
def demo(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("demo")


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten())


def observed(demo: ModuleType) -> object:
    model, x = network(), torch.rand(1, 3, 8, 8)
    return demo.observe("a small network", model, lambda: model(x).sum(), steps=1)


def shown(demo: ModuleType, encoding: str, **options: bool) -> str:
    written = io.BytesIO()
    console = Console(file=io.TextIOWrapper(written, encoding), width=80, **options)  # type: ignore[arg-type]
    console.print(demo.report(observed(demo), console.options.ascii_only))
    console.file.flush()
    return written.getvalue().decode(encoding)


def test_every_op_is_counted_at_every_step(demo: ModuleType) -> None:
    model, x, tool = network(), torch.rand(1, 3, 8, 8), demo.OpTimes()
    with amanda.apply(tool):
        for _ in range(3):
            model(x).sum().backward()
    counts = {kind: (times.forward, times.backward) for kind, times in tool.types.items()}
    assert counts == {
        "conv2d": (6, 6),
        "relu": (3, 3),
        "reshape": (3, 3),
        "sum": (3, 3),
        "ones_like": (3, 0),
    }
    assert all(times.seconds > 0 for times in tool.types.values())


def test_the_table_names_every_type_and_what_watching_cost(demo: ModuleType) -> None:
    text = shown(demo, "utf-8")
    for line in ("conv2d", "relu", "5 types", "a step without Amanda", "none"):
        assert line in text
    assert "\x1b" not in text


def test_the_table_is_plain_where_only_ascii_can_be_written(demo: ModuleType) -> None:
    assert "##" in shown(demo, "ascii")


def test_no_color_is_honoured(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in shown(demo, "utf-8", force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown(demo, "utf-8", force_terminal=True)


def test_progress_goes_to_stderr(demo: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with demo.working("a small network: step 1 of 1"):
        pass
    out, error = capfd.readouterr()
    assert out == ""
    assert "step 1 of 1" in error
