"""The table of models whose channels are removed, of a small model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow
def test_a_row_for_each_method(
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = example("removed_channels")
    monkeypatch.setattr(sys, "argv", ["removed_channels", "resnet18", "--extent", "32", "--rounds", "1"])
    script.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[0] for row in rows] == list(script.METHODS)
    whole, smaller = rows[:2]
    assert float(smaller[1]) < 0.35 * float(whole[1])
    assert float(smaller[2]) < 0.35 * float(whole[2])
    assert float(smaller[4]) < 1e-5
