"""A plugin for pytest that runs each test of a suite in a scope: `pytest -p scoped_tests --under look`.

--under nothing: no tools, for comparison.
--under look: routines that look at the values of every instrumentation point.
--under equal: routines that replace every value by an equal new one.
--under tools: FlopsTool, NanTool and StatsTool.
--outcomes FILE: where to write, as JSON, the outcome and the error message of each test.
--every N: run about one test of N, chosen by its id, and so the same in each mode.

Random generators start each test from the same state, so that the outcomes of two runs can be compared.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amanda
from amanda.interceptor.imports import when_imported
from amanda.testing import EqualCopies, Silent
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.stats import StatsTool

MODES = ("nothing", "look", "equal", "tools")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--under` and `--outcomes`."""
    parser.addoption("--under", choices=MODES, default="nothing", help="tools in whose scope each test runs")
    parser.addoption("--outcomes", type=Path, help="file for the outcome of each test")
    parser.addoption("--every", type=int, default=1, help="run about one test of so many")


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes in the process that the user started, which hears of the tests of its workers."""
    when_imported("torch", declare_operators)
    seed_generators()  # some modules of tests draw their parameters as they are imported
    if (file := config.getoption("--outcomes")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeRecorder(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--every` does not choose."""
    every = config.getoption("--every")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test in a scope of its own, with tools that no other test has used."""
    seed_generators()
    with amanda.apply(*make_tools(item.config.getoption("--under"))):
        return (yield)


class OutcomeRecorder:
    """Writes the outcome of each test into a file: {test: [outcome, last line of the error]}."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a phase of a test, unless an earlier phase has failed or been skipped."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, (report.outcome, error_message(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported as a test that fails."""
        if report.failed:
            self.outcomes[report.nodeid] = ("failed", str(report.longrepr))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self.file.write_text(json.dumps(self.outcomes))


def error_message(report: pytest.TestReport) -> str:
    """Return the message of the exception that ended a test, without line breaks, or an empty text."""
    if not report.failed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash else report.longrepr).split())


def make_tools(mode: str) -> list[amanda.Tool]:
    """Return new tools for a mode."""
    match mode:
        case "look":
            return [Silent()]
        case "equal":
            return [EqualCopies(copy_tensor)]
        case "tools":
            return [FlopsTool(), NanTool(), StatsTool()]
        case _:
            return []


def declare_operators() -> None:
    """Declare operators of torchvision, which cannot be imported without them and which a CPU build lacks."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)


def seed_generators() -> None:
    """Set the random generators of Python, NumPy, and each framework that the suite has imported."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(0)


def copy_tensor(value: Any) -> Any:
    """Return an equal new tensor for a tensor, and other values as they are."""
    if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
        from copies import copied

        return copied(value)
    if (tensorflow := sys.modules.get("tensorflow")) and isinstance(value, tensorflow.Tensor):
        # A handle stands for a variable or an iterator; another handle would be another one.
        is_handle = value.dtype in (tensorflow.resource, tensorflow.variant)
        return value if is_handle else tensorflow.identity(value)
    if (jax := sys.modules.get("jax")) and isinstance(value, jax.Array):
        return value.copy()
    return value
