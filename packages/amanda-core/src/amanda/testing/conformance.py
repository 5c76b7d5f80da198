"""Pytest hooks of the option `--conformance`, which ends a run with what the driver fulfils, by rung.

A driver's conftest.py imports them: `from amanda.testing.conformance import *`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from amanda.testing._suite import RUNGS, DriverTests

__all__ = ["pytest_addoption", "pytest_terminal_summary"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--conformance", action="store_true", help="report the conformance suite by rung")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print, with `--conformance`, how many tests passed, failed or are gaps, by rung and in all."""
    if not config.getoption("--conformance"):
        return
    counts_by_rung: dict[str, Counter[str]] = defaultdict(Counter)
    reasons_by_rung: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "xfailed"):
        for report in terminalreporter.stats.get(outcome, ()):
            # Without the parameters of a test, which come in brackets.
            name = report.nodeid.rpartition("::")[2].partition("[")[0]
            rung = _rung_of(name)
            counts_by_rung[rung][outcome] += 1
            if outcome == "xfailed":
                reasons_by_rung[rung].add(report.wasxfail.removeprefix("reason: "))
    terminalreporter.section("conformance")
    counts_by_title = {**counts_by_rung, "total": sum(counts_by_rung.values(), Counter())}
    for title, counts in counts_by_title.items():
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        terminalreporter.write_line(f"{title:<20} {summary}")
        for reason in sorted(reasons_by_rung[title]):
            terminalreporter.write_line(f"{'':<20} {reason}")


def _rung_of(test: str) -> str:
    """Return the title of the rung that a test is on: "contexts", "backward ops"."""
    for rung in RUNGS:
        if test in vars(rung):
            return rung.title
    return "whole suite" if hasattr(DriverTests, test) else "the driver's own"
