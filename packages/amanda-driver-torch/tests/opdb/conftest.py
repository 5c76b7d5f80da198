"""What the tests of the operators have called, in the summary."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was compared."""
    passed = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    compared = Counter[str]()
    for report in passed:
        compared.update({name: n for name, n in report.user_properties if isinstance(n, int)})
    if compared:
        counts = ", ".join(f"{n} {name}" for name, n in compared.items())
        terminalreporter.write_line(f"compared with a run without a scope: {counts}")
