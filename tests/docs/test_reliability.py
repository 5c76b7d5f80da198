"""docs/reliability.md is made from docs/reliability.json, which `nox -s reliability` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from amanda_docs.reliability import ATTACKS, DATA, PAGE, page, record


def row(**values: Any) -> dict[str, Any]:
    fixed = {"attack": "signals", "framework": "PyTorch", "version": "2.13.0", "unit": "signals"}
    return {**fixed, "count": 1000, "wrong": 0, "left": [], "note": "", **values}


def test_the_page_is_made_from_what_the_session_has_written() -> None:
    assert PAGE.read_text() == page(json.loads(DATA.read_text()))


def test_every_attack_has_figures_in_which_nothing_is_wrong_or_left() -> None:
    rows = json.loads(DATA.read_text())
    assert {one["attack"] for one in rows} == set(ATTACKS)
    assert [one for one in rows if one["wrong"] or one["left"]] == []


def test_a_row_takes_the_place_of_the_last_one_of_its_attack_and_framework(tmp_path: Path) -> None:
    data, written = tmp_path / "rows.json", tmp_path / "page.md"
    record([row(), row(framework="JAX")], data, written)
    record([row(wrong=2, left=["a scope"])], data, written)
    assert [one["wrong"] for one in json.loads(data.read_text())] == [0, 2]
    (line,) = [line for line in written.read_text().splitlines() if line.startswith("| PyTorch")]
    assert line.startswith("| PyTorch (2.13.0) | 1,000 signals | 2 | a scope |")
