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
    """Count what passed, failed and is expected to fail, by rung of the suite, with the reasons of gaps."""
    if not config.getoption("--conformance"):
        return
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "xfailed"):
        for report in terminalreporter.stats.get(outcome, ()):
            # Without the parameters of a test, which come in brackets.
            name = report.nodeid.rpartition("::")[2].partition("[")[0]
            rung = _rung_of(name)
            counts[rung][outcome] += 1
            if outcome == "xfailed":
                reasons[rung].add(report.wasxfail.removeprefix("reason: "))
    terminalreporter.section("conformance")
    for rung, outcomes in counts.items():
        summary = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        terminalreporter.write_line(f"{rung:<20} {summary}")
        for reason in sorted(reasons[rung]):
            terminalreporter.write_line(f"{'':<20} {reason}")
    total = sum(counts.values(), Counter())
    terminalreporter.write_line(
        f"{'total':<20} {', '.join(f'{count} {outcome}' for outcome, count in total.items())}"
    )


def _rung_of(test: str) -> str:
    """Return the title of the rung that a test is on: "contexts", "backward ops"."""
    for rung in RUNGS:
        if test in vars(rung):
            return rung.title
    return "whole suite" if hasattr(DriverTests, test) else "the driver's own"
