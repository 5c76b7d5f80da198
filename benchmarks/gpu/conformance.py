"""The conformance suites of the PyTorch driver on the device, each test a case."""

import time
from typing import Any

import pytest
from _cases import Cases
from _measure import QUICK

from amanda.drivers.torch._requirements import missing_for_graphs

TESTS = "packages/amanda-driver-torch/tests"
EAGER, GRAPHS = f"{TESTS}/test_driver.py", f"{TESTS}/graph/test_driver.py"


class Told:
    """Plugin of pytest: writes down each test, and leaves those that are known."""

    def __init__(self, cases: Cases) -> None:
        self._cases, self._begun = cases, 0.0

    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        """Leave the tests that are known."""
        items[:] = [one for one in items if one.nodeid not in self._cases.found]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Begin a case, or end the session once the time is over."""
        self._begun = time.monotonic()
        if not self._cases.begins(item.nodeid):
            item.session.shouldstop = "the time is over"
            pytest.skip("the time is over")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write what a test came to."""
        ended = report.when == "call" or (report.when == "setup" and not report.passed)
        if (ended or report.failed) and "the time is over" not in str(report.longrepr):
            result: dict[str, Any] = {"value": report.outcome}
            if report.failed:
                result = {"failed": report.longreprtext}
            elif report.skipped:
                result = {"skipped": getattr(report, "wasxfail", "") or str(report.longrepr)}
            self._cases.ends(report.nodeid, self._begun, **result)


def stage(cases: Cases) -> None:
    """Run the suites; those that start processes or take long too, unless the run is quick."""
    chosen = ["-m", "not slow"] if QUICK else ["-m", "slow or not slow"]
    paths = [EAGER] if QUICK or missing_for_graphs() else [EAGER, GRAPHS]
    if missing_for_graphs():
        cases.skip(GRAPHS, f"compiled callables run op by op: torch lacks {', '.join(missing_for_graphs())}")
    pytest.main(["-qq", "--no-header", "--tb=short", *chosen, *paths], plugins=[Told(cases)])
