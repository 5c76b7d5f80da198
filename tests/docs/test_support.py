"""docs/support.md is made from docs/support.json, which the sessions write."""

from __future__ import annotations

import json
from pathlib import Path

from amanda_docs.support import DATA, PAGE, allowed, page, record

REPORT = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'


def test_the_page_is_made_from_what_sessions_have_written() -> None:
    assert PAGE.read_text() == page(json.loads(DATA.read_text()))


def test_a_run_takes_the_place_of_the_last_one_and_of_what_was_expected(tmp_path: Path) -> None:
    report, data = tmp_path / "report.xml", tmp_path / "support.json"
    report.write_text(REPORT)
    for _ in range(2):
        record("PyTorch", "2.9.1", report, "its suite", data)
    (row,) = json.loads(data.read_text())
    assert (row["passed"], row["failed"], row["not counted"]) == (5, 2, 2)
    lines = page([row]).splitlines()
    assert len([line for line in lines if line.startswith("| 2.9.1 | ran | its suite | 5 | 2 | 2 |")]) == 1
    assert not [line for line in lines if line.startswith("| 2.9 | expected")]
    assert len([line for line in lines if line.startswith("| 2.8 | expected")]) == 1
    # A later version is tried when the driver attaches.
    assert not [line for line in lines if line.startswith("| 2.10 | expected")]


def test_what_may_work_is_what_the_metadata_allows() -> None:
    assert allowed("Python") == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert allowed("PyTorch")[0] == "2.4"
    assert allowed("TensorFlow")[0] == "2.16"
