"""Pytest hooks of the option `--conformance`, which ends a run with what the driver fulfils, by meaning.

A driver's conftest.py imports them: `from amanda.testing.conformance import *`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from amanda.testing._suite import DriverTests

__all__ = ["pytest_addoption", "pytest_terminal_summary"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--conformance", action="store_true", help="report the conformance suite by meaning")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count what passed, failed and is expected to fail, by class of the suite, with the reasons of gaps."""
    if not config.getoption("--conformance"):
        return
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, set[str]] = defaultdict(set)
    for outcome in ("passed", "failed", "xfailed"):
        for report in terminalreporter.stats.get(outcome, ()):
            # Without the parameters of a test, which come in brackets.
            name = report.nodeid.rpartition("::")[2].partition("[")[0]
            meaning = _meaning_of(name)
            counts[meaning][outcome] += 1
            if outcome == "xfailed":
                reasons[meaning].add(report.wasxfail.removeprefix("reason: "))
    terminalreporter.section("conformance")
    for meaning, outcomes in counts.items():
        summary = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        terminalreporter.write_line(f"{meaning:<16} {summary}")
        for reason in sorted(reasons[meaning]):
            terminalreporter.write_line(f"{'':<16} {reason}")
    total = sum(counts.values(), Counter())
    terminalreporter.write_line(
        f"{'total':<16} {', '.join(f'{count} {outcome}' for outcome, count in total.items())}"
    )


def _meaning_of(test: str) -> str:
    """Return which class of the suite a test is of: "Inputs", "Isolation"."""
    for kind in DriverTests.__mro__[1:]:
        if test in vars(kind):
            return kind.__name__.removesuffix("Tests")
    return "whole suite" if hasattr(DriverTests, test) else "the driver's own"
